"""A ring of staging slots in a GPU's memory, with one stream for kernels and one for the copy engine.

All transfers share one stream, since concurrent transfers are slower than sequential ones. kernels/host_lanes.c queues
the work without the GIL; if it cannot be compiled, Python queues it more slowly.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import WorldError
from ...layout.geometry import Int64s
from .. import UnusableError, library_at, load_library
from ..arguments import THREADS, CopyArgument
from ..cancel import CancelWord
from ..gpu import POLL_SECONDS, Gpu
from ..pools import Progress, State
from ..staging import Staging

SLOTS = 3
SLOT_BYTES = 16 << 20
EVENTS = 9  # pending works: they keep the copy engine busy while the queueing thread waits for a core
_STAGINGS = 8  # pending lists of slots
NEVER_NS = (1 << 63) - 1
NAP_MAX_SECONDS, WAITED_PER_NAP = 100e-6, 256  # naps grow with what has been waited, since each costs CPU

ARGUMENT = np.dtype(CopyArgument)


class Works(NamedTuple):
    """Work of a ring, one slot at a time: kernel rows, then copy engine runs; a fetch reverses the order."""

    arguments: NDArray[Any]  # ARGUMENT (n,)
    table: Int64s  # int64 (n, 4): index of the argument or -1, its blocks, first run, end run
    runs: Int64s  # int64 (n, 3): source address, target address, bytes
    fetch: bool
    strides: Int64s | None = None  # int64 (n, 3), if a run is rows: source stride, target stride, rows
    staged: Staging | None = None  # holds the slots that the arguments refer to


class StagingRing:
    """A ring for one thread at a time. The slots' memory is allocated at first use and never freed."""

    def __init__(self, gpu: Gpu, *, count: int | None = None, slot_bytes: int | None = None) -> None:
        self.gpu, self.slot_bytes, self.count = gpu, slot_bytes or SLOT_BYTES, count or SLOTS
        self._rows, self._runs = gpu.stream(), gpu.stream()  # of kernels, of the copy engine
        events = max(EVENTS, self.count) // self.count * self.count
        self._halves, self._wholes = ([gpu.event() for _ in range(events)] for _ in range(2))
        self._handles = _handles(self._halves), _handles(self._wholes)
        self._fork, self._joins = gpu.event(), (gpu.event(), gpu.event())
        self._slots: list[int] = []
        self._stagings = [Staging(gpu.event()) for _ in range(_STAGINGS)]
        self.turn = 0  # works queued so far: the next work uses slot turn % count

    @property
    def slots(self) -> list[int]:
        """The device address of each slot."""
        if not self._slots:
            start = self.gpu.allocate(self.slot_bytes * self.count)
            self._slots = [start + index * self.slot_bytes for index in range(self.count)]
        return self._slots

    def stage(self, content: NDArray[np.int32]) -> Staging:
        """Stages `content` for the next works that are run with the result."""
        staging = self._stagings.pop(0)
        self._stagings.append(staging)
        self.gpu.enter()
        staging.put(self.gpu, content)
        return staging

    def run(self, works: Works, *, stream: int, cancel: CancelWord | None, progress: Progress | None) -> None:
        """Queues all works between the earlier and the later work on `stream`, until `cancel` is set.

        Few works are pending at a time, so `cancel` stops all others. The final `progress` covers all works. If the
        driver refuses, this raises WorldError after all queued work has ended; if that cannot be established either,
        `progress` stays RUNNING, and targets may still be written.
        """
        gpu, ticket = self.gpu, progress.begin() if progress is not None else 0
        works = _within_registrations(works, gpu)
        joins = works.staged.event if works.staged else self._joins[0], self._joins[1]
        try:
            if (queue := native().queue) is not None:
                state = self._queue_in_c(queue, works, cancel, stream, joins)
            else:
                state = self._queue_in_python(works, cancel, stream, joins)
            if progress is not None:
                gpu.write(progress.address, ticket << 2 | state, stream)
        except BaseException:
            for waited in (self._rows, self._runs, stream):
                gpu.synchronise(waited)
            if progress is not None:
                progress.end(State.CANCELLED)
            raise

    def _queue_in_c(
        self, queue: Callable[..., None], works: Works, cancel: CancelWord | None, stream: int, joins: tuple[Any, Any]
    ) -> State:  # fmt: skip
        gpu, calls = self.gpu, self.gpu.calls()
        columns = np.ascontiguousarray(works.runs.T)
        strides = None if works.strides is None else np.ascontiguousarray(works.strides.T)
        pitches = (0, 0, 0) if strides is None else [array.ctypes.data for array in strides]
        (halves, wholes), staged = self._handles, works.staged
        attributes = _CopyAttributes(order=1)  # in the stream's order
        argument = _LanesArgument(
            calls=ctypes.addressof(calls), context=gpu.context,
            function=gpu.function("kv_copy") if len(works.arguments) else 0,
            rows_stream=self._rows, runs_stream=self._runs,
            halves=ctypes.addressof(halves), wholes=ctypes.addressof(wholes),
            cancel=0 if cancel is None else cancel.address,
            arguments=works.arguments.ctypes.data, works=works.table.ctypes.data,
            sources=columns[0].ctypes.data, targets=columns[1].ctypes.data, sizes=columns[2].ctypes.data,
            source_pitches=pitches[0], target_pitches=pitches[1], counts=pitches[2],
            attributes=ctypes.addressof(attributes),
            stream=stream, fork=int(self._fork), rows_join=int(joins[0]), runs_join=int(joins[1]),
            opening=0 if staged is None else ctypes.addressof(staged.argument),
            opening_blocks=0 if staged is None else staged.blocks,
            slots=self.count, event_count=len(self._wholes), first_turn=self.turn, work_count=len(works.table),
            argument_bytes=ARGUMENT.itemsize, threads=THREADS, fetch=works.fetch,
        )  # fmt: skip
        queue(ctypes.byref(argument))
        self.turn += argument.queued
        if argument.status:
            raise WorldError(f"GPU {gpu.ordinal}: work {argument.queued - 1}: {gpu.status_of(argument.status)}")
        return State.CANCELLED if argument.cancelled else State.COMPLETE

    def _queue_in_python(self, works: Works, cancel: CancelWord | None, stream: int, joins: tuple[Any, Any]) -> State:
        gpu, streams, staged = self.gpu, (self._rows, self._runs), works.staged
        gpu.enter()
        gpu.record(self._fork, stream)
        if staged is not None:
            gpu.launch("kv_copy", staged.argument, blocks=staged.blocks, threads=THREADS, stream=self._rows)
        for lane in streams:
            gpu.follow(lane, self._fork)
        state = self._queue_works(works, cancel)
        for lane, join in zip(streams, joins, strict=True):
            gpu.record(join, lane)
            gpu.follow(stream, join)
        return state

    def _queue_works(self, works: Works, cancel: CancelWord | None) -> State:
        gpu, events = self.gpu, len(self._wholes)
        first, second = (self._runs, self._rows) if works.fetch else (self._rows, self._runs)
        for work in works.table.tolist():
            turn = self.turn
            half, whole = self._halves[turn % events], self._wholes[turn % events]
            if turn >= events:
                gpu.reach(whole)
            if cancel is not None and cancel.is_set:
                return State.CANCELLED
            self.turn += 1
            if turn >= self.count:
                gpu.follow(first, self._wholes[(turn - self.count) % events])
            self._queue_part(works, work, first)
            gpu.record(half, first)
            gpu.follow(second, half)
            self._queue_part(works, work, second)
            gpu.record(whole, second)
        return State.COMPLETE

    def _queue_part(self, works: Works, work: list[int], stream: int) -> None:
        index, blocks, first, end = work
        if stream == self._runs:
            strides = None if works.strides is None else works.strides[first:end]
            _copy_runs(self.gpu, works.runs[first:end], strides, stream)
        elif index >= 0:
            argument = CopyArgument.from_buffer_copy(works.arguments[index].tobytes())
            self.gpu.launch("kv_copy", argument, blocks=blocks, threads=THREADS, stream=stream)


