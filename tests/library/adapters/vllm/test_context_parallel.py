"""Engines that spread a prompt's blocks over ranks: what each token's bytes are at each rank, by vLLM's own formula.

The schedulers' sides and the workers' sides are real, and so are their clients. Caches are numpy arrays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.kit.peers import Reachable
from pdtransfer.adapters.vllm.kinds import PAGED, dcp_sizes_of, keep_blocks_whole
from pdtransfer.adapters.vllm.orders import Chunk, KVGroup, Open, Orders, Rows
from pdtransfer.adapters.vllm.pools import Pools
from pdtransfer.adapters.vllm.scheduler import SchedulerSide
from pdtransfer.adapters.vllm.worker import WorkerSide
from pdtransfer.errors import ConfigError
from pdtransfer.wire import Ranks
from tests.library.adapters.vllm.scheduler_player import SchedulerPlayer
from tests.library.adapters.vllm.vllm_ranks import Rank, arena_cache, pools_of, world
from tests.support.waiting import wait_for

LAYERS, BLOCKS, TOKENS, WIDTH = 2, 40, 4, 8
NAMES = [f"model.layers.{layer}.attn" for layer in range(LAYERS)]
UNTOUCHED = -1.0


@dataclass(frozen=True)
class Shape:
    """An engine's sizes: tensor parallel, decode context parallel."""

    tp: int
    dcp: int


def place(token: int, rank: int, dcp_size: int) -> tuple[int, int] | None:
    """vLLM's slot mapping: the entry of the block table and the offset in its block, None where it is another rank's.
    Runs of tokens are as long as a block."""
    interleave, virtual = TOKENS, TOKENS * dcp_size
    offset = token % virtual
    if offset // interleave % dcp_size != rank % dcp_size:
        return None
    return token // virtual, offset // (dcp_size * interleave) * interleave + offset % interleave


def numbers(layer: int, head: int, prompt: int, token: int) -> np.ndarray:
    """What the model computes of a token: different in each layer and head, of each prompt."""
    return np.arange(WIDTH, dtype=np.float32) + 8 * (token + 100 * (prompt + 10 * (head + 4 * layer)))


@dataclass
class Engine:
    """One engine's scheduler, and its ranks."""

    shape: Shape
    kv_heads: int
    player: SchedulerPlayer
    ranks: list[Rank]
    used: int = 1  # blocks; the first is the null block

    def head(self, rank: int) -> int:
        """The KV head that a rank has."""
        return rank * self.kv_heads // self.shape.tp

    def table(self, tokens: int) -> list[int]:
        """Blocks for a request of this many tokens, the last one first."""
        count = -(-tokens // (TOKENS * self.shape.dcp))
        self.used += count
        assert self.used <= BLOCKS
        return list(range(self.used - 1, self.used - 1 - count, -1))

    def compute(self, prompt: int, tokens: int, table: Sequence[int]) -> None:
        """What vLLM writes: at each rank the tokens that are its own."""
        for rank, cache in enumerate(rank.cache for rank in self.ranks):
            for token in range(tokens):
                if (place_of_token := place(token, rank, self.shape.dcp)) is not None:
                    for layer in range(LAYERS):
                        cache[layer, table[place_of_token[0]], 0, place_of_token[1]] = numbers(
                            layer, self.head(rank), prompt, token
                        )

    def step(self, **given: str) -> None:
        orders = self.player.orders(**given)
        for rank in self.ranks:
            rank.side.begin(orders)
            rank.side.end(lambda: None)

    def wrong(self, prompt: int, tokens: int, prefix: int, table: Sequence[int]) -> list[tuple[int, int]]:
        """The (rank, token) whose bytes are not there, or are there although they were not to be sent."""
        wrong: list[tuple[int, int]] = []
        for rank, cache in enumerate(rank.cache for rank in self.ranks):
            for token in range(tokens):
                if (place_of_token := place(token, rank, self.shape.dcp)) is None:
                    continue
                landed = cache[:, table[place_of_token[0]], 0, place_of_token[1]]
                expected = [numbers(layer, self.head(rank), prompt, token) for layer in range(LAYERS)]
                if token < prefix // TOKENS * TOKENS:
                    expected = [np.full(WIDTH, UNTOUCHED, np.float32)] * LAYERS
                if not np.array_equal(landed, np.array(expected)):
                    wrong.append((rank, token))
        return wrong

    def stray(self, tables: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, int]]:
        """The (rank, block) that something was written to, though no token of these prompts is in it."""
        stray: list[tuple[int, int]] = []
        for rank, cache in enumerate(rank.cache for rank in self.ranks):
            places = [
                (table, place_of_token)
                for tokens, table in tables
                for token in range(tokens)
                if (place_of_token := place(token, rank, self.shape.dcp)) is not None
            ]
            used = {table[entry] for table, (entry, _) in places}
            stray += [(rank, block) for block in set(range(BLOCKS)) - used if (cache[:, block] != UNTOUCHED).any()]
        return stray


