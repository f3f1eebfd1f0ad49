"""Workers whose blocks differ exchange tokens; those whose blocks are alike exchange these as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer import Cause, LocalProtocolError, RoomDrained, RoomFailed, room_id
from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.vllm.drafter import KVLayers
from pdtransfer.adapters.vllm.kinds import PAGED
from pdtransfer.adapters.vllm.orders import KVGroup
from pdtransfer.adapters.vllm.pools import Pools, pools
from pdtransfer.adapters.vllm.token_rows import planes_of, too_many_planes
from pdtransfer.errors import ConfigError
from pdtransfer.handoff.component_variants import used_with
from pdtransfer.handoff.decode.records import SessionRecord
from pdtransfer.handoff.decode.waiting_rooms import Coverage
from pdtransfer.handoff.slot_allocator import SlotAllocator, aliases
from pdtransfer.layout.layout import Component
from pdtransfer.limits import PLANES_MAX
from pdtransfer.wire import Ranks
from tests.library.adapters.vllm.vllm_ranks import Rank, World, arena_cache, world
from tests.support.client_pair import Late
from tests.support.waiting import wait_for

LAYERS, BLOCKS, HEADS, SIZE = 2, 16, 2, 4
NAMES = [f"model.layers.{layer}.attn" for layer in range(LAYERS)]
PROMPT = 100


def described(cache: np.ndarray, base: int) -> Pools:
    """Of a cache float32 (layers, blocks, heads, tokens, keys and values), by blocks and by tokens, or by blocks alone
    where its tokens cannot be sent, as the connector has it. Engines with equal blocks have the same fact of them."""
    tokens = cache.shape[3]
    views = dict(zip(NAMES, torch.from_numpy(cache), strict=True))
    by_token = {name: view.transpose(1, 2) for name, view in views.items()}
    kinds = {name: {"k": view[..., :SIZE], "v": view[..., SIZE:]} for name, view in by_token.items()}
    groups = [(KVGroup(0, PAGED.of(tokens)), NAMES)]
    heads = Heads(HEADS, Ranks())
    described_by = partial(pools, views, groups, blocks=BLOCKS, locate=lambda _: (base, "dram"), heads=heads)
    if tokens.bit_count() > 1:
        with pytest.raises(ConfigError, match=f"page_size: {tokens} is not a power of two"):
            described_by(kinds=kinds)
        return described_by()
    return described_by().or_tokens(described_by(kinds=kinds), f"{tokens} tokens")


def tokens_of(cache: np.ndarray, blocks: list[int], count: int = PROMPT) -> np.ndarray:
    """The first tokens in these blocks, (tokens, layers, heads, numbers)."""
    by_token = np.moveaxis(cache[:, blocks], 3, 2)  # layers, blocks, tokens, heads, numbers
    return np.moveaxis(by_token.reshape(LAYERS, -1, HEADS, 2 * SIZE), 0, 1)[:count]


def blocks_of(prefill: Rank, seed: int) -> list[int]:
    """Blocks of prefill's for a prompt."""
    return np.random.default_rng(seed).permutation(BLOCKS)[: -(-PROMPT // prefill.cache.shape[3])].tolist()


def send(made: World, room: str, prefill: Rank, blocks: list[int], **more: Any) -> None:
    """Computes a prompt in two steps."""
    made.send(room, room, PROMPT, blocks, len(blocks) // 2, ranks=[prefill], **more)


def hand_over(made: World, room: str, prefill: Rank, source: list[int], target: list[int], **more: Any) -> None:
    made.receive(room, room, PROMPT, target, sources=(prefill.client.endpoint,), **more)
    send(made, room, prefill, source)
    made.until_received(room)


def by_layer(memory: np.ndarray, tokens: int, *, whole_blocks: bool) -> np.ndarray:
    """A cache, (layers, blocks, heads, tokens, keys and values), in this memory. With `whole_blocks` all layers of a
    block lie together."""
    order = (BLOCKS, LAYERS) if whole_blocks else (LAYERS, BLOCKS)
    cache = memory.reshape(*order, HEADS, tokens, 2 * SIZE)
    return cache.swapaxes(0, 1) if whole_blocks else cache


@contextmanager
def engines(
    decode_size: int, *prefill_sizes: int, whole_blocks: tuple[bool, bool] = (False, False)
) -> Iterator[tuple[World, Rank, list[Rank]]]:
    """One of decode and some of prefill. `whole_blocks` are prefill's and decode's."""
    with world() as made:
        for index, size in enumerate(prefill_sizes):
            numbers = np.random.default_rng(index).random(LAYERS * BLOCKS * HEADS * size * 2 * SIZE, np.float32)
            cache = by_layer(numbers, size, whole_blocks=whole_blocks[0])
            made.add_prefill(cache, described(cache, cache.ctypes.data), cache.ctypes.data)
        arena, numbers = arena_cache([LAYERS * BLOCKS * HEADS * decode_size * 2 * SIZE])
        target = by_layer(numbers, decode_size, whole_blocks=whole_blocks[1])
        yield made, made.add_decode(target, described(target, arena.mapping.address), arena), made.prefill


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(8, 32), (32, 8), (16, 64), (64, 16)])
def test_tokens_land_in_blocks_of_another_size(prefill_size: int, decode_size: int) -> None:
    blocks = [5, 3, 9, 1, 7, 2, 4, 6, 8, 10, 12, 11, 13][: -(-PROMPT // decode_size)]
    with engines(decode_size, prefill_size) as (made, decode, [prefill]):
        hand_over(made, "room", prefill, source := blocks_of(prefill, 1), blocks)
        assert np.array_equal(tokens_of(decode.cache, blocks), tokens_of(prefill.cache, source))
        assert np.count_nonzero(decode.cache) == PROMPT * LAYERS * HEADS * 2 * SIZE, "nothing behind the prompt"


@pytest.mark.parametrize("whole_blocks", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("prefill_size", "decode_size"), [(32, 32), (32, 8), (96, 96)])
def test_blocks_of_all_layers_pair_with_layers_that_lie_apart(
    prefill_size: int, decode_size: int, whole_blocks: tuple[bool, bool]
) -> None:
    """vLLM's layout BLHNC, on either side: blocks of equal sizes are sent as they are, others by tokens."""
    with engines(decode_size, prefill_size, whole_blocks=whole_blocks) as (made, decode, [prefill]):
        source, blocks = blocks_of(prefill, 5), list(range(1, 1 + -(-PROMPT // decode_size)))
        hand_over(made, "room", prefill, source, blocks)
        assert np.array_equal(tokens_of(decode.cache, blocks), tokens_of(prefill.cache, source))
        behind = len(blocks) * decode_size - PROMPT if decode_size == prefill_size else 0
        assert np.count_nonzero(decode.cache) == (PROMPT + behind) * LAYERS * HEADS * 2 * SIZE


def test_tokens_that_decode_has_are_not_sent() -> None:
    with engines(32, 8) as (made, decode, [prefill]):
        source, blocks = blocks_of(prefill, 2), [5, 3, 9, 1]
        hand_over(made, "room", prefill, source, blocks, prefix=64)
        assert not decode.cache[:, [5, 3]].any()
        assert np.array_equal(tokens_of(decode.cache, blocks)[64:], tokens_of(prefill.cache, source)[64:])


def test_engines_with_equal_blocks_and_with_others_hand_over_to_one() -> None:
    """Between the former blocks are sent as they are: with what stands in the last one behind the prompt."""
    with engines(32, 32, 8) as (made, decode, [alike, other]):
        sources = [blocks_of(prefill, 3) for prefill in made.prefill]
        targets = [[5, 3, 9, 1], [2, 8, 7, 6]]
        for name, prefill, source, target in zip("ab", made.prefill, sources, targets, strict=True):
            made.receive(name, name, PROMPT, target, sources=(prefill.client.endpoint,))
            send(made, name, prefill, source)
        made.until_received("a", "b")
        assert np.array_equal(decode.cache[:, targets[0]], alike.cache[:, sources[0]])
        assert np.array_equal(tokens_of(decode.cache, targets[1]), tokens_of(other.cache, sources[1]))
        assert not decode.cache[:, 6, :, PROMPT % 32 :].any()


def test_a_room_has_no_sources_of_blocks_and_of_tokens() -> None:
    """Each of them covers it, so its rows would be sent twice."""
    with engines(32, 32, 8) as (made, decode, prefills):
        for prefill in prefills:
            send(made, "both", prefill, blocks_of(prefill, 5))
        made.receive("both", "both", PROMPT, [5, 3, 9, 1])
        events = list[object]()
        wait_for(lambda: events.extend(decode.client.poll()) or len(events) == 2)
        failed, drained = events
        assert isinstance(failed, RoomFailed)
        assert failed.cause is Cause.PEER_LOST
        alike, other = map(re.escape, made.sources)
        text = rf"components 'group0-32 tokens' from \S*{alike} and 'kv' from \S*{other} are the same KV"
        assert re.fullmatch(text, failed.detail)
        assert drained == RoomDrained(room_id("both"))
        assert not decode.cache.any(), "nothing was granted"


@pytest.mark.parametrize("token_layers", [(0, 1), (1, 2), (0, 2)])
def test_layers_that_one_source_sends_by_blocks_do_not_complete_those_of_another_by_tokens(
    token_layers: tuple[int, int],
) -> None:
    cache = np.zeros((LAYERS, BLOCKS, HEADS, 8, 2 * SIZE), np.float32)
    cache_pools = described(cache, cache.ctypes.data)
    blocks, tokens = cache_pools.components
    coverage = Coverage(cache_pools.components, 8, cache_pools.stand_ins)

    def session(number: int, component: Component, layers: tuple[int, int]) -> SessionRecord:
        share = msgspec.structs.replace(component, layout=component.layout.layers(*layers))
        return SessionRecord(number, f"p{number}", (share,), (share,), (0,), window=1, frame_bytes_max=1)

    first, second = session(1, blocks, (0, 1)), session(2, tokens, token_layers)
    text = f"components {blocks.name!r} from p1 and {tokens.name!r} from p2 are the same KV"
    assert coverage.gap([first, second]) == text
    assert coverage.gap([first, session(3, blocks, (1, 2)), second]).startswith("components")
    assert coverage.gap([first, session(4, blocks, (1, 2))]) == ""
    assert coverage.gap([session(5, tokens, (0, 1)), session(6, tokens, (1, 2))]) == ""


def test_blocks_whose_size_is_no_power_of_two_are_sent_as_they_are_between_equals() -> None:
    """A page of tokens has a power of two of them, so that these blocks have no tokens that other sizes could take."""
    with engines(96, 96, 32) as (made, decode, [alike, other]):
        assert [component.tokens_per_row for component in described(alike.cache, 0).components] == [96]
        source, target = blocks_of(alike, 6), [5, 3]
        hand_over(made, "a", alike, source, target)
        assert np.array_equal(decode.cache[:, target], alike.cache[:, source])
        made.receive("b", "b", PROMPT, [2, 8], sources=(other.client.endpoint,))
        send(made, "b", other, blocks_of(other, 6))
        events = list[object]()
        wait_for(lambda: events.extend(decode.client.poll()) or events)
        assert isinstance(events[0], RoomFailed)
        assert re.search(r"component 'group0' .* no rank of \S+ sends it", events[0].detail)
        assert not decode.cache[:, [2, 8]].any()


def test_a_block_belongs_to_one_room_whatever_its_rows() -> None:
    with engines(32, 32, 8) as (made, decode, [alike, other]):
        held = Late()
        made.receive("a", "a", PROMPT, [5, 3, 9, 1], sources=(other.client.endpoint,))
        send(made, "a", other, blocks_of(other, 4), after=lambda: held)
        made.receive("b", "b", PROMPT, [2, 8, 7, 1], sources=(alike.client.endpoint,))
        events = list[object]()
        wait_for(lambda: events.extend(decode.client.poll()) or len(events) == 2)
        failed, drained = events
        assert isinstance(failed, RoomFailed)
        assert failed.cause is Cause.REFUSED
        assert re.search(r"'group0-32 tokens' belong to a room that has not drained", failed.detail)
        assert drained == RoomDrained(room_id("b"))
        held.fired = True
        made.until_received("a")


def test_of_each_pair_a_writer_uses_what_it_has() -> None:
    cache = np.zeros((LAYERS, BLOCKS, HEADS, 8, 2 * SIZE), np.float32)
    made = described(cache, cache.ctypes.data)
    blocks, tokens = made.components

    def used(*names: str) -> list[str]:
        return [component.name for component in used_with(made.components, names, made.stand_ins)]

    assert used("kv", blocks.name) == [blocks.name]
    assert used(blocks.name) == [blocks.name]
    assert used("kv", "group0-other") == ["kv"]
    assert used() == used("other") == [blocks.name], "so that a refusal names what is missing"
    assert aliases(made.components, made.stand_ins) == [0, 1]
    with pytest.raises(LocalProtocolError, match="share memory, but not slots, page_size and page_stride"):
        aliases(made.components)
    arena = SlotAllocator(made.components, engine_slots=True, stand_ins=made.stand_ins)
    assert arena.slot_bytes == cache.nbytes, "the same bytes count once"
    assert tokens.bytes_of(tokens.layout.slots) == cache.nbytes
    assert made.block_bytes == (cache.nbytes // BLOCKS,)


APART = {"k": torch.zeros(BLOCKS, HEADS, SIZE, 8).permute(0, 3, 1, 2), "v": torch.zeros(BLOCKS, 8, HEADS, SIZE)}


def test_numbers_that_lie_apart_are_planes_of_their_own() -> None:
    assert planes_of(APART, KVLayers(5, heads=3, size=SIZE)) == 5 * (3 * SIZE + 3)
    assert planes_of({"latent": APART["v"]}, KVLayers(5, heads=3, size=SIZE)) == 5


@pytest.mark.parametrize("drafter", [[], [KVLayers(1, heads=7, size=16)]], ids=["alone", "with a drafter"])
def test_stages_with_unequal_layers_decide_alike_whether_tokens_are_sent(drafter: list[KVLayers]) -> None:
    """The whole model is a component, with its drafter, or too much for one."""
    of_drafter = {"k": torch.zeros(BLOCKS, 7, 16, 8).permute(0, 3, 1, 2), "v": torch.zeros(BLOCKS, 8, 7, 16)}
    stages = [[APART] * 7, [APART] * 3 + [of_drafter] * len(drafter)]
    left = PLANES_MAX - 7 * 17 * len(drafter)
    heads = left // 10 // (SIZE + 1)
    for model, expected in ((KVLayers(10, heads, SIZE), False), (KVLayers(10, heads + 1, SIZE), True)):
        assert {too_many_planes(stage, [model, *drafter]) for stage in stages} == {expected}


SIDE_BY_SIDE = {kind: torch.zeros(BLOCKS, 8, HEADS, SIZE) for kind in ("k", "v")}
LATENT = {"latent": torch.zeros(BLOCKS, 8, 1, SIZE)}


@pytest.mark.parametrize("of_model", [SIDE_BY_SIDE, LATENT], ids=["heads", "latent"])
def test_stages_decide_alike_where_a_drafter_s_numbers_lie_otherwise_than_the_models(
    of_model: dict[str, torch.Tensor],
) -> None:
    """The last stage alone sees them."""
    latent = of_model is LATENT
    for heads in (10, PLANES_MAX // 7 // (SIZE + 1) + 1, PLANES_MAX):
        models = [KVLayers(6, heads, SIZE, latent), KVLayers(1, heads, SIZE)]
        stages = [[of_model] * 4, [of_model] * 2 + [APART]]
        assert len({too_many_planes(stage, models) for stage in stages}) == 1, heads