def _copy_runs(gpu: Gpu, runs: Int64s, strides: Int64s | None, stream: int) -> None:
    """Queues each run in a transfer of its own; both arrays as in Works."""
    if strides is None:
        for source, target, byte_count in runs.tolist():
            gpu.copy(target, source, byte_count, stream)
        return
    for (source, target, byte_count), (pitch_in, pitch_out, rows) in zip(runs.tolist(), strides.tolist(), strict=True):
        gpu.copy_rows(target, source, byte_count, pitches=(pitch_out, pitch_in), rows=rows, stream=stream)


def _within_registrations(works: Works, gpu: Gpu) -> Works:
    """Splits the runs so that none crosses the border of a registration."""
    if not len(gpu.borders):
        return works
    runs, strides, origins = cut(works.runs, works.strides, gpu.borders)
    if len(runs) == len(works.runs):
        return works
    table = works.table.copy()
    table[:, 2:] = np.searchsorted(origins, works.table[:, 2:])
    return works._replace(runs=runs, strides=strides, table=table)


def cut(runs: Int64s, strides: Int64s | None, borders: Int64s) -> tuple[Int64s, Int64s | None, Int64s]:
    """Splits runs, in order, so that none crosses an address in `borders` (ascending) on either side.

    `runs` and `strides` as in Works. Returns both, and the index of each part's original run, int64 (m,).
    """
    origins = np.arange(len(runs))
    rows = strides if strides is not None else np.stack((runs[:, 2], runs[:, 2], np.ones_like(origins)), axis=1)
    starts, ends = runs[:, :2], runs[:, :2] + runs[:, 2:] + rows[:, :2] * (rows[:, 2:] - 1)
    whole = np.searchsorted(borders, starts, side="right") >= np.searchsorted(borders, ends, side="left")
    whole = whole.all(axis=1)
    if whole.all():
        return runs, strides, origins  # the usual case
    table = np.column_stack((runs, rows, origins))
    parts = [
        (*part, origin)
        for *columns, origin in table[~whole].tolist()
        for part in _parts(_StridedRows(*columns), borders)
    ]
    table = np.concatenate((table[whole], np.array(parts, np.int64)))
    table = table[np.argsort(table[:, 6], kind="stable")]
    return table[:, :3], None if strides is None else table[:, 3:6], table[:, 6]


