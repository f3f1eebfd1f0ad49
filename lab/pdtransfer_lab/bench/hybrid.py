"""A hybrid model's cache between a GPU and its host: each host layout by each way of moving it, both directions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Literal, NamedTuple, Protocol, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from pdtransfer.errors import LocalProtocolError, WorldError
from pdtransfer.kernels import copy as host_copy
from pdtransfer.kernels.driver import count as card_count
from pdtransfer.kernels.gpu import Gpu, gpu_at
from pdtransfer.kernels.kv_copy import check_copy, pairing_of
from pdtransfer.kernels.kv_copy import prepare as prepare_rows
from pdtransfer.kernels.pools import Pool
from pdtransfer.kernels.push import prepare
from pdtransfer.kernels.registered import CHUNK_BYTES
from pdtransfer.layout.deepseek_v4 import deepseek_v4
from pdtransfer.layout.geometry import Int64s
from pdtransfer.layout.layout import Component, expand_pages
from pdtransfer.layout.layout_builders import ITEM_LAYOUTS
from pdtransfer.layout.plan import plan
from pdtransfer.memory.arena_memory import ArenaMemory

from .report import Figures, Line

RATIOS = (0, 0, *(4, 128) * 29, 4)  # 61 layers, of which two keep their window alone
TOKENS = (4_096, 32_768)  # of one room
_RATIOS_ON_CPU, _TOKENS_ON_CPU = (0, 4, 128, 4), (8_192,)
_RUNS = 9
_CANARY = 0xA5

Bytes = NDArray[np.uint8]
Direction = Literal["push", "load"]
_FROM_TO: dict[Direction, str] = {"push": "GPU to host", "load": "host to GPU"}


class PageSizes(TypedDict, total=False):
    """Arguments of deepseek_v4."""

    page_tokens: int
    window_page_size: int
    page_align: int


class HostShape(NamedTuple):
    """A host layout and the tokens of its pages; 1 is rows without pages."""

    layout: str
    page_tokens: int = 256

    @property
    def name(self) -> str:
        return self.layout if self.page_tokens > 1 else f"{self.layout}_single"

    @property
    def sizes(self) -> PageSizes:
        if self.page_tokens == 1:
            return {"page_tokens": 1, "window_page_size": 1, "page_align": 8}
        return {"page_tokens": self.page_tokens}

    @property
    def what(self) -> str:
        return f"{self.layout}, pages of {self.page_tokens}" if self.page_tokens > 1 else f"{self.layout}, single rows"


Way = Literal["rows", "kernel", "direct", "ring", "auto"]
WAYS: tuple[Way, ...] = get_args(Way)
SHAPES = (*(HostShape(name) for name in ITEM_LAYOUTS), HostShape("page_first", 1))
Work = Sequence[Callable[[], object]]


class Clock(Protocol):
    """Times work between a pool and an arena, and shows the bytes of both."""

    @property
    def device(self) -> int | None: ...

    @property
    def stream(self) -> int: ...

    @property
    def pool_address(self) -> int: ...

    @property
    def arena_address(self) -> int: ...

    @property
    def arena(self) -> Bytes: ...

    def put(self, content: Bytes) -> None:
        """Fills the pool."""
        ...

    def get(self) -> Bytes:
        """The pool's bytes, once nothing is under way."""
        ...

    def seconds(self, work: Work) -> float:
        """From before the first of these calls to the end of what they queue."""
        ...

    def plain(self, target: int, source: int, byte_count: int) -> None:
        """Queues one contiguous copy."""
        ...


class Move(NamedTuple):
    """One component's rows: pages of the pool and of the arena, in the order of the room's rows."""

    pool: Component
    arena: Component
    pool_slots: Int64s
    arena_slots: Int64s


