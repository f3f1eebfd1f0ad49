"""Workers whose blocks differ exchange tokens; those whose blocks are alike exchange these as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer import (
    ArenaMemory,
    Cause,
    DecodeClient,
    LocalProtocolError,
    NodeSettings,
    PrefillClient,
    RoomDrained,
    RoomFailed,
    WriterOptions,
    room_id,
)
from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.vllm.drafter import KVLayers
from pdtransfer.adapters.vllm.kinds import PAGED
from pdtransfer.adapters.vllm.orders import Chunk, KVGroup, Open, Orders, Receive, Rows
from pdtransfer.adapters.vllm.pools import Pools, pools
from pdtransfer.adapters.vllm.token_rows import planes_of, too_many_planes
from pdtransfer.adapters.vllm.worker import WorkerSide
from pdtransfer.errors import ConfigError
from pdtransfer.handoff.component_variants import used_with
from pdtransfer.handoff.decode.records import SessionRecord
from pdtransfer.handoff.decode.waiting_rooms import Coverage
from pdtransfer.handoff.slot_allocator import SlotAllocator, aliases
from pdtransfer.layout.layout import Component
from pdtransfer.limits import PLANES_MAX
from pdtransfer.wire import Ranks
from tests.support.client_pair import LIMITS, Late
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


def settings(node: str) -> NodeSettings:
    return NodeSettings(node=node, model="m", weights=b"w", limits=LIMITS)


@dataclass
class Prefill:
    """One prefill engine with blocks of this many tokens."""

    cache: np.ndarray
    client: PrefillClient
    worker: WorkerSide

    @property
    def block_size(self) -> int:
        return self.cache.shape[3]

    def blocks(self, seed: int) -> list[int]:
        """Blocks for a prompt."""
        return np.random.default_rng(seed).permutation(BLOCKS)[: -(-PROMPT // self.block_size)].tolist()

    def send(self, room: str, blocks: list[int], *, after: Late | None = None) -> None:
        """Computes a prompt in two steps."""
        middle = len(blocks) // 2
        for first, end in ((0, middle), (middle, len(blocks))):
            chunk = Chunk(room, (Rows(0, first, end, tuple(blocks[:end])),), last=end == len(blocks))
            self.worker.begin(Orders(opens=[Open(room, room, PROMPT)] if not first else [], chunks=[chunk]))
            self.worker.end(lambda: after)


@dataclass
class Decode:
    """A decode engine."""

    cache: np.ndarray
    client: DecodeClient
    worker: WorkerSide

    def receive(self, room: str, source: Prefill, blocks: list[int], *, prefix: int = 0) -> None:
        order = Receive(room, room_id(room), (source.client.endpoint,), PROMPT, prefix, (tuple(blocks),))
        self.worker.begin(Orders(receives=[order]))


def by_layer(memory: np.ndarray, tokens: int, *, whole_blocks: bool) -> np.ndarray:
    """A cache, (layers, blocks, heads, tokens, keys and values), in this memory. With `whole_blocks` all layers of a
    block lie together."""
    order = (BLOCKS, LAYERS) if whole_blocks else (LAYERS, BLOCKS)
    cache = memory.reshape(*order, HEADS, tokens, 2 * SIZE)
    return cache.swapaxes(0, 1) if whole_blocks else cache


@contextmanager
def engines(
    decode_size: int, *prefill_sizes: int, whole_blocks: tuple[bool, bool] = (False, False)
) -> Iterator[tuple[Decode, list[Prefill]]]:
    """`whole_blocks` are prefill's and decode's."""
    with ExitStack() as stack:
        prefills: list[Prefill] = []
        for index, size in enumerate(prefill_sizes):
            numbers = np.random.default_rng(index).random(LAYERS * BLOCKS * HEADS * size * 2 * SIZE, np.float32)
            cache = by_layer(numbers, size, whole_blocks=whole_blocks[0])
            made = described(cache, cache.ctypes.data)
            writer = WriterOptions(pool_address=cache.ctypes.data)
            client = PrefillClient(settings(f"p{index}"), made.components, writer=writer, replicas=made.replicas)
            stack.enter_context(client)
            prefills.append(Prefill(cache, client, WorkerSide(pools=made, prefill=client, decode=None, time_left_s=60)))
        count = LAYERS * BLOCKS * HEADS * decode_size * 2 * SIZE
        arena = ArenaMemory.create(4 * count)
        numbers = np.frombuffer(arena.mapping.view, np.float32, count)
        target = by_layer(numbers, decode_size, whole_blocks=whole_blocks[1])
        made = described(target, arena.mapping.address)
        client = DecodeClient(
            settings("d"), made.components, arena, engine_slots=True, stand_ins=made.stand_ins, prefix_cache=False,
            verify=True,
        )  # fmt: skip
        stack.enter_context(client)
        yield Decode(target, client, WorkerSide(pools=made, prefill=None, decode=client, time_left_s=60)), prefills


def received(decode: Decode, prefills: list[Prefill], *names: str) -> None:
    """Waits until these requests are received; none has failed."""
    waited = set(names)

    def polled() -> bool:
        for prefill in prefills:
            prefill.worker.results(())
        results = decode.worker.results(())
        assert not results.failed
        waited.difference_update(results.received)
        return not waited

    wait_for(polled)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(8, 32), (32, 8), (16, 64), (64, 16)])
def test_tokens_land_in_blocks_of_another_size(prefill_size: int, decode_size: int) -> None:
    blocks = [5, 3, 9, 1, 7, 2, 4, 6, 8, 10, 12, 11, 13][: -(-PROMPT // decode_size)]
    with engines(decode_size, prefill_size) as (decode, [prefill]):
        source = prefill.blocks(1)
        decode.receive("room", prefill, blocks)
        prefill.send("room", source)
        received(decode, [prefill], "room")
        assert np.array_equal(tokens_of(decode.cache, blocks), tokens_of(prefill.cache, source))
        assert np.count_nonzero(decode.cache) == PROMPT * LAYERS * HEADS * 2 * SIZE, "nothing behind the prompt"


@pytest.mark.parametrize("whole_blocks", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("prefill_size", "decode_size"), [(32, 32), (32, 8), (96, 96)])
def test_blocks_of_all_layers_pair_with_layers_that_lie_apart(
    prefill_size: int, decode_size: int, whole_blocks: tuple[bool, bool]
) -> None:
    """vLLM's layout BLHNC, on either side: blocks of equal sizes are sent as they are, others by tokens."""
    with engines(decode_size, prefill_size, whole_blocks=whole_blocks) as (decode, [prefill]):
        source, blocks = prefill.blocks(5), list(range(1, 1 + -(-PROMPT // decode_size)))
        decode.receive("room", prefill, blocks)
        prefill.send("room", source)
        received(decode, [prefill], "room")
        assert np.array_equal(tokens_of(decode.cache, blocks), tokens_of(prefill.cache, source))
        behind = len(blocks) * decode_size - PROMPT if decode_size == prefill_size else 0
        assert np.count_nonzero(decode.cache) == (PROMPT + behind) * LAYERS * HEADS * 2 * SIZE


def test_tokens_that_decode_has_are_not_sent() -> None:
    with engines(32, 8) as (decode, [prefill]):
        source, blocks = prefill.blocks(2), [5, 3, 9, 1]
        decode.receive("room", prefill, blocks, prefix=64)
        prefill.send("room", source)
        received(decode, [prefill], "room")
        assert not decode.cache[:, [5, 3]].any()
        assert np.array_equal(tokens_of(decode.cache, blocks)[64:], tokens_of(prefill.cache, source)[64:])


def test_engines_with_equal_blocks_and_with_others_hand_over_to_one() -> None:
    """Between the former blocks are sent as they are: with what stands in the last one behind the prompt."""
    with engines(32, 32, 8) as (decode, prefills):
        alike, other = prefills
        sources = [prefill.blocks(3) for prefill in prefills]
        targets = [[5, 3, 9, 1], [2, 8, 7, 6]]
        for name, prefill, source, target in zip("ab", prefills, sources, targets, strict=True):
            decode.receive(name, prefill, target)
            prefill.send(name, source)
        received(decode, prefills, "a", "b")
        assert np.array_equal(decode.cache[:, targets[0]], alike.cache[:, sources[0]])
        assert np.array_equal(tokens_of(decode.cache, targets[1]), tokens_of(other.cache, sources[1]))
        assert not decode.cache[:, 6, :, PROMPT % 32 :].any()


def test_a_room_has_no_sources_of_blocks_and_of_tokens() -> None:
    """Each of them covers it, so its rows would be sent twice."""
    with engines(32, 32, 8) as (decode, prefills):
        for prefill in prefills:
            prefill.send("both", prefill.blocks(5))
        endpoints = tuple(prefill.client.endpoint for prefill in prefills)
        receive = Receive("both", room_id("both"), endpoints, PROMPT, 0, ((5, 3, 9, 1),))
        decode.worker.begin(Orders(receives=[receive]))
        events = list[object]()
        wait_for(lambda: events.extend(decode.client.poll()) or len(events) == 2)
        failed, drained = events
        assert isinstance(failed, RoomFailed)
        assert failed.cause is Cause.PEER_LOST
        alike, other = map(re.escape, endpoints)
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
    with engines(96, 96, 32) as (decode, [alike, other]):
        assert [component.tokens_per_row for component in described(alike.cache, 0).components] == [96]
        source, target = alike.blocks(6), [5, 3]
        decode.receive("a", alike, target)
        alike.send("a", source)
        received(decode, [alike], "a")
        assert np.array_equal(decode.cache[:, target], alike.cache[:, source])
        decode.receive("b", other, [2, 8])
        other.send("b", other.blocks(6))
        events = list[object]()
        wait_for(lambda: events.extend(decode.client.poll()) or events)
        assert isinstance(events[0], RoomFailed)
        assert re.search(r"component 'group0' .* no rank of \S+ sends it", events[0].detail)
        assert not decode.cache[:, [2, 8]].any()


def test_a_block_belongs_to_one_room_whatever_its_rows() -> None:
    with engines(32, 32, 8) as (decode, [alike, other]):
        held = Late()
        decode.receive("a", other, [5, 3, 9, 1])
        other.send("a", other.blocks(4), after=held)
        decode.receive("b", alike, [2, 8, 7, 1])
        events = list[object]()
        wait_for(lambda: events.extend(decode.client.poll()) or len(events) == 2)
        failed, drained = events
        assert isinstance(failed, RoomFailed)
        assert failed.cause is Cause.REFUSED
        assert re.search(r"'group0-32 tokens' belong to a room that has not drained", failed.detail)
        assert drained == RoomDrained(room_id("b"))
        held.fired = True
        received(decode, [alike, other], "a")


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