def described(cache: np.ndarray, base: int, group: KVGroup, heads: Heads) -> Pools:
    views = dict(zip(NAMES, torch.from_numpy(cache), strict=True))
    return pools_of(views, [(group, NAMES)], blocks=BLOCKS, heads=heads, base=base)


@contextmanager
def engines(
    prefill: Shape, decode: Shape, kv_heads: int, stripes: int | None = None
) -> Iterator[tuple[Engine, Engine]]:
    stripes = stripes or max(prefill.dcp, decode.dcp)
    groups = [KVGroup(0, PAGED.of(TOKENS), dcp_size=shape.dcp, stripes=stripes) for shape in (prefill, decode)]
    players = SchedulerPlayer(), SchedulerPlayer()
    for player, shape, group in zip(players, (prefill, decode), groups, strict=True):
        player.side = SchedulerSide(
            [group],
            engine_id="p0",
            tp_size=shape.tp,
            sends=player is players[0],
            receives=player is players[1],
            reachable=Reachable(None, insecure=True),
        )
    shape = LAYERS, BLOCKS, 1, TOKENS, WIDTH
    with world() as made:
        for rank in range(prefill.tp):
            ranks, cache = Ranks(rank, prefill.tp), np.full(shape, UNTOUCHED, np.float32)
            base = cache.ctypes.data
            made.add_prefill(cache, described(cache, base, groups[0], Heads(kv_heads, ranks)), base, ranks)
        for rank in range(decode.tp):
            ranks, (arena, cache) = Ranks(rank, decode.tp), arena_cache(shape, UNTOUCHED)
            cache_pools = described(cache, arena.mapping.address, groups[1], Heads(kv_heads, ranks))
            made.add_decode(cache, cache_pools, arena, ranks)
        players[0].side.endpoints = made.sources
        yield Engine(prefill, kv_heads, players[0], made.prefill), Engine(decode, kv_heads, players[1], made.decode)


def until_ended(sends: Engine, receives: Engine, *names: str) -> None:
    """Waits until all ranks have reported these requests. None has failed."""
    ranks = sends.ranks + receives.ranks
    for rank in sends.ranks:
        rank.poll(names)
    wait_for(lambda: [rank.poll() for rank in ranks] and all(
        (rank.seen.received | rank.seen.sent).issuperset(names) for rank in ranks
    ))  # fmt: skip
    assert not any(rank.seen.failed for rank in ranks)


def begin(
    sends: Engine, receives: Engine, number: int, tokens: int, *, prefix: int = 0, first: int = 0
) -> tuple[list[int], list[int]]:
    """Decode asks for a prompt behind what it has, and prefill computes it: in one step, or `first` tokens in one of
    their own. Returns the block tables of both."""
    name, sent, landed = f"r{number}", sends.table(tokens), receives.table(tokens)
    sources = json.dumps(sends.player.side.endpoints, separators=(",", ":"))
    given = f"cached={prefix} transfer_id={name} remote_endpoints={sources}"
    wanted = receives.player.play(f"load {name} {tokens} {','.join(map(str, landed))} {given}")
    assert "tokens" in wanted
    receives.step()
    sends.player.play(f"request {name} {tokens} sends transfer_id={name}")
    sends.compute(number, tokens, sent)
    sends.step(new=f"{name}:0+{first or tokens}@{','.join(map(str, sent))}")
    if first:
        sends.step(more=f"{name}:{first}+{tokens - first}")
    return sent, landed


