"""Both sides with real clients, and numpy arrays in place of SGLang's KV pools."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

from pdtransfer import Cause, KVPoll, RoomAsked, RoomDrained, RoomFailed, RoomLanded, RoomLeased
from pdtransfer.adapters.kit.peers import room_of
from pdtransfer.adapters.sglang.prefill import SendingSide
from pdtransfer.errors import LocalProtocolError
from pdtransfer.wire import Ranks
from tests.library.adapters.sglang.sglang_ranks import (
    AUX,
    HEADS,
    LAYERS,
    WIDTH,
    Rank,
    World,
    described_of,
    rows,
    slots_of,
    world,
)
from tests.library.adapters.warnings_in_a_row import in_a_row
from tests.support.polled_client import PolledClient
from tests.support.waiting import wait_for


def landed(made: World, source: object, target: object, tokens: int, *, prefix: int = 0) -> bool:
    """Whether tokens [prefix, tokens) of these pages are the same on both sides."""
    p, d = made.prefill[0].pool.page_size, made.decode[0].pool.page_size
    here = rows(made.prefill, slots_of(source, p)[prefix:tokens])
    return np.array_equal(here, rows(made.decode, slots_of(target, d)[: tokens - prefix]), equal_nan=True)


def test_a_request_lands_in_the_pages_that_decode_chose(engines: World) -> None:
    before = engines.decode[0].pool.kv.copy()
    engines.hand_over(7, source=[5, 2, 9], target=[1, 8, 4])
    assert landed(engines, [5, 2, 9], [1, 8, 4], 12)
    assert engines.decode[0].aux == {3: AUX}
    others = np.setdiff1d(np.arange(before.shape[2]), slots_of([1, 8, 4], 4))
    assert np.array_equal(engines.decode[0].pool.kv[:, :, others], before[:, :, others])
    assert engines.decode[0].side.is_drained(7)


def test_prefill_waits_until_decode_has_memory_and_either_may_come_first(engines: World) -> None:
    sent = engines.begin(7)
    assert engines.prefill[0].state(7) is KVPoll.BOOTSTRAPPING
    engines.expect(7, [1, 8])
    engines.until(7, KVPoll.WAITING_FOR_INPUT, engines.prefill)
    assert (sent.tokens, sent.prefix) == (8, 0)
    assert sent.leased_s is not None
    engines.push(7, [5, 2], aux=AUX)
    engines.until(7, KVPoll.SUCCESS)
    assert sent.kv_bytes == 2 * LAYERS * 8 * HEADS * WIDTH * 4


def test_chunks_land_before_the_last_one_is_computed(engines: World) -> None:
    engines.meet(7, [1, 8, 4])
    engines.push(7, [5, 2])
    wait_for(lambda: landed(engines, [5, 2], [1, 8], 8))
    assert engines.decode[0].state(7) is KVPoll.BOOTSTRAPPING
    engines.push(7, [9], first_page=2, aux=AUX)
    engines.until(7, KVPoll.SUCCESS)
    assert landed(engines, [5, 2, 9], [1, 8, 4], 12)


class Computed(Event):
    """As an engine's event: it has fired once it is set."""

    query = Event.is_set