def measure(*, runs: int = _RUNS, tokens: Sequence[int] = ()) -> Figures:
    """One room of a DeepSeek V4-like model (61 layers: 30 with C4 and an index, 29 with C128, windows and states in
    all) between a layer_first pool of pages of 256 tokens in GPU 0 and a registered arena, component after component
    on one stream. The room's pages lie anywhere in the pool, and in one run in the arena.

    `rows` is the copy kernel row by row; `kernel` takes whole pages where rows are narrow. `direct` is one transfer of
    the copy engine for each contiguous run. `ring` gathers into a ring in the GPU's memory that the copy engine
    drains, and takes `kernel` for components that a ring cannot carry. `auto` is what daemons do. Single rows are not
    copied one by one. Every way is done once and every byte of its target compared, padding included. Then all ways
    take turns with one contiguous DMA of the same bytes: medians of `runs`, by events around the queueing; a plan is
    made ahead. A share is the DMA's time to a way's.

    Without a GPU both sides are memory of this process, the model has 4 layers and the room 8,192 tokens; then it
    measures the CPU's copies of the same plans beside one memcpy, and measures nothing of a GPU.
    """
    on_card = card_count() > 0
    sizes = tuple(tokens) or (TOKENS if on_card else _TOKENS_ON_CPU)
    ratios = RATIOS if on_card else _RATIOS_ON_CPU
    figures: Figures = {"sizes": " ".join(map(str, sizes)), "on": gpu_at(0).architecture if on_card else "the CPU"}
    for size in sizes:
        rooms = {shape: _moves(shape, ratios, size) for shape in SHAPES}
        sides = [[getattr(move, side) for moves in rooms.values() for move in moves] for side in ("pool", "arena")]
        pool_bytes, arena_bytes = (max(move.layout.end for move in side) for side in sides)
        byte_count = sum(len(room.pool_slots) * room.pool.layout.row_bytes for room in rooms[SHAPES[0]])
        figures[f"{size}_mb"] = byte_count / 1e6
        with _clock(pool_bytes, arena_bytes, on_card=on_card) as clock:
            for direction in _FROM_TO:
                checked = _Checked(clock, direction, pool_bytes, arena_bytes)
                measured = _direction(clock, direction, rooms, checked, byte_count=byte_count, runs=runs)
                figures |= {f"{size}_{direction}_{name}": value for name, value in measured.items()}
    return figures


def lines(figures: Figures) -> list[Line]:
    """The table: a line for each layout and direction, and the best pair of each direction."""
    report = [Line("on", "{on}", "GB/s, and the share of one contiguous copy's rate in the same run")]
    for size in str(figures["sizes"]).split():
        report.append(Line(f"a room of {int(size):,} tokens", f"{{{size}_mb:.1f}} MB"))
        for direction, path in _FROM_TO.items():
            key = f"{size}_{direction}"
            report.append(Line(f"{path}: one copy", f"{{{key}_plain_gb_s:.1f}}"))
            for shape in SHAPES:
                shape_key = f"{key}_{shape.name}"
                ways = [
                    f"{way} {{{shape_key}_{way}_gb_s:.1f}} ({{{shape_key}_{way}_share:.3f}})"
                    for way in WAYS
                    if f"{shape_key}_{way}_share" in figures
                ]
                through = f"; a ring carries {{{shape_key}_ring_bytes:.0%}}"
                report.append(Line(f"{path}: {shape.what}", f"{{{shape_key}_best}}", ", ".join(ways) + through))
            report.append(
                Line(f"{path}: best", f"{{{key}_best}}", f"{{{key}_claim:.3f}} of its rate: page_first_direct, direct")
            )
    return report