PROMPTS = [(3, 0), (16, 0), (17, 4), (22, 4), (30, 12), (10, 8)]  # tokens, and those that decode has: in blocks of 4


@pytest.mark.parametrize(
    ("prefill", "decode", "kv_heads"),
    [
        (Shape(1, 1), Shape(2, 2), 1), (Shape(2, 1), Shape(2, 2), 1),
        (Shape(2, 2), Shape(1, 1), 1), (Shape(2, 2), Shape(2, 1), 1),
        (Shape(2, 2), Shape(2, 2), 1),
        (Shape(4, 4), Shape(2, 2), 1), (Shape(2, 2), Shape(4, 4), 1), (Shape(4, 2), Shape(4, 4), 1),
        (Shape(4, 2), Shape(4, 2), 2), (Shape(4, 2), Shape(2, 1), 2),
    ],
    ids=lambda value: f"tp{value.tp}-dcp{value.dcp}" if isinstance(value, Shape) else f"heads{value}",
)  # fmt: skip
def test_each_token_lands_at_the_ranks_that_have_it(prefill: Shape, decode: Shape, kv_heads: int) -> None:
    """Prompts that end inside a block, and prefixes of decode's that end inside the block that all ranks share."""
    with engines(prefill, decode, kv_heads) as (sends, receives):
        tables = [
            begin(sends, receives, number, tokens, prefix=prefix, first=tokens // 2 + 1)
            for number, (tokens, prefix) in enumerate(PROMPTS)
        ]
        until_ended(sends, receives, *(f"r{number}" for number in range(len(PROMPTS))))
        for number, (tokens, prefix) in enumerate(PROMPTS):
            assert receives.wrong(number, tokens, prefix, tables[number][1]) == [], PROMPTS[number]
        assert receives.stray([(tokens, tables[n][1]) for n, (tokens, _) in enumerate(PROMPTS)]) == []


def test_an_engine_without_it_has_the_stripes_of_the_largest_as_well() -> None:
    with engines(Shape(1, 1), Shape(1, 1), 1, stripes=4) as (sends, receives):
        _, landed = begin(sends, receives, 0, 30)
        until_ended(sends, receives, "r0")
        assert receives.wrong(0, 30, 0, landed) == []
        assert receives.stray([(30, landed)]) == []


def test_what_landed_is_counted_once_however_many_ranks_have_it() -> None:
    """Two ranks with a half each, and two with all of it."""
    for shape, ranks in ((Shape(2, 2), 1), (Shape(2, 1), 2)):
        with engines(Shape(2, 2), shape, 1) as (sends, receives):
            begin(sends, receives, 0, 22)
            until_ended(sends, receives, "r0")
            byte_counts = [rank.figures["bytes"] for rank in receives.ranks]
            block = LAYERS * TOKENS * WIDTH * 4
            assert sum(counts.get("received", 0) for counts in byte_counts) == 6 * block * ranks


def test_a_rank_that_sends_nothing_reports_every_request_and_keeps_none() -> None:
    """Of those that compute a prompt together, prefill's first one sends it."""
    silent = WorkerSide(pools=Pools((), {}, (), {}), prefill=None, decode=None, time_left_s=60)
    chunk = Chunk("r", (Rows(0, 0, 3, (4, 5, 6)),), last=True)
    silent.begin(Orders(opens=[Open("r", "r", 10), Open("gone", "gone", 10)], chunks=[chunk]))
    for name in NAMES:
        silent.save(name, lambda: None)
    silent.end(lambda: None)
    assert silent.results(()).sent == set(), "it has not ended"
    assert silent.results(("r", "another")).sent == {"r"}
    silent.begin(Orders(aborts=["gone"]))
    silent.end(lambda: None)
    assert silent.results(("gone",)).sent == {"gone"}
    silent.begin(Orders(opens=[Open("preempted", "p", 10)]))
    silent.quiesce(Orders(quiesce=["preempted"]))
    assert silent.results(("preempted",)).sent == set(), "it begins again"
    assert silent.take_figures() is None
    silent.close()


def sizes(dcp: int = 1, pcp: int = 1, interleave: int = 1) -> Any:
    """vLLM's ParallelConfig."""
    return SimpleNamespace(
        decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp, cp_kv_cache_interleave_size=interleave
    )


def test_sizes_that_are_supported() -> None:
    def found(parallel: Any, largest: int, *, receives: bool = False) -> tuple[int, int]:
        return dcp_sizes_of(parallel, largest, receives=receives)

    assert found(SimpleNamespace(), 0) == (1, 1)
    assert found(sizes(2), 0) == (2, 2)
    assert found(sizes(2), 4, receives=True) == (2, 4)
    assert found(sizes(pcp=2), 0) == (1, 1)
    assert found(sizes(pcp=2), 2) == (1, 2)


@pytest.mark.parametrize(
    ("parallel", "largest", "more", "text"),
    [
        (sizes(4), 2, {}, "dcp_size = 2: must be a multiple of --decode-context-parallel-size 4"),
        (sizes(pcp=2), 0, {"needs": "0.30"}, "--prefill-context-parallel-size 2: is not supported with a vLLM before"),
        (sizes(pcp=2), 0, {"receives": True}, "--prefill-context-parallel-size 2: is not supported with a kv_role"),
        (sizes(2, 2), 0, {}, "--prefill-context-parallel-size 2: is not supported with a --decode-context-parallel"),
    ],
)
def test_sizes_that_are_not_supported_end_the_start_by_name(
    parallel: Any, largest: int, more: dict[str, bool], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        dcp_sizes_of(parallel, largest, **{"receives": False} | more)


def test_vllm_keeps_whole_blocks_at_a_rank() -> None:
    specs = [SimpleNamespace(block_size=64), SimpleNamespace(block_size=16, dcp_sharded=False)]
    parallel = sizes(2)
    for _ in range(2):  # of each worker of a process
        keep_blocks_whole(parallel, specs, may_set=True)
        assert parallel.cp_kv_cache_interleave_size == 64
    without = sizes()
    keep_blocks_whole(without, specs, may_set=True)
    assert without.cp_kv_cache_interleave_size == 1
    with pytest.raises(ConfigError, match="--cp-kv-cache-interleave-size 8: must be 64, the size of a block"):
        keep_blocks_whole(sizes(2, interleave=8), specs, may_set=True)
    with pytest.raises(ConfigError, match="--cp-kv-cache-interleave-size 1: must be 64"):
        keep_blocks_whole(sizes(2), specs, may_set=False)
    keep_blocks_whole(sizes(2, interleave=64), specs, may_set=False)
    keep_blocks_whole(sizes(2), specs[1:], may_set=False)
    specs[1].dcp_sharded = True
    with pytest.raises(ConfigError, match="blocks of 16, 64 tokens, must be of one size"):
        keep_blocks_whole(sizes(2), specs, may_set=True)


@pytest.mark.parametrize(("blocks", "kv_heads"), [(2 * BLOCKS, 1), (BLOCKS, 2)])
def test_caches_that_no_rank_can_have_in_turn_are_refused_by_name(blocks: int, kv_heads: int) -> None:
    """Blocks that the attention backend cuts, and heads of which each rank has its own."""
    view = torch.zeros(blocks, 1, TOKENS, WIDTH)
    group = KVGroup(0, PAGED.of(TOKENS), dcp_size=2, stripes=2)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.attn: not supported with decode context parallelism"):
        pools_of({NAMES[0]: view}, [(group, NAMES)], blocks=BLOCKS, heads=Heads(kv_heads, Ranks(0, 2)))


def test_more_stripes_than_a_peer_may_have_components_are_refused() -> None:
    view = torch.zeros(BLOCKS, 1, TOKENS, WIDTH)
    group = KVGroup(0, PAGED.of(TOKENS), stripes=17)
    with pytest.raises(ConfigError, match="KV cache groups: 17, must be 1 to 16"):
        pools_of({NAMES[0]: view}, [(group, NAMES)], blocks=BLOCKS)