@pytest.mark.parametrize("page", [1, 4, 8, 16])
def test_pages_leave_when_they_are_computed_and_only_once(page: int) -> None:
    """Each chunk is offered before its step has ended, and comes again with the step's result."""
    with world(prefill_page=4, decode_page=page) as made:
        side, pool = made.prefill[0].side, made.prefill[0].pool
        source, target, steps = [5, 2, 9], list(range(1, 1 + -(-12 // page))), [Computed(), Computed()]
        made.meet(7, target)
        side.push_ahead(7, np.array([5]), start=0, after=steps[0], last=False)
        side.push_ahead(7, np.array([2, 9]), start=4, after=steps[1], last=True)
        for step, tokens in zip(steps, (4, 12), strict=True):
            assert not landed(made, source, target, tokens)
            step.set()
            wait_for(lambda tokens=tokens: landed(made, source, target, tokens))
        computed = pool.kv.copy()
        pool.kv[:] = 0
        made.push(7, [5])
        made.push(7, [2, 9], first_page=1, aux=AUX)
        made.until(7, KVPoll.SUCCESS)
        pool.kv[:] = computed
        assert landed(made, source, target, 12)


@pytest.mark.parametrize(("prefill_page", "decode_page"), [(1, 16), (16, 1), (4, 16), (16, 4), (64, 1)])
@pytest.mark.parametrize("tokens", [5, 16, 23])
def test_page_sizes_differ(prefill_page: int, decode_page: int, tokens: int) -> None:
    with world(prefill_page=prefill_page, decode_page=decode_page) as made:
        source = list(range(128 // prefill_page))[::-1][: -(-tokens // prefill_page)]
        target = list(range(1, 128 // decode_page))[: -(-tokens // decode_page)]
        made.hand_over(7, source=source, target=target)
        assert landed(made, source, target, tokens)


@pytest.mark.parametrize("pages", [(4, 4), (8, 4), (4, 8), (16, 4)])
def test_what_decode_has_is_not_sent(pages: tuple[int, int]) -> None:
    """Decode's radix cache has the first 8 tokens, which may be no whole page of prefill."""
    with world(prefill_page=pages[0], decode_page=pages[1]) as made:
        tokens, count = 20, -(-20 // pages[0])
        target = list(range(2, 2 + -(-12 // pages[1])))
        made.meet(7, target, prefix=8)
        prefix = made.prefill[0].side.prefix(7)
        assert prefix == 8 // pages[0] * pages[0]
        source = list(range(count))[::-1]
        made.push(7, source[prefix // pages[0] :], aux=AUX)
        made.until(7, KVPoll.SUCCESS)
        assert landed(made, source, target, tokens, prefix=8)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_ranks_share_the_heads_out(sizes: tuple[int, int]) -> None:
    with world(prefill_tp=sizes[0], decode_tp=sizes[1]) as made:
        made.hand_over(7, source=[5, 2, 9], target=[1, 8, 4])
        assert landed(made, [5, 2, 9], [1, 8, 4], 12)
        assert all(rank.aux == {3: AUX} for rank in made.decode)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_every_rank_has_the_whole_latent(sizes: tuple[int, int]) -> None:
    with world(prefill_tp=sizes[0], decode_tp=sizes[1], latent=True) as made:
        made.hand_over(7, source=[5, 2, 9], target=[1, 8, 4])
        for rank in made.decode:
            assert np.array_equal(
                rank.pool.kv[:, :, slots_of([1, 8, 4], 4)],
                made.prefill[0].pool.kv[:, :, slots_of([5, 2, 9], 4)], equal_nan=True,
            )  # fmt: skip


@pytest.mark.given(prefill_dp=2)
def test_ranks_of_dp_attention_are_engines_of_their_own(engines: World) -> None:
    """Each has whole rows of its own requests, and decode takes from both at once."""
    one, two = [World([rank], engines.decode) for rank in engines.prefill]
    one.meet(7, [1, 8, 4])
    two.meet(8, [2, 9, 5], aux_index=4)
    two.push(8, [5, 2, 9], aux=AUX[::-1])
    one.push(7, [5, 2, 9], aux=AUX)
    one.until(7, KVPoll.SUCCESS)
    two.until(8, KVPoll.SUCCESS)
    assert landed(one, [5, 2, 9], [1, 8, 4], 12)
    assert landed(two, [5, 2, 9], [2, 9, 5], 12)
    assert engines.decode[0].aux == {3: AUX, 4: AUX[::-1]}


@pytest.mark.given(states=("swa", "dsa", "mamba"))
def test_states_are_sent_by_their_own_indices(engines: World) -> None:
    """A window's last two pages, the index of each page behind decode's prefix, and the state of the request."""
    sent, got = ([np.array(each) for each in found] for found in (([6, 1], [5, 2], [4]), ([3, 0], [1, 8], [2])))
    engines.hand_over(
        7, source=[5, 2], target=[1, 8], states=sent, decode={"prefix": 4, "states": got},
    )  # fmt: skip
    ours, theirs = engines.prefill[0].pool.arrays, engines.decode[0].pool.arrays
    assert landed(engines, [0, 5, 2], [1, 8], 12, prefix=4)
    window = rows(engines.prefill, slots_of([6, 1], 4), "swa")
    assert np.array_equal(window, rows(engines.decode, slots_of([3, 0], 4), "swa"), equal_nan=True)
    assert np.array_equal(ours["dsa"][:, [5, 2]], theirs["dsa"][:, [1, 8]])
    assert np.array_equal(ours["mamba"][:, 4], theirs["mamba"][:, 2])
    assert not theirs["mamba"][:, [0, 1, 3, 4, 5]].any()


@pytest.mark.given(prefill_tp=2, decode_tp=2, states=("minimax_index_k", "minimax_dense_kv"))
def test_nothing_of_a_prefix_is_sent_where_sglang_names_its_pages(engines: World) -> None:
    """Of MiniMax's layers without an index it names all pages of the request; decode has those of the prefix."""
    engines.prefill[1].pool.arrays["minimax_index_k"][:] = engines.prefill[0].pool.arrays["minimax_index_k"]
    sent, got = ([np.array(pages) for pages in found] for found in (([5, 2], [0, 5, 2]), ([1, 8], [4, 1, 8])))
    engines.hand_over(7, source=[5, 2], target=[1, 8], states=sent, decode={"prefix": 4, "states": got})
    for source, target in zip(engines.prefill, engines.decode, strict=True):
        for name in source.pool.states:
            computed, landed_items = source.pool.arrays[name], target.pool.arrays[name]
            assert np.array_equal(computed[:, [5, 2]], landed_items[:, [1, 8]])
            assert not np.delete(landed_items, [1, 8], axis=1).any()


@pytest.mark.parametrize(
    ("sizes", "misfit"), [((1, 2), "384, target 192"), ((2, 1), "192, target 384|minimax_dense_kv")]
)
def test_layers_without_an_index_need_as_many_ranks(sizes: tuple[int, int], misfit: str) -> None:
    states = ("minimax_index_k", "minimax_dense_kv")
    with world(prefill_tp=sizes[0], decode_tp=sizes[1], states=states) as made:
        made.expect(7, [1], states=[np.array([3]), np.array([2])])
        made.begin(7)
        made.until(7, KVPoll.FAILED, made.decode)
        assert re.search(rf"components\[2\].*row_bytes: source {misfit}", made.decode[0].states[7][-1].reason)


@pytest.mark.parametrize("pages", [(4, 16), (16, 4)])
def test_windows_begin_at_pages_of_either_size(pages: tuple[int, int]) -> None:
    """Of 40 tokens the last 10 are seen; each side has the pages that hold them."""
    with world(prefill_page=pages[0], decode_page=pages[1], states=("swa",)) as made:
        first = [30 // page for page in pages]
        counts = [-(-40 // page) for page in pages]
        windows = [np.arange(count - begin)[::-1] for count, begin in zip(counts, first, strict=True)]
        made.hand_over(
            7, source=range(counts[0]), target=range(counts[1]), states=[windows[0]], decode={"states": [windows[1]]}
        )
        ours = slots_of(windows[0], pages[0])[30 - first[0] * pages[0] :][:10]
        theirs = slots_of(windows[1], pages[1])[30 - first[1] * pages[1] :][:10]
        assert np.array_equal(rows(made.prefill, ours, "swa"), rows(made.decode, theirs, "swa"), equal_nan=True)


@pytest.mark.given(prefill_page=1, decode_page=1)
def test_a_request_whose_last_page_is_missing_is_refused(engines: World) -> None:
    refused = pytest.raises(LocalProtocolError, match="slots of 'kv': slot -1 is outside")
    with refused:
        engines.expect(7, [1, -1])


def test_a_number_may_be_used_again(engines: World) -> None:
    for source, target in (([5], [1]), ([2], [8])):
        engines.hand_over(7, source=source, target=target)
        assert landed(engines, source, target, 4)
        for rank in engines.prefill:
            rank.side.give_up(7)
            rank.states.clear()
        engines.decode[0].states.clear()


def test_decode_gives_up_before_prefill_has_learned_of_it_and_asks_again(engines: World) -> None:
    """Prefill finds a room that decode has given up: the request fails, and the next try works."""
    engines.expect(7, [1])
    wait_for(lambda: engines.prefill[0].turn() or engines.prefill[0].side._meetings._asked)
    engines.decode[0].side.give_up(7)
    wait_for(lambda: engines.decode[0].turn() or engines.decode[0].side.is_drained(7))
    engines.begin(7)
    engines.until(7, KVPoll.FAILED, engines.prefill)
    assert "d0 gave it up" in engines.prefill[0].states[7][-1].reason
    engines.meet(7, [8])
    engines.push(7, [5], aux=AUX)
    engines.until(7, KVPoll.SUCCESS)
    assert landed(engines, [5], [8], 4)


def test_prefill_gives_up_before_decode_asks_and_decode_does_not_wait(engines: World) -> None:
    """Decode would hold its pages until its deadline. The number may be used again."""
    engines.begin(7)
    engines.prefill[0].side.give_up(7)
    engines.expect(7, [1, 8])
    wait_for(lambda: engines.prefill[0].turn() or engines.decode[0].state(7) is KVPoll.FAILED)
    reason = f"aborted: {engines.sources[0]}: its request was given up before"
    assert engines.decode[0].states[7][-1].reason == reason
    wait_for(lambda: engines.decode[0].turn() or engines.decode[0].side.is_drained(7))
    engines.hand_over(7, source=[5, 2], target=[1, 8])
    assert landed(engines, [5, 2], [1, 8], 8)


def test_a_request_that_decode_gives_up_before_it_has_pages_fails_at_prefill(engines: World) -> None:
    """Prefill would wait for decode's pages until SGLang's own limit, which is minutes."""
    engines.begin(7)
    engines.decode[0].side.withdraw(7, engines.sources, "SGLang gave it up")
    engines.until(7, KVPoll.FAILED, engines.prefill)
    assert engines.prefill[0].states[7][-1].reason.endswith("gave it up: bootstrap_room 7: SGLang gave it up")
    engines.hand_over(7, source=[5, 2], target=[1, 8])


@pytest.mark.given(decode_tp=2)
def test_a_request_that_one_rank_cannot_ask_for_fails_everywhere_and_its_number_may_be_used_again(
    engines: World,
) -> None:
    """The ranks number the uses of it alike."""
    engines.begin(7)
    given: dict[str, Any] = {"prefix": 0, "states": [], "aux_index": 3, "sources": engines.sources}
    engines.decode[0].side.expect(7, np.array([1], np.int32), **given)
    with pytest.raises(LocalProtocolError):
        engines.decode[1].side.expect(7, np.array([10**6], np.int32), **given)
    engines.until(7, KVPoll.FAILED, [*engines.prefill, engines.decode[0]])
    wait_for(lambda: engines.decode[0].turn() or engines.decode[0].side.is_drained(7))
    engines.hand_over(7, source=[5, 2], target=[1, 8])


@pytest.mark.given(decode_weights=b"x")
def test_a_request_whose_engines_do_not_fit_fails_on_both_sides(engines: World) -> None:
    """Prefill never meets a Grant of it, and SGLang's limit for that is minutes."""
    engines.begin(7)
    engines.expect(7, [1, 8])
    engines.until(7, KVPoll.FAILED, engines.prefill)
    engines.until(7, KVPoll.FAILED, engines.decode)
    for side in (engines.prefill, engines.decode):
        assert "weights: d0 has '78'" in side[0].states[7][-1].reason


def test_requests_that_fail_one_after_the_other_are_a_warning_on_decode(caplog: pytest.LogCaptureFixture) -> None:
    with world(decode_weights=b"x") as made:
        for room in range(1, 7):
            made.begin(room)
            made.expect(room, [1, 8])
            made.until(room, KVPoll.FAILED)
            wait_for(lambda room=room: made.decode[0].turn() or made.decode[0].side.is_drained(room))
            assert len(in_a_row(caplog)) == (1 if room >= 5 else 0), "prefill is told that decode gave it up"
    [text] = in_a_row(caplog)
    assert "weights: d0 has '78'" in text
    assert "run `pdtransfer doctor" in text


def test_requests_that_fail_now_and_then_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with world() as made:
        for room in range(1, 10):  # each second one has metadata of another size, as decode finds
            made.meet(room, [1])
            made.push(room, [5], aux=b"short" if room % 2 else AUX)
            made.until(room, KVPoll.FAILED if room % 2 else KVPoll.SUCCESS, made.decode)
            wait_for(lambda room=room: made.decode[0].turn() or made.decode[0].side.is_drained(room))
    assert in_a_row(caplog) == []


def test_requests_that_fail_one_after_the_other_are_a_warning_on_prefill(caplog: pytest.LogCaptureFixture) -> None:
    client = PolledClient()
    with world() as made:
        pool = made.prefill[0].pool
        described = described_of(pool, Ranks(), False, lambda _: (pool.raw.ctypes.data, "dram"))
        side = SendingSide(cast("Any", client), described, time_left_s=600.0)
        for number in range(1, 13):
            room, landed = room_of(number, 0), number == 6
            end = RoomLanded(room, 8) if landed else RoomFailed(room, Cause.DEADLINE, "not landed in time")
            client.events = [RoomAsked(room, 8, 0), RoomLeased(room, 8, 0), end, RoomDrained(room)]
            side.begin(number)
            side.turn()
            assert len(in_a_row(caplog)) == (0 if number < 5 else 1 if number < 11 else 2)
    assert "deadline: not landed in time. What to do: check that the router sends" in in_a_row(caplog)[0]


@pytest.mark.parametrize("pushed", [False, True])
def test_decode_gives_up_and_prefill_fails(engines: World, pushed: bool) -> None:
    engines.meet(7, [1, 8])
    if pushed:
        engines.push(7, [5])
    engines.decode[0].side.give_up(7)
    engines.until(7, KVPoll.FAILED, engines.prefill)
    assert "d0 gave it up" in engines.prefill[0].states[7][-1].reason
    wait_for(lambda: engines.decode[0].turn() or engines.decode[0].side.is_drained(7))
    assert 7 not in engines.decode[0].states  # SGLang knows what it gave up
    engines.hand_over(8, source=[5, 2], target=[1, 8])  # its pages are free


@pytest.mark.parametrize("pushed", [False, True])
def test_prefill_gives_up_and_decode_fails(engines: World, pushed: bool) -> None:
    engines.meet(7, [1, 8])
    if pushed:
        engines.push(7, [5])
    engines.prefill[0].side.give_up(7)
    engines.until(7, KVPoll.FAILED, engines.decode)
    why = "aborted" if pushed else "bootstrap_room 7 was given up"
    assert engines.decode[0].states[7][-1].reason == f"aborted: {engines.sources[0]}: {why}"
    wait_for(lambda: engines.decode[0].turn() or engines.decode[0].side.is_drained(7))
    engines.push(7, [2], first_page=1, aux=AUX)  # a chunk that was under way
    assert engines.prefill[0].state(7) is KVPoll.WAITING_FOR_INPUT  # nothing more is reported


@contextmanager
def silent(rank: Rank) -> Iterator[None]:
    """The rank's own thread answers nobody."""
    event, go_on = Event(), Event()

    def block() -> None:
        event.set()
        go_on.wait()

    rank.client._port.to_loop(block)
    assert event.wait(60.0)
    try:
        yield
    finally:
        go_on.set()


@pytest.mark.parametrize("host", [False, True])
def test_pages_are_held_while_they_may_be_written(host: bool) -> None:
    """A writer that does not answer: the request ends at once, and its pages stay until it has said that it is done."""
    with world(host=host) as made:
        made.meet(7, [1, 8], host=host)
        made.push(7, [5])
        decode = made.decode[0]
        with silent(made.prefill[0]):
            decode.side.give_up(7)
            for _ in range(25):
                decode.turn()
                assert not decode.side.is_drained(7)
                time.sleep(0.02)
        wait_for(lambda: decode.turn() or decode.side.is_drained(7))


def test_a_dead_prefill_fails_the_request_with_its_name(engines: World) -> None:
    engines.meet(7, [1])
    engines.prefill[0].client.close()
    engines.until(7, KVPoll.FAILED, engines.decode)
    assert engines.sources[0] in engines.decode[0].states[7][-1].reason


@pytest.mark.given(host=True)
def test_requests_land_in_host_memory_or_in_the_cache_one_by_one(engines: World) -> None:
    engines.hand_over(7, source=[5, 2], target=[1, 8], decode={"host": True})
    here = rows(engines.prefill, slots_of([5, 2], 4))
    assert np.array_equal(rows(engines.decode, slots_of([1, 8], 4), host=True), here, equal_nan=True)
    assert not engines.decode[0].pool.raw.any()
    engines.hand_over(8, source=[5, 2], target=[1, 8])
    assert landed(engines, [5, 2], [1, 8], 8)


def send_kvcache_hisparse(
    pools: tuple[np.ndarray, np.ndarray], page_size: int, prefill_kv_indices: np.ndarray, dst_kv_indices: np.ndarray,
    page_index_slice: slice,
) -> None:  # fmt: skip
    """What SGLang 0.5.10's call of this name does to both pools, (kinds, layers, slots, heads, width): prefill's pages
    become tokens, and the last page ends where decode's host tokens do."""
    source, target = pools
    tokens = slots_of(prefill_kv_indices, page_size)
    begin = page_index_slice.start * page_size
    into = dst_kv_indices[begin : min(page_index_slice.stop * page_size, len(dst_kv_indices))]
    target[:, :, into] = source[:, :, tokens[: len(into)]]


@pytest.mark.parametrize("page_size", [16, 64])
def test_calls_of_sglang_0_5_10_reach_the_same_host_rows(page_size: int) -> None:
    """Direct to host: `send_metadata(kv_indices)` has decode's host tokens, one a page; `send(kv_indices)` prefill's
    pages, a chunk at a time."""
    with world(prefill_page=page_size, decode_page=1, latent=True) as made:
        tokens = page_size + 7
        dst_kv_indices = np.random.default_rng(3).permutation(127)[:tokens].astype(np.int32) + 1
        wanted = made.decode[0].pool.kv.copy()
        made.meet(7, dst_kv_indices)
        at, chunks = 0, [np.array([1], np.int32), np.array([0], np.int32)]
        for kv_indices in chunks:
            index_slice = slice(at, at + len(kv_indices))
            at = index_slice.stop
            made.push(7, kv_indices, first_page=index_slice.start, aux=AUX if at == len(chunks) else None)
            both = made.prefill[0].pool.kv, wanted
            send_kvcache_hisparse(both, page_size, kv_indices, dst_kv_indices, index_slice)
        made.until(7, KVPoll.SUCCESS)
        assert np.array_equal(made.decode[0].pool.kv, wanted, equal_nan=True)


def test_metadata_of_another_size_fails_its_request_alone(engines: World) -> None:
    engines.meet(7, [1])
    engines.push(7, [5], aux=b"short")
    engines.until(7, KVPoll.FAILED, engines.decode)
    reason = engines.decode[0].states[7][-1].reason
    assert reason == "metadata of the request: 5 bytes were sent, this engine takes 128"
    assert engines.decode[0].aux == {}
    wait_for(lambda: engines.decode[0].turn() or engines.decode[0].side.is_drained(7))
    engines.hand_over(8, source=[5], target=[1])


def test_pages_are_not_reused_while_they_are_read(engines: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives them to another request as soon as `give_up` returns."""
    engines.meet(7, [1, 8])
    engines.push(7, [5])
    side, asked, may_drain, over = engines.prefill[0].side, Event(), Event(), Event()
    node = side._client._node
    abort = node.abort

    def late(room: int) -> None:
        asked.set()
        assert may_drain.wait(30.0)
        abort(room)

    monkeypatch.setattr(node, "abort", late)
    thread = Thread(target=lambda: (side.give_up(7), over.set()))
    thread.start()
    assert asked.wait(30.0)
    assert not over.wait(0.3)
    may_drain.set()
    assert over.wait(30.0)
    thread.join()
