"""A prefill and a decode client in one process, with small pools whose every byte is known, before and after.

A pool's slot i holds content that is hashed of (kind, layer, head, i), so that what lands in a wrong place shows; the
arena holds canaries, and is compared whole with what it should hold.
"""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pdtransfer.client.clients import DecodeClient, PrefillClient
from pdtransfer.client.settings import NodeSettings
from pdtransfer.handoff.effects import RoomDrained, RoomFailed, RoomLanded, RoomLeased, RoomReady
from pdtransfer.layout.layout import Component, Span
from pdtransfer.limits import Limits
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.options import WriterOptions
from tests.support.layout_tensors import CANARY, Model, Pool, mla
from tests.support.waiting import PATIENCE_S

LIMITS = Limits(resend_ms=50, resend_ms_max=200, ping_ms=200, silence_ms=4_000, fence_poll_ms=20)


CPUS = "auto"


def settings(node: str, limits: Limits = LIMITS, **more: Any) -> NodeSettings:
    return NodeSettings(**{"node": node, "model": "m", "weights": b"w", "limits": limits, "cpus": CPUS, **more})


def component(pool: Pool) -> Component:
    return Component(name="kv", memory="dram", tokens_per_row=1, span=Span(), layout=pool.layout)


class Late:
    """An event as `after=` takes it, which fires when the test lets it."""

    def __init__(self) -> None:
        self.fired, self.asked = False, 0

    def query(self) -> bool:
        self.asked += 1
        return self.fired