def _moves(shape: HostShape, ratios: Sequence[int], tokens: int) -> list[Move]:
    """The room's components, its pages anywhere in the pool."""
    pool = deepseek_v4("layer_first", ratios=ratios, tokens=tokens, requests=2)
    arena = deepseek_v4(shape.layout, ratios=ratios, tokens=tokens, requests=1, **shape.sizes)
    rng, moves = np.random.default_rng(0), list[Move]()
    for ours, theirs in zip(pool, arena, strict=True):
        rows, size = ours.rows(tokens), ours.layout.page_size
        pages = rng.permutation(ours.layout.slots // size)[: -(-rows // size)]
        moves.append(Move(ours, theirs, expand_pages(pages, size, rows), np.arange(rows)))
    return moves


def _direction(
    clock: Clock, direction: Direction, rooms: dict[HostShape, list[Move]], checked: _Checked, *, byte_count: int,
    runs: int,
) -> Figures:  # fmt: skip
    """Figures of one direction, by shape and way."""
    figures: Figures = {}
    make: dict[str, Callable[[], Work]] = {}
    for shape, moves in rooms.items():
        ringed = [
            len(move.pool_slots) * move.pool.layout.row_bytes for move in moves if _ringed(clock, direction, move)
        ]
        figures[f"{shape.name}_ring_bytes"] = sum(ringed) / byte_count
        checked.expect(moves)
        for way in WAYS:
            if (shape.page_tokens == 1 and way in ("rows", "direct")) or (way == "ring" and not ringed):
                continue
            make[f"{shape.name}_{way}"] = partial(_work, clock, direction, way, moves)
            checked.check(_work(clock, direction, way, moves), f"{shape.what}, {way}")
    ends = (clock.arena_address, clock.pool_address)[:: 1 if direction == "push" else -1]
    make["plain"] = lambda: [partial(clock.plain, *ends, byte_count)]
    times: dict[str, list[float]] = {name: [] for name in make}
    for run in range(runs + 1):  # the first is not counted
        for name in list(make)[:: 1 if run % 2 else -1]:
            seconds = clock.seconds(make[name]())
            if run:
                times[name].append(seconds)
    plain = median(times["plain"])
    for name, seconds in times.items():
        figures[f"{name}_gb_s"], figures[f"{name}_share"] = byte_count / median(seconds) / 1e9, plain / median(seconds)
        figures[f"{name}_low"], figures[f"{name}_high"] = plain / max(seconds), plain / min(seconds)
    shares = {name: float(figures[f"{name}_share"]) for name in make if name != "plain"}
    for shape in rooms:
        shares_of_shape = {way: shares[name] for way in WAYS if (name := f"{shape.name}_{way}") in shares}
        figures[f"{shape.name}_best"] = max(shares_of_shape, key=shares_of_shape.__getitem__)
    best = max(shares, key=shares.__getitem__)
    figures["best"], figures["claim"] = best, shares["page_first_direct_direct"] / shares[best]
    return figures


class _Checked:
    """A source of random bytes, and what each shape's target must hold after a copy."""

    def __init__(self, clock: Clock, direction: Direction, pool_bytes: int, arena_bytes: int) -> None:
        self._clock, self._what, self._push = clock, _FROM_TO[direction], direction == "push"
        sizes = (pool_bytes, arena_bytes) if self._push else (arena_bytes, pool_bytes)
        self._source = np.frombuffer(np.random.default_rng(1).bytes(sizes[0]), np.uint8)
        self._target = np.empty(sizes[1], np.uint8)
        if self._push:
            clock.put(self._source)
        else:
            clock.arena[:arena_bytes] = self._source

    def expect(self, moves: list[Move]) -> None:
        """Does on the CPU what the ways have to do with this shape."""
        self._target[:] = _CANARY
        for move in moves:
            source, target = (move.pool, move.arena) if self._push else (move.arena, move.pool)
            slots = (move.pool_slots, move.arena_slots) if self._push else (move.arena_slots, move.pool_slots)
            work = plan(pairing_of(source.layout, target.layout), slots[0], slots[1])
            host_copy(work, self._source.ctypes.data, self._target.ctypes.data)

    def check(self, work: Work, way: str) -> None:
        """Does the work once. Raises WorldError where a byte of the target is wrong."""
        clock, size = self._clock, len(self._target)
        if self._push:
            clock.arena[:size] = _CANARY
        else:
            clock.put(np.full(size, _CANARY, np.uint8))
        clock.seconds(work)
        actual = clock.arena[:size] if self._push else clock.get()[:size]
        if not np.array_equal(actual, self._target):
            index = int(np.flatnonzero(actual != self._target)[0])
            text = f"byte {index} of the target is {actual[index]}, not {self._target[index]}"
            raise WorldError(f"{self._what}, {way}: {text}")


def _work(clock: Clock, direction: Direction, way: Way, moves: list[Move]) -> Work:
    """What queues each component, planned ahead; to be called once."""
    return [_prepared(clock, direction, way, move) for move in moves]


def _prepared(clock: Clock, direction: Direction, way: Way, move: Move) -> Callable[[], None]:
    target, source, *slots = _sides(clock, direction, move)
    rows, stream = len(move.pool_slots), clock.stream
    if way == "rows":
        return prepare_rows(check_copy(target, source, slots[0], slots[1], rows), rows, stream=stream)
    if way == "ring" and not _ringed(clock, direction, move):
        way = "kernel"
    return prepare(target, source, slots[0], slots[1], rows, backend=way, stream=stream)


def _ringed(clock: Clock, direction: Direction, move: Move) -> bool:
    """Whether a ring can carry this component."""
    target, source, *slots = _sides(clock, direction, move)
    try:
        prepare(target, source, slots[0], slots[1], len(move.pool_slots), backend="ring", stream=clock.stream)
    except LocalProtocolError:
        return False
    return True


def _sides(clock: Clock, direction: Direction, move: Move) -> tuple[Pool, Pool, Int64s, Int64s]:
    """Target and source, and the slots of each."""
    pool = Pool(layout=move.pool.layout, address=clock.pool_address, device=clock.device)
    arena = Pool(
        layout=move.arena.layout, address=clock.arena_address, device=clock.device, host=clock.device is not None
    )
    if direction == "push":
        return arena, pool, move.arena_slots, move.pool_slots
    return pool, arena, move.pool_slots, move.arena_slots


class _CpuClock:
    device, stream = None, 0

    def __init__(self, pool_bytes: int, arena_bytes: int) -> None:
        self._pool, self.arena = (np.zeros(count, np.uint8) for count in (pool_bytes, arena_bytes))
        self.pool_address, self.arena_address = self._pool.ctypes.data, self.arena.ctypes.data

    def put(self, content: Bytes) -> None:
        self._pool[: len(content)] = content

    def get(self) -> Bytes:
        return self._pool

    def seconds(self, work: Work) -> float:
        begin = perf_counter()
        for copy in work:
            copy()
        return perf_counter() - begin

    def plain(self, target: int, source: int, byte_count: int) -> None:
        ctypes.memmove(target, source, byte_count)


class _CardClock:
    device = 0

    def __init__(self, gpu: Gpu, pool_bytes: int, arena: ArenaMemory, arena_address: int) -> None:
        self._gpu, self.stream = gpu, gpu.stream()
        self.pool_address, self._pool_bytes = gpu.allocate(pool_bytes), pool_bytes
        # Not a view of the mapping: an error keeps it alive, and then the arena could not be closed.
        self.arena = np.ctypeslib.as_array((ctypes.c_uint8 * arena.byte_count).from_address(arena.mapping.address))
        self.arena_address = arena_address
        self._events = [gpu.call("cuEventCreate", 0) for _ in range(2)]

    def put(self, content: Bytes) -> None:
        self._gpu.upload(self.pool_address, content, self.stream)
        self._gpu.synchronise(self.stream)

    def get(self) -> Bytes:
        content = np.empty(self._pool_bytes, np.uint8)
        self._gpu.enter()
        self._gpu.call("cuMemcpyDtoH", content.ctypes.data, self.pool_address, self._pool_bytes)
        return content

    def seconds(self, work: Work) -> float:
        start, end = self._events
        self._gpu.finish()
        self._gpu.call("cuEventRecord", start, self.stream)
        for copy in work:
            copy()
        self._gpu.enter()
        self._gpu.call("cuEventRecord", end, self.stream)
        self._gpu.call("cuEventSynchronize", end)
        return float(self._gpu.call("cuEventElapsedTime", start, end)) / 1e3

    def plain(self, target: int, source: int, byte_count: int) -> None:
        for offset in range(0, byte_count, CHUNK_BYTES):
            self._gpu.copy(target + offset, source + offset, min(CHUNK_BYTES, byte_count - offset), self.stream)

    def close(self) -> None:
        self._gpu.finish()
        self._gpu.free(self.pool_address)


@contextmanager
def _clock(pool_bytes: int, arena_bytes: int, *, on_card: bool) -> Generator[Clock]:
    if not on_card:
        yield _CpuClock(pool_bytes, arena_bytes)
        return
    gpu, arena = gpu_at(0), ArenaMemory.create(arena_bytes)
    arena.gpu = gpu
    try:
        arena.prefault()
        assert arena.mapping.registered is not None
        clock = _CardClock(gpu, pool_bytes, arena, arena.mapping.registered.device_address)
        try:
            yield clock
        finally:
            clock.close()
    finally:
        arena.close()
