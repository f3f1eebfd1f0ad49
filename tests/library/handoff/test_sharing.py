"""Fan-in and fan-out: each rank's share, the proof that shares cover a room, and the bytes that come of it."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdtransfer.errors import Cause, LayoutMismatchError, LocalProtocolError
from pdtransfer.handoff.effects import RoomDrained, RoomFailed, RoomLanded, RoomReady
from pdtransfer.handoff.prefix import prefix_rows
from pdtransfer.handoff.sharing import holds_of, pair_share, share_of, uncovered, wrong_fields
from pdtransfer.layout.layout import Component, Span
from pdtransfer.layout.pairing import pair
from pdtransfer.wire import Holds, Identity, Ranks
from tests.support.layout_tensors import Model, Pool, mha, mla
from tests.support.rank_grid import Grid, Part

LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
GQA, MLA = (
    Part("kv", mha(layers=range(4), heads=range(4), head_bytes=8)),
    Part("kv", mla(layers=range(4), head_bytes=32)),
)
GQA2 = Part("kv", mha(layers=range(3), heads=range(2), head_bytes=4))
INDEX = Part("index", mla(layers=range(3), head_bytes=4, dtype="uint8"), memory="hbm")
WINDOW = Part("window", mha(layers=range(2), heads=range(2), head_bytes=4), span=Span("last", 9))
C4 = Part("c4", mla(layers=range(4), head_bytes=12), tokens_per_row=4)
STATE = Part("state", mha(layers=range(2), heads=range(4), head_bytes=16), span=Span("once"))


Size = tuple[int, int]  # tensor-parallel ranks, stages


def whole(model: Model, name: str = "page_first") -> Component:
    return Part("kv", model).component(Pool(name=name, model=model, page_size=1, slots=8))


# Bytes


@pytest.mark.parametrize("layouts", [(a, b) for a in LAYOUTS for b in LAYOUTS if a != "page_first" or b == "page_head"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (2, 1)), ((4, 1), (2, 1)), ((2, 1), (4, 1)),
        ((1, 2), (1, 1)), ((2, 2), (1, 1)), ((2, 2), (2, 1)), ((4, 1), (1, 1)), ((1, 2), (2, 2)), ((1, 1), (1, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_every_rank_gets_every_row_once_whatever_the_order_of_cells_messages_and_writes(
    prefill: Size, decode: Size, layouts: tuple[str, str]
) -> None:
    for part in (GQA, MLA, GQA2):
        check_lands([part], prefill, decode, layouts, tokens=13, seed=1)


def check_lands(
    parts: list[Part],
    prefill: tuple[int, int],
    decode: tuple[int, int],
    layouts: tuple[str, str],
    tokens: int,
    seed: int,
) -> None:
    shuffle = random.Random(seed)
    pages = 1 << shuffle.randint(0, 3), 1 << shuffle.randint(0, 3)
    grid = Grid(parts, prefill=prefill, decode=decode, layouts=layouts, page_sizes=pages, shuffle=shuffle)
    for rank in grid.decode:  # slots of others, so that no two components' rows lie alike
        rank.core.arena.allocate([shuffle.randint(0, 9) for _ in rank.components])
    prefix = shuffle.choice([0, 0, shuffle.randint(0, tokens)])
    for act in shuffle.sample([grid.open, partial(grid.expect, prefix=prefix)], 2):
        act(7, tokens)
    grid.send(7, tokens)
    grid.run()
    for rank in grid.decode:
        (ready,) = rank.events_of(RoomReady)
        whole_bytes = sum(
            component.bytes_of(component.rows(tokens) - prefix_rows(component, prefix))
            for component in rank.components.values()
        )
        assert isinstance(ready, RoomReady)
        assert grid.landed_right(rank, ready, tokens, prefix)
        assert (ready.kv_bytes, grid.written.get(rank.name, 0)) == (whole_bytes, whole_bytes)
        assert ready.aux == b"aux of p0", "the first source's, whether it sends rows or not"
        rank.core.release(7, grid.now)
        assert rank.core.idle
    for rank in grid.prefill:
        assert len(rank.events_of(RoomLanded)) == len(rank.events_of(RoomDrained)) == 1
        assert rank.core.idle


test_rooms_of_any_components_land_whole = given(
    st.lists(
        st.sampled_from([GQA, INDEX, WINDOW, C4, STATE]), min_size=1, max_size=4, unique_by=lambda part: part.name
    ),
    st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]),
    st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2)]),
    st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    st.integers(1, 40),
    st.integers(0, 1 << 32),
)(check_lands)


def test_equal_holders_share_the_decode_ranks_among_them() -> None:
    grid = Grid([MLA], prefill=(2, 1), decode=(4, 1), shuffle=random.Random(2))
    grid.open(1, 8)
    grid.expect(1, 8)
    grid.send(1, 8)
    grid.run()
    assert grid.senders == {"d0": {"p0"}, "d1": {"p1"}, "d2": {"p0"}, "d3": {"p1"}}


# Who gives up


def test_a_room_given_up_by_one_decode_rank_fails_on_every_prefill_rank_and_every_decode_rank() -> None:
    grid = Grid([GQA], prefill=(2, 1), decode=(2, 1), shuffle=random.Random(3))
    grid.open(1, 8)
    grid.expect(1, 8)
    grid.run()
    grid.take(grid.decode[0], grid.decode[0].core.abort(1, grid.now))
    grid.run()
    for rank in grid.prefill:
        assert [effect.cause for effect in rank.events_of(RoomFailed)] == [Cause.ABORTED]
        assert rank.events_of(RoomDrained)
        assert rank.core.idle
    assert [effect.cause for rank in grid.decode for effect in rank.events_of(RoomFailed)] == [Cause.ABORTED] * 2
    assert all(rank.core.idle for rank in grid.decode)


def test_a_rank_with_nothing_to_send_learns_that_the_room_was_given_up() -> None:
    grid = Grid([MLA], prefill=(2, 1), decode=(1, 1), shuffle=random.Random(4))
    grid.open(1, 8)
    grid.expect(1, 8)
    grid.run()
    grid.take(grid.decode[0], grid.decode[0].core.abort(1, grid.now))
    grid.run()
    assert [effect.cause for effect in grid.prefill[1].events_of(RoomFailed)] == [Cause.ABORTED]


def test_the_engines_failure_on_a_rank_with_nothing_to_send_fails_the_room() -> None:
    grid = Grid([MLA], prefill=(2, 1), decode=(1, 1), shuffle=random.Random(5))
    grid.open(1, 8)
    grid.expect(1, 8)
    grid.run()
    grid.take(grid.prefill[1], grid.prefill[1].core.abort(1, grid.now, Cause.ENGINE, "out of luck"))
    grid.run()
    assert [(effect.cause, effect.detail) for effect in grid.decode[0].events_of(RoomFailed)] == [
        (Cause.ENGINE, "p1: out of luck")
    ]
    assert [effect.cause for effect in grid.prefill[0].events_of(RoomFailed)] == [Cause.ABORTED]


# Coverage


@pytest.mark.parametrize(
    ("part", "prefill", "sources", "text"),
    [
        (GQA, (2, 1), ["p0"], "component 'kv' layers 0..3 heads 2..3: no rank of p0 sends it"),
        (GQA, (2, 2), ["p0", "p1", "p3"], "component 'kv' layers 2..3 heads 0..1: no rank of p0, p1, p3 sends it"),
        (GQA, (1, 2), ["p1"], "component 'kv' layers 0..1 heads 0..3: no rank of p1 sends it"),
        (MLA, (2, 1), ["p1"], "component 'kv' layers 0..3 heads 0: no rank of p1 sends it"),
        (GQA2, (4, 1), ["p0", "p1", "p3"], "component 'kv' layers 0..2 heads 1: no rank of p0, p1, p3 sends it"),
    ],
)
def test_a_room_that_its_sources_do_not_cover_fails_at_once_and_leases_nothing(
    part: Part, prefill: Size, sources: list[str], text: str
) -> None:
    grid = Grid([part], prefill=prefill, decode=(1, 1), shuffle=random.Random(6))
    grid.expect(1, 8, sources)
    grid.run()
    (failed,) = grid.decode[0].events
    assert (failed.cause, failed.detail) == (Cause.PEER_LOST, text)
    assert grid.decode[0].core.idle
    assert grid.decode[0].core.arena.free[0].free_slots == 64
    grid.expect(2, 8, sources)
    assert grid.decode[0].events[1].detail == text, "sessions are up: it fails before anything is sent"
    grid.expect(3, 8)
    grid.open(3, 8)
    grid.send(3, 8)
    grid.run()
    assert isinstance(grid.decode[0].events[-1], RoomReady), "the whole group serves the next room"


def test_planes_that_two_ranks_send_are_named_with_both() -> None:
    kv = whole(mha(layers=range(4), heads=range(4)))
    shares = {
        "a": share_of([kv], [Holds("kv", 0, 3, 0, 4)], 0),
        "b": share_of([kv], [Holds("kv", 2, 4, 0, 2)], 0),
        "c": share_of([kv], [Holds("kv", 2, 4, 2, 4)], 0),
    }
    assert uncovered([kv], shares) == "component 'kv' layers 2 heads 0..1: more than one rank sends it: a, b"
    assert uncovered([kv], {"a": shares["a"], "b": (), "c": shares["a"]}).endswith("more than one rank sends it: a, c")
    assert uncovered([kv], {"a": share_of([kv], [], 0)}) == ""
    assert uncovered([kv], {"a": ()}) == "component 'kv' layers 0..3 heads 0..3: no rank of a sends it"


@given(st.data())
def test_shares_of_random_rectangles_cover_exactly_where_a_count_of_heads_is_given(data: st.DataObject) -> None:
    model = mha(layers=data.draw(st.just(range(2, 5))), heads=range(4))
    kv = whole(model, data.draw(st.sampled_from(LAYOUTS)))
    edges = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted).filter(lambda edge: edge[0] < edge[1])
    claims = [(*data.draw(edges), *data.draw(edges)) for _ in range(data.draw(st.integers(1, 4)))]
    shares = {f"p{index}": share_of([kv], [Holds("kv", *claim)], 0) for index, claim in enumerate(claims)}
    senders = {
        (layer, head): [index for index, (a, b, c, d) in enumerate(claims) if a <= layer < b and c <= head < d]
        for layer in model.layers
        for head in model.heads
    }
    wrong = [place for place, sender in senders.items() if len(sender) != 1]
    text = uncovered([kv], shares)
    assert bool(text) == bool(wrong)
    if wrong:
        layer, head = wrong[0]
        named = re.fullmatch(
            r"component 'kv' layers (.*) heads (.*): (?:more than one rank sends it: (.*)|no rank .*)", text
        )
        assert named is not None
        layers, heads = ([int(number) for number in numbers(named[group])] for group in (1, 2))
        assert {(layer, other) for layer in layers for other in heads} <= set(wrong)
        assert (layer, head) in itertools.product(layers, heads)
        if senders[layer, head]:
            assert named[3].split(", ") == [f"p{sender}" for sender in senders[layer, head]]
        else:
            assert named[3] is None


def numbers(text: str) -> Iterator[int]:
    for each in text.split(", "):
        first, _, last = each.partition("..")
        yield from range(int(first), int(last or first) + 1)


def test_a_share_that_is_the_whole_is_the_component_itself() -> None:
    kv = whole(mha())
    assert share_of([kv], holds_of([kv], Ranks(), {}), 0)[0] is kv
    assert share_of([kv], (), 3)[0] is kv


# Pairing


def test_a_pool_pairs_with_any_part_of_itself_and_with_nothing_beyond() -> None:
    ours, theirs = whole(mha(layers=range(4)), "layer_first").layout, whole(mha(layers=range(4)), "page_head").layout
    part = theirs.layers(1, 3).heads(2, 4)
    paired, direct = pair_share(ours, part), pair(ours.layers(1, 3).heads(2, 4), part)
    assert np.array_equal(paired.table, direct.table)
    assert np.array_equal(pair_share(ours, theirs).table, pair(ours, theirs).table)
    for less, named in ((ours.layers(1, 2), "layers: source 1, target 1..2"), (ours.heads(0, 3), "heads: source 2")):
        with pytest.raises(LayoutMismatchError, match=named):
            pair_share(less, part)


def test_a_kind_that_decode_lacks_is_a_difference_and_a_dtype_too() -> None:
    ours = whole(mha()).layout
    only_k = msgspec.structs.replace(ours, planes=tuple(plane for plane in ours.planes if plane.kind == "k"))
    with pytest.raises(LayoutMismatchError, match="kinds: source k, v, target k"):
        pair_share(ours, only_k)
    with pytest.raises(LayoutMismatchError, match="dtype: source bfloat16, target float16"):
        pair_share(ours, whole(mha(dtype="float16")).layout.layers(0, 1))


# What may be claimed

THEIRS = Identity("p0", "prefill", 1, Ranks(1, 2, 0, 2), "m", b"w", 64)
OURS = Identity("d0", "decode", 1, Ranks(), "m", b"w", 64)


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"ranks": Ranks(2, 2)}, "ranks.tp_rank", "2, must be below tp_size 2"),
        ({"ranks": Ranks(0, 1, 5, 2)}, "ranks.pp_rank", "5, must be below pp_size 2"),
        ({"ranks": Ranks(0, 1, 0, 1, 3, 3)}, "ranks.dp_rank", "3, must be below dp_size 3"),
        ({"holds": (Holds("kv", 0, 2, 0, 1), Holds("kv", 2, 3, 0, 1))}, "holds[1].component", "'kv' twice"),
        ({"holds": (Holds("kv", 0, 9, 0, 1),)}, "holds[0].layer_end", "layers 0..8 of 'kv', which has 0..2"),
        ({"holds": (Holds("kv", 0, 3, 0, 5),)}, "holds[0].head_end", "heads 0..4 of 'kv', which has 0..3"),
        ({"holds": (Holds("kv", 2, 2, 0, 1),)}, "holds[0].layer_end", "layers [2, 2), an empty range"),
        ({"holds": (Holds("kv", 0, 3, 3, 1),)}, "holds[0].head_end", "heads [3, 1), an empty range"),
        ({"holds": (Holds("kv", 0, 3, 0, 1, 2, 2),)}, "holds[0].replica", "2, must be below replicas 2"),
        ({"holds": (Holds("kv", 0, 3, 0, 1, 1, 256),)}, "holds[0].replicas", "256, must be at most tp_size 2"),
    ],
)
def test_a_claim_that_cannot_be_is_named_by_its_field(changes: dict[str, object], field: str, text: str) -> None:
    kv = whole(mha())
    assert wrong_fields(msgspec.structs.replace(THEIRS, **changes), OURS, [kv]) == [(field, text)]
    assert wrong_fields(THEIRS, OURS, [kv]) == []


def test_a_decode_rank_of_a_group_cannot_judge_what_lies_beyond_its_own_part() -> None:
    kv, all_of_it = whole(mha(layers=range(2), heads=range(2))), (Holds("kv", 0, 8, 0, 8),)
    theirs, ours = (
        msgspec.structs.replace(THEIRS, holds=all_of_it),
        msgspec.structs.replace(OURS, ranks=Ranks(0, 4, 0, 4)),
    )
    assert wrong_fields(theirs, ours, [kv]) == []
    assert share_of([kv], all_of_it, 0)[0] is kv


@pytest.mark.parametrize(
    ("ranks", "replicas", "named"),
    [
        (Ranks(2, 2), {}, r"ranks\.tp_rank: 2, must be below tp_size 2"),
        (Ranks(), {"kv": (0, 2)}, r"holds\[0\]\.replicas: 2, must be at most tp_size 1"),
        (Ranks(0, 4), {"kv": (3, 2)}, r"holds\[0\]\.replica: 3, must be below replicas 2"),
        (Ranks(), {"index": (0, 1)}, r"replicas: \['index'\] are not among the components \['kv'\]"),
    ],
)
def test_our_own_claims_are_checked_where_they_are_made(
    ranks: Ranks, replicas: dict[str, tuple[int, int]], named: str
) -> None:
    with pytest.raises(LocalProtocolError, match=named):
        holds_of([whole(mha())], ranks, replicas)


def test_holds_are_the_box_of_a_pools_planes() -> None:
    part = whole(replace(mha(), layers=range(3, 7), heads=range(2, 4)), "page_head")
    assert holds_of([part], Ranks(1, 2), {"kv": (1, 2)}) == (Holds("kv", 3, 7, 2, 4, 1, 2),)