@dataclass
class Pair:
    """Both clients, both pools, and the events of either client."""

    prefill: PrefillClient
    decode: DecodeClient
    source: Pool
    target: Pool
    prefill_events: list[RoomLeased | RoomLanded | RoomFailed | RoomDrained] = field(default_factory=list)
    decode_events: list[RoomReady | RoomFailed] = field(default_factory=list)
    _ended: set[tuple[int, int, bool]] = field(default_factory=set)

    def poll(self) -> None:
        """As a scheduler between two batches: asks both, waits for neither. Each side's rooms end and drain once."""
        for client, events in ((self.prefill, self.prefill_events), (self.decode, self.decode_events)):
            for event in client.poll():
                events.append(event)
                if isinstance(event, RoomReady | RoomLanded | RoomFailed | RoomDrained):
                    end = id(client), event.room, isinstance(event, RoomDrained)
                    assert end not in self._ended, f"once more: {event}"
                    self._ended.add(end)

    def until(self, condition: Callable[[], object]) -> None:
        """Polls until the condition holds, asleep while nobody has anything to say."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"prefill: {self.prefill_events}, decode: {self.decode_events}"
            open_ones = [each for each in (self.prefill, self.decode) if each.fileno() >= 0]
            select.select(open_ones, [], [], 0.02)
            self.poll()

    def prefill_event(self, room: int, kind: type[Any]) -> Any:
        return next((event for event in self.prefill_events if isinstance(event, kind) and event.room == room), None)

    def decode_event(self, room: int, kind: type[Any]) -> Any:
        return next((event for event in self.decode_events if isinstance(event, kind) and event.room == room), None)

    def ready(self, room: int) -> RoomReady:
        self.until(lambda: self.decode_event(room, RoomReady) or self.decode_event(room, RoomFailed))
        ready = self.decode_event(room, RoomReady)
        assert ready is not None, self.decode_events
        return ready

    def failed(self, room: int) -> RoomFailed:
        """On decode's side."""
        self.until(lambda: self.decode_event(room, RoomFailed) or self.decode_event(room, RoomReady))
        failed = self.decode_event(room, RoomFailed)
        assert failed is not None, self.decode_events
        return failed

    def drained(self, room: int) -> None:
        """On prefill's side."""
        self.until(lambda: self.prefill_event(room, RoomDrained))

    def expect(self, room: int, tokens: int, **more: Any) -> None:
        self.decode.expect(room, tokens=tokens, sources=[self.prefill.endpoint], **more)

    def pages(self, seed: int, tokens: int) -> np.ndarray:
        """Pages for this many tokens, in no order."""
        count = self.source.slots // self.source.page_size
        return np.random.default_rng(seed).permutation(count)[: -(-tokens // self.source.page_size)]

    def send(self, room: int, tokens: int, pages: np.ndarray | None = None) -> np.ndarray:
        """A whole room, from open to finish."""
        pages = self.pages(room, tokens) if pages is None else pages
        self.prefill.open(room, tokens=tokens)
        self.prefill.push(room, pages, rows=(0, tokens))
        self.prefill.finish(room, aux=b"aux of %d" % room)
        return pages

    def begin(self, room: int, tokens: int, **more: Any) -> np.ndarray:
        """A whole room, from expect to finish; `more` is decode's."""
        self.expect(room, tokens, **more)
        return self.send(room, tokens)

    def moved(self, room: int, tokens: int) -> None:
        """A whole room, from expect to ready."""
        self.begin(room, tokens)
        self.ready(room)

    def serves_again(self, sources: list[str]) -> None:
        """Sends rooms until one lands: decode greets a peer that it may meet again after some seconds."""
        for room in itertools.count(1_000):
            self.decode.expect(room, tokens=16, sources=sources)
            self.send(room, 16)
            self.until(lambda room=room: self.decode_event(room, RoomReady) or self.decode_event(room, RoomFailed))
            if self.decode_event(room, RoomReady) is not None:
                return
            self.prefill.abort(room)
            time.sleep(0.1)

    @property
    def arena(self) -> np.ndarray:
        return self.target.memory

    def whole_arena_is_free(self, room: int) -> None:
        """Every slot can be leased: nothing leaks, and no lease is left."""
        self.expect(room, self.target.slots)
        self.send(room, self.target.slots, pages=self.all_pages())
        self.ready(room)
        self.decode.release(room)

    def all_pages(self) -> np.ndarray:
        assert self.source.slots >= self.target.slots
        return np.arange(-(-self.target.slots // self.source.page_size))


def slots_of_pages(pages: np.ndarray, page_size: int, tokens: int) -> np.ndarray:
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:tokens]


@dataclass
class Expected:
    """What the arena must hold: canaries, but for what landed."""

    like: Pool

    def __post_init__(self) -> None:
        self.pool = replace(self.like)

    def land(self, source_slots: np.ndarray, target_slots: np.ndarray) -> None:
        self.pool.land(source_slots, target_slots)

    def holds(self, arena: np.ndarray) -> bool:
        return bool((arena == self.pool.memory).all())


def plain_arena(target: Pool) -> ArenaMemory:
    return ArenaMemory.create(len(target.memory), huge_pages="never")


@contextmanager
def client_pair(
    *,
    model: Model | None = None,
    source: tuple[str, int, int] = ("layer_first", 16, 512),
    target: tuple[str, int, int] = ("page_first", 1, 256),
    limits: Limits = LIMITS,
    prefill_settings: dict[str, Any] | None = None,
    decode_settings: dict[str, Any] | None = None,
    decode_options: dict[str, Any] | None = None,
    arena_of: Callable[[Pool], ArenaMemory] = plain_arena,
    components: Callable[[Component], Sequence[Component]] = lambda one: [one],
    prefix_cache: bool = True,
    held: Any | None = None,
    start: bool = True,
) -> Iterator[Pair]:
    """`source` and `target` are (host layout, page size, slots). With `held`, a tensor of as many bytes on a GPU, the
    pool that prefill sends is there; `Pair.source` says what it is to hold in the end. Without `start` the test starts
    and closes the clients."""
    model = model or mla(layers=range(2))
    pools = [Pool(name=name, model=model, page_size=page, slots=slots) for name, page, slots in (source, target)]
    pools[0].fill(np.arange(pools[0].slots))
    arena = arena_of(pools[1])
    arena.mapping.array[:] = CANARY
    pools[1].__dict__["memory"] = arena.mapping.array[: len(pools[1].memory)]
    pools[1].__dict__.pop("tensor", None)
    prefill = PrefillClient(
        settings("p", limits, **prefill_settings or {}), [component(pools[0])],
        writer=WriterOptions(
            pool_address=pools[0].memory.ctypes.data if held is None else held.data_ptr(),
            device=None if held is None else held.get_device(),
        ),
    )  # fmt: skip
    decode = DecodeClient(
        settings("d", limits, **decode_settings or {}),
        list(components(component(pools[1]))),
        arena,
        prefix_cache=prefix_cache,
        **decode_options or {},
    )
    try:
        with prefill if start else nullcontext(), decode if start else nullcontext():
            yield Pair(prefill, decode, *pools)
    finally:
        for name in ("memory", "tensor"):
            pools[1].__dict__.pop(name, None)
        with suppress(BufferError):  # a failed test's frames still look at it
            arena.close()