class _StridedRows(NamedTuple):
    """`rows` rows of `bytes` bytes, with a stride on each side."""

    source: int
    target: int
    bytes: int
    source_stride: int
    target_stride: int
    rows: int

    def some(self, first: int, end: int) -> _StridedRows:
        """Rows first to end - 1."""
        source, target = self.source + first * self.source_stride, self.target + first * self.target_stride
        return self._replace(source=source, target=target, rows=end - first)

    def halves(self, byte_count: int) -> tuple[_StridedRows, _StridedRows]:
        """The first bytes of a single row, and its other bytes."""
        source, target = self.source + byte_count, self.target + byte_count
        rest = self._replace(source=source, target=target, bytes=self.bytes - byte_count)
        return self._replace(bytes=byte_count), rest


def _parts(rows: _StridedRows, borders: Int64s) -> list[_StridedRows]:
    """Splits rows at the borders, of which there may be thousands. A row that contains a border becomes two parts."""
    whole, left = list[_StridedRows](), [rows]
    while left:
        part = left.pop()
        if parts := _parts_at_a_border(part, borders):
            left += [piece for piece in reversed(parts) if piece.rows]
        else:
            whole.append(part)
    return whole


def _parts_at_a_border(rows: _StridedRows, borders: Int64s) -> list[_StridedRows]:
    """The rows split at one border, some parts perhaps without rows; none where they cross no border."""
    for start, stride in ((rows.source, rows.source_stride), (rows.target, rows.target_stride)):
        end = start + stride * (rows.rows - 1) + rows.bytes
        index = int(np.searchsorted(borders, start, side="right"))
        if index == len(borders) or borders[index] >= end:
            continue
        row, inside = divmod(int(borders[index]) - start, stride)  # the last row that begins at or before the border
        parts = [rows.some(0, row), rows.some(row, row + 1), rows.some(row + 1, rows.rows)]
        if 0 < inside < rows.bytes:
            parts[1:2] = parts[1].halves(inside)
        elif inside:  # in the gap behind that row
            parts = [rows.some(0, row + 1), rows.some(row + 1, rows.rows)]
        return parts
    return []


