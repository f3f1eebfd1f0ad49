"""A ring in a card's memory, with the two streams that fill and empty its slots: the kernels' and the copy engine's.

The engine's has all transfers one after another: two at a time, on streams of their own, are slower together than in
turn. kernels/host_lanes.c queues without the GIL; where nothing could compile it Python does, at six times the cost.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import WorldError
from ..layout.geometry import Int64s
from . import UnusableError, loaded
from .cancel import Cancel
from .card import POLL_SECONDS, Card
from .dma import Attributes, copy_runs, cut, cut_rows
from .kv_copy import BLOCKS_PUSH, THREADS, CopyArgument, SlotsArgument
from .pools import Progress, State

SLOTS = 3
SLOT_BYTES = 16 << 20
EVENTS = 9  # works that are pending: 2 ms of the engine's, for who queues may have to wait for a core
_STAGINGS = 8  # lists of slots that are pending
_STAGING_BYTES_MIN = 64 << 10
_PIECE_BYTES = 2_048  # of a list, for a warp: what kv_copy takes at once
_ABI = 6  # of kernels/host_lanes.c
NEVER_NS = (1 << 63) - 1

ARGUMENT = np.dtype(CopyArgument)


class Works(NamedTuple):
    """What is done, a slot at a time: rows by the kernel, then runs by the copy engine; in a fetch the reverse."""

    arguments: NDArray[Any]  # ARGUMENT (n,)
    table: Int64s  # int64 (n, 4): which argument, or -1; its blocks; first run, end run
    runs: Int64s  # int64 (n, 3): source address, target address, bytes
    fetch: bool
    strides: Int64s | None = None  # int64 (n, 3) where a run is rows: from one to the next there and here, how many
    staged: Staging | None = None  # what the arguments' slots are in


@dataclass(slots=True, eq=False)
class Staging:
    """Pinned memory, and the card's beside it, for one list of slots at a time; what it outgrows is never freed.

    The kernel brings the list over, since the copy engine would do so only after all that it has been given before.
    """

    event: Any  # after the last work that reads the list
    byte_count: int = 0
    address: int = 0  # of the list, once it is there
    blocks: int = 0
    argument: CopyArgument = field(default_factory=CopyArgument)
    _here: int = 0

    def put(self, card: Card, content: NDArray[np.int32]) -> None:
        """Has `argument` bring it; waits for those who read the one before."""
        if self.byte_count < content.nbytes:
            byte_count = max(_STAGING_BYTES_MIN, 1 << content.nbytes.bit_length())
            here, there = card.pinned(_PIECE_BYTES + byte_count)
            self.address, self._here = card.allocate(byte_count), here + _PIECE_BYTES
            pair = there + _PIECE_BYTES, _PIECE_BYTES, 0, self.address, _PIECE_BYTES, 0, _PIECE_BYTES
            ctypes.memmove(here, (ctypes.c_int64 * 7)(*pair), 56)
            side = SlotsArgument(entry_limit=byte_count // _PIECE_BYTES)
            self.argument = CopyArgument(
                pairs=there, pair_count=1, source=side, target=side, group_shift=5, by_source=1
            )  # fmt: skip
            self.byte_count = byte_count  # only now: there may be none
        else:
            card.reach(self.event)
        ctypes.memmove(self._here, content.ctypes.data, content.nbytes)
        self.argument.count = -(-content.nbytes // _PIECE_BYTES)
        self.blocks = min(BLOCKS_PUSH, -(-self.argument.count * 32 // THREADS))


class Ring:
    """For one thread at a time; the memory of `slots` is taken at their first use and never freed."""

    def __init__(self, here: Card, *, count: int | None = None, slot_bytes: int | None = None) -> None:
        self.card, self.slot_bytes, self.count = here, slot_bytes or SLOT_BYTES, count or SLOTS
        self._rows, self._runs = here.stream(), here.stream()
        events = max(EVENTS, self.count) // self.count * self.count
        self._halves, self._wholes = ([here.event() for _ in range(events)] for _ in range(2))
        self._handles = _handles(self._halves), _handles(self._wholes)
        self._fork, self._joins = here.event(), (here.event(), here.event())
        self._slots: list[int] = []
        self._stagings = [Staging(here.event()) for _ in range(_STAGINGS)]
        self.turn = 0  # works that were ever queued: the next one has slot turn % count

    @property
    def slots(self) -> list[int]:
        """The address of each."""
        if not self._slots:
            start = self.card.allocate(self.slot_bytes * self.count)
            self._slots = [start + at * self.slot_bytes for at in range(self.count)]
        return self._slots

    def stage(self, content: NDArray[np.int32]) -> Staging:
        """Where the card will have `content` for the next works that are run with it."""
        staging = self._stagings.pop(0)
        self._stagings.append(staging)
        self.card.enter()
        staging.put(self.card, content)
        return staging

    def run(self, works: Works, *, stream: int, cancel: Cancel | None, progress: Progress | None) -> None:
        """Queues all works, between what `stream` has now and what it will have later, until `cancel` is set.

        This is only some works ahead of the card, so that what is set stops all but those. What `progress`
        says last is true of every work. Where the card refuses, this raises WorldError once nothing is pending any
        more; if the card does not say that either, `progress` stays RUNNING, and nobody can tell what is still written.
        """
        here, ticket = self.card, progress.begin() if progress is not None else 0
        works = _whole(works, here)
        joins = works.staged.event if works.staged else self._joins[0], self._joins[1]
        try:
            if (queue := native().queue) is not None:
                state = self._by_c(queue, works, cancel, stream, joins)
            else:
                state = self._by_python(works, cancel, stream, joins)
            if progress is not None:
                here.write(progress.address, ticket << 2 | state, stream)
        except BaseException:
            for each in (self._rows, self._runs, stream):
                here.synchronise(each)
            if progress is not None:
                progress.end(State.CANCELLED)
            raise

    def _by_c(
        self, queue: Callable[..., None], works: Works, cancel: Cancel | None, stream: int, joins: tuple[Any, Any]
    ) -> State:  # fmt: skip
        here, calls = self.card, self.card.calls()
        columns = np.ascontiguousarray(works.runs.T)
        strides = None if works.strides is None else np.ascontiguousarray(works.strides.T)
        pitches = (0, 0, 0) if strides is None else [each.ctypes.data for each in strides]
        (halves, wholes), staged = self._handles, works.staged
        attributes = Attributes(order=1)  # in the stream's order
        argument = _LanesArgument(
            calls=ctypes.addressof(calls),
            context=here.context,
            function=here.function("kv_copy") if len(works.arguments) else 0,
            rows_stream=self._rows,
            runs_stream=self._runs,
            halves=ctypes.addressof(halves),
            wholes=ctypes.addressof(wholes),
            cancel=0 if cancel is None else cancel.address,
            arguments=works.arguments.ctypes.data,
            works=works.table.ctypes.data,
            sources=columns[0].ctypes.data,
            targets=columns[1].ctypes.data,
            sizes=columns[2].ctypes.data,
            source_pitches=pitches[0],
            target_pitches=pitches[1],
            counts=pitches[2],
            attributes=ctypes.addressof(attributes),
            stream=stream,
            fork=int(self._fork),
            rows_join=int(joins[0]),
            runs_join=int(joins[1]),
            opening=0 if staged is None else ctypes.addressof(staged.argument),
            opening_blocks=0 if staged is None else staged.blocks,
            slots=self.count,
            event_count=len(self._wholes),
            first_turn=self.turn,
            work_count=len(works.table),
            argument_bytes=ARGUMENT.itemsize,
            threads=THREADS,
            fetch=works.fetch,
        )
        queue(ctypes.byref(argument))
        self.turn += argument.queued
        if argument.status:
            raise WorldError(f"card {here.ordinal}: work {argument.queued - 1}: {here.status_of(argument.status)}")
        return State.CANCELLED if argument.cancelled else State.COMPLETE

    def _by_python(self, works: Works, cancel: Cancel | None, stream: int, joins: tuple[Any, Any]) -> State:
        here, streams, staged = self.card, (self._rows, self._runs), works.staged
        here.enter()
        here.record(self._fork, stream)
        if staged is not None:
            here.launch("kv_copy", staged.argument, blocks=staged.blocks, threads=THREADS, stream=self._rows)
        for each in streams:
            here.follow(each, self._fork)
        state = self._queue(works, cancel)
        for each, join in zip(streams, joins, strict=True):
            here.record(join, each)
            here.follow(stream, join)
        return state

    def _queue(self, works: Works, cancel: Cancel | None) -> State:
        here, events = self.card, len(self._wholes)
        first, second = (self._runs, self._rows) if works.fetch else (self._rows, self._runs)
        for work in works.table.tolist():
            turn = self.turn
            half, whole = self._halves[turn % events], self._wholes[turn % events]
            if turn >= events:
                here.reach(whole)
            if cancel is not None and cancel.is_set:
                return State.CANCELLED
            self.turn += 1
            if turn >= self.count:
                here.follow(first, self._wholes[(turn - self.count) % events])
            self._part(works, work, first)
            here.record(half, first)
            here.follow(second, half)
            self._part(works, work, second)
            here.record(whole, second)
        return State.COMPLETE

    def _part(self, works: Works, work: list[int], stream: int) -> None:
        argument, blocks, first, end = work
        if stream == self._runs:
            strides = None if works.strides is None else works.strides[first:end]
            copy_runs(self.card, works.runs[first:end], strides, stream)
        elif argument >= 0:
            told = CopyArgument.from_buffer_copy(works.arguments[argument].tobytes())
            self.card.launch("kv_copy", told, blocks=blocks, threads=THREADS, stream=stream)


def _whole(works: Works, here: Card) -> Works:
    """The same with no run across two registrations."""
    if not len(here.borders):
        return works
    if works.strides is None:
        (runs, origins), strides = cut(works.runs, here.borders), None
    else:
        runs, strides, origins = cut_rows(works.runs, works.strides, here.borders)
    if len(runs) == len(works.runs):
        return works
    table = works.table.copy()
    table[:, 2:] = np.searchsorted(origins, works.table[:, 2:])
    return works._replace(runs=runs, strides=strides, table=table)


def _handles(each: list[Any]) -> Any:
    return (ctypes.c_uint64 * len(each))(*map(int, each))


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
    here: Card, events: Sequence[int], called: ctypes.c_uint32 | None, until_ns: int = NEVER_NS
) -> tuple[int, str]:
    """Sleeps, without the GIL, until the card has passed one of these CUDA events, or `called` is no longer 0, or it is
    `until_ns` by CLOCK_MONOTONIC. Without `called` it only looks.

    Returns which, or -1, and with it the driver's word where what was before that event has failed.
    """
    if (wait := native().wait) is None:
        return _waited(here, events, called, until_ns)
    handles, calls = (ctypes.c_uint64 * len(events))(*events), here.calls()
    argument = _AwaitArgument(
        calls=ctypes.addressof(calls),
        context=here.context,
        events=ctypes.addressof(handles),
        called=0 if called is None else ctypes.addressof(called),
        count=len(events),
        until=until_ns,
    )
    wait(ctypes.byref(argument))
    failed = f"card {here.ordinal}: cuEventQuery: {here.status_of(argument.status)}" if argument.status else ""
    return argument.passed, failed


def _waited(here: Card, events: Sequence[int], called: ctypes.c_uint32 | None, until_ns: int) -> tuple[int, str]:
    while called is None or not called.value:
        for at, event in enumerate(events):
            try:
                if here.passed(event):
                    return at, ""
            except WorldError as error:
                return at, str(error)
        if called is None or time.monotonic_ns() >= until_ns:
            break
        time.sleep(POLL_SECONDS)
    return -1, ""


class Native(NamedTuple):
    """kernels/host_lanes.c, or nothing where Python has to do its work; `text` tells a person which, or why."""

    text: str
    queue: Callable[..., None] | None = None
    wait: Callable[..., None] | None = None


@cache
def native() -> Native:
    """What queues in this process. The first call may compile for a second."""
    try:
        return loaded("host_lanes", None, _opened)
    except UnusableError as error:
        return Native(f"queued by Python: {error}")


def _opened(path: Path) -> Native:
    try:
        library = ctypes.CDLL(str(path))
        abi, functions = library.pdtransfer_abi(), (library.pdtransfer_lanes, library.pdtransfer_await)
    except (OSError, AttributeError) as error:
        raise UnusableError(f"{path}: {error}") from None
    if abi != _ABI:
        raise UnusableError(f"{path}: its interface is {abi}, not {_ABI}")
    for function in functions:
        function.argtypes, function.restype = (ctypes.c_void_p,), None
    return Native(f"compiled queue: {path}", *functions)


@contextmanager
def borrowed(here: Card) -> Generator[Ring]:
    """A ring that nobody else queues to meanwhile; what is still pending there only goes before."""
    with _lock:
        idle = _idle.setdefault(here, [])
        ring = idle.pop() if idle else None
    ring = ring or Ring(here)
    try:
        yield ring
    finally:
        with _lock:
            idle.append(ring)


_lock = threading.Lock()
_idle: dict[Card, list[Ring]] = {}
