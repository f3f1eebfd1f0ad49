"""Ranks of two vLLM engines without vLLM: numpy arrays as KV caches, and what its steps have the workers do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdtransfer import ArenaMemory, DecodeClient, NodeSettings, PrefillClient, WriterOptions, room_id
from pdtransfer.adapters.kit.kinds import Heads
from pdtransfer.adapters.vllm import figures
from pdtransfer.adapters.vllm.kinds import PAGED
from pdtransfer.adapters.vllm.orders import Chunk, KVGroup, Open, Orders, Receive, Rows
from pdtransfer.adapters.vllm.pools import Pools, pools
from pdtransfer.adapters.vllm.worker import Results, WorkerSide
from pdtransfer.wire import Ranks
from tests.support.client_pair import LIMITS
from tests.support.waiting import wait_for


@dataclass
class Rank:
    """One rank of either engine, and all that its worker has reported."""

    side: WorkerSide
    client: Any
    cache: Any
    seen: Results = field(default_factory=Results)
    figures: Any = field(default_factory=figures.empty)

    def begin(self, **orders: Any) -> None:
        self.side.begin(Orders(**orders))

    def poll(self, finished: Collection[str] = ()) -> None:
        """Each request is reported once."""
        found = self.side.results(finished)
        assert not self.seen.sent & found.sent
        assert not self.seen.received & found.received
        for name in ("sent", "received", "failed", "failed_blocks"):
            getattr(self.seen, name).update(getattr(found, name))
        if (data := self.side.take_figures()) is not None:
            figures.add(self.figures, data)


@dataclass
class World:
    """Both engines."""

    prefill: list[Rank] = field(default_factory=list[Rank])
    decode: list[Rank] = field(default_factory=list[Rank])
    clients: ExitStack = field(default_factory=ExitStack)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(rank.client.endpoint for rank in self.prefill)

    @property
    def figures(self) -> Any:
        """Of all ranks."""
        found = figures.empty()
        for rank in self.prefill + self.decode:
            figures.add(found, rank.figures)
        return found

    def add_prefill(self, cache: Any, pools: Pools, base: int, ranks: Ranks | None = None, **options: Any) -> Rank:
        """A rank whose cache begins at this address."""
        client = self.clients.enter_context(PrefillClient(
            _settings(f"p{len(self.prefill)}", ranks), pools.components, writer=WriterOptions(pool_address=base),
            replicas=pools.replicas,
        ))  # fmt: skip
        self.prefill.append(Rank(_side(pools, options, prefill=client), client, cache))
        return self.prefill[-1]

    def add_decode(
        self, cache: Any, pools: Pools, arena: ArenaMemory, ranks: Ranks | None = None, **options: Any
    ) -> Rank:
        client = self.clients.enter_context(DecodeClient(
            _settings(f"d{len(self.decode)}", ranks), pools.components, arena, engine_slots=True,
            open_ended=pools.open_ended, stand_ins=pools.stand_ins, prefix_cache=False, verify=True,
        ))  # fmt: skip
        self.decode.append(Rank(_side(pools, options, decode=client), client, cache))
        return self.decode[-1]

    def wanted(self, name: str, label: str, tokens: int, *slots: Sequence[int], **more: Any) -> Receive:
        """An order of decode, with slots of each group."""
        given = {"prefix": 0, "sources": self.sources} | more
        return Receive(name, room_id(label), tokens=tokens, slots=tuple(map(tuple, slots)), **given)

    def receive(self, name: str, label: str, tokens: int, *slots: Sequence[int], **more: Any) -> None:
        """Every decode rank gets this order."""
        for rank in self.decode:
            rank.begin(receives=[self.wanted(name, label, tokens, *slots, **more)])

    def step(
        self, orders: Orders, after: Callable[[], Any] = lambda: None, layers: Sequence[str] = (),
        ranks: Sequence[Rank] = (),
    ) -> None:  # fmt: skip
        """A step of prefill, which reports these layers."""
        for rank in ranks or self.prefill:
            rank.side.quiesce(orders)
            rank.side.begin(orders)
            for layer in layers:
                rank.side.save(layer, after)
            rank.side.end(after)
            rank.side.end(after)  # nothing is left of it

    def send(self, name: str, label: str, tokens: int, blocks: Sequence[int], *steps: int, **more: Any) -> None:
        """Computes a prompt in one step, or in several, which end with these blocks."""
        first = 0
        for end in (*steps, len(blocks)):
            opens = [] if first else [Open(name, label, tokens)]
            self.step(Orders(opens=opens, chunks=[chunk(name, blocks[:end], first, end == len(blocks))]), **more)
            first = end

    def poll(self, finished: Collection[str] = ()) -> None:
        for rank in self.prefill + self.decode:
            rank.poll(finished)

    def until(self, condition: Callable[[], object]) -> None:
        wait_for(lambda: self.poll() or condition())

    def until_received(self, *names: str, failed: Collection[str] = ()) -> None:
        """Waits until each decode rank has reported these requests; none but the `failed` ones has failed."""
        self.until(lambda: all(rank.seen.received.issuperset(names) for rank in self.decode))
        assert all(rank.seen.failed == set(failed) for rank in self.decode)


@contextmanager
def world() -> Iterator[World]:
    made = World()
    with made.clients:
        yield made


def pools_of(
    views: dict[str, Any], groups: Any = None, *, blocks: int, tokens: int = 16, heads: Heads | None = None,
    base: int = 0, memory: Any = "dram", **more: Any,
) -> Pools:  # fmt: skip
    """Of one group with blocks of this many tokens, unless there are others."""
    return pools(
        views, groups or [(KVGroup(0, PAGED.of(tokens)), list(views))], blocks=blocks,
        locate=lambda _: (base, memory), heads=heads or Heads(1, Ranks()), **more,
    )  # fmt: skip


def chunk(name: str, blocks: Sequence[int], first: int = 0, last: bool = True) -> Chunk:
    """Computes the rows from `first` on of a request's blocks, which are of one group."""
    return Chunk(name, (Rows(0, first, len(blocks), tuple(blocks)),), last)


def arena_cache(shape: Sequence[int], fill: float = 0.0) -> tuple[ArenaMemory, np.ndarray]:
    """An arena, and all of it as an array of float32."""
    arena = ArenaMemory.create(4 * int(np.prod(shape)))
    cache = np.frombuffer(arena.mapping.view, np.float32, int(np.prod(shape))).reshape(shape)
    cache[:] = fill
    return arena, cache


def _settings(node: str, ranks: Ranks | None) -> NodeSettings:
    return NodeSettings(node=node, model="m", weights=b"w", limits=LIMITS, ranks=ranks or Ranks())


def _side(pools: Pools, options: dict[str, Any], **clients: Any) -> WorkerSide:
    return WorkerSide(**{"pools": pools, "time_left_s": 60.0, "prefill": None, "decode": None} | clients | options)