def _handles(events: list[Any]) -> Any:
    return (ctypes.c_uint64 * len(events))(*map(int, events))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. The driver knows the places of allocated and registered memory."""

    _fields_ = (("order", ctypes.c_int), ("places", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_ADDRESSES = (
    "calls", "context", "function", "rows_stream", "runs_stream", "halves", "wholes", "cancel", "arguments", "works",
    "sources", "targets", "sizes", "source_pitches", "target_pitches", "counts", "attributes", "stream", "fork",
    "rows_join", "runs_join", "opening",
)  # fmt: skip
_COUNTS = (
    "opening_blocks", "slots", "event_count", "work_count", "argument_bytes", "threads", "fetch", "first_turn",
    "queued",
)  # fmt: skip


class _LanesArgument(ctypes.Structure):
    """Lanes of kernels/host_lanes.c."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _ADDRESSES), *((name, ctypes.c_int64) for name in _COUNTS),
        ("status", ctypes.c_int32), ("cancelled", ctypes.c_int32),
    )  # fmt: skip


class _AwaitArgument(ctypes.Structure):
    """Await of kernels/host_lanes.c."""

    _fields_ = (
        ("calls", ctypes.c_uint64), ("context", ctypes.c_uint64), ("events", ctypes.c_uint64),
        ("called", ctypes.c_uint64), ("count", ctypes.c_int64), ("until", ctypes.c_int64), ("passed", ctypes.c_int64),
        ("status", ctypes.c_int32), ("unused", ctypes.c_int32),
    )  # fmt: skip


def wait_any(
    gpu: Gpu, events: Sequence[int], called: ctypes.c_uint32 | None, until_ns: int = NEVER_NS
) -> tuple[int, str]:
    """Sleeps, without the GIL, until an event has passed, `called` is not 0, or CLOCK_MONOTONIC reaches `until_ns`.

    Without `called` it only polls once. Returns the index of the passed event or -1, and the driver's error text if
    work before that event failed.
    """
    if (wait := native().wait) is None:
        return _wait_in_python(gpu, events, called, until_ns)
    handles, calls = (ctypes.c_uint64 * len(events))(*events), gpu.calls()
    argument = _AwaitArgument(
        calls=ctypes.addressof(calls), context=gpu.context, events=ctypes.addressof(handles),
        called=0 if called is None else ctypes.addressof(called), count=len(events), until=until_ns,
    )  # fmt: skip
    wait(ctypes.byref(argument))
    failed = f"GPU {gpu.ordinal}: cuEventQuery: {gpu.status_of(argument.status)}" if argument.status else ""
    return argument.passed, failed


def _wait_in_python(gpu: Gpu, events: Sequence[int], called: ctypes.c_uint32 | None, until_ns: int) -> tuple[int, str]:
    began_ns = time.monotonic_ns()
    while True:
        for index, event in enumerate(events):
            try:
                if gpu.passed(event):
                    return index, ""
            except WorldError as error:
                return index, str(error)
        if called is None or called.value or (now_ns := time.monotonic_ns()) >= until_ns:
            return -1, ""
        time.sleep(min(max(POLL_SECONDS, (now_ns - began_ns) / WAITED_PER_NAP / 1e9), NAP_MAX_SECONDS))


class NativeLanes(NamedTuple):
    """The functions of kernels/host_lanes.c, or None to queue from Python. `text` describes it for a person."""

    text: str
    queue: Callable[..., None] | None = None
    wait: Callable[..., None] | None = None


@cache
def native() -> NativeLanes:
    """This process's functions. The first call may compile for a second."""
    try:
        return load_library("host_lanes", None, _open)
    except UnusableError as error:
        return NativeLanes(f"queued by Python: {error}")


def _open(path: Path) -> NativeLanes:
    library = library_at(path)
    functions = library.pdtransfer_lanes, library.pdtransfer_await
    for function in functions:
        function.argtypes, function.restype = (ctypes.c_void_p,), None
    return NativeLanes(f"compiled queue: {path}", *functions)


@contextmanager
def borrowed(gpu: Gpu) -> Generator[StagingRing]:
    """A ring that no other thread uses meanwhile. Its pending work runs before new work."""
    with _lock:
        idle = _idle.setdefault(gpu, [])
        ring = idle.pop() if idle else None
    ring = ring or StagingRing(gpu)
    try:
        yield ring
    finally:
        with _lock:
            idle.append(ring)


_lock = threading.Lock()
_idle: dict[Gpu, list[StagingRing]] = {}
