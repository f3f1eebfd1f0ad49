"""Streams of a card that are taken in turn, each with a slot of a ring in the card's memory.

A lane gathers and drains its own slot, one after the other, so that a slot needs no more protection than its stream's
order; while one lane gathers the copy engine drains another. kernels/host_lanes.c queues without the GIL; where nothing
could compile it Python does, at twenty times the cost.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cancel import Cancel
from ..errors import WorldError
from ..geometry import Int64s
from . import UnusableError, loaded
from .card import Card
from .dma import Attributes, copy_runs, cut
from .kv_copy import THREADS, CopyArgument
from .pools import Progress, State

LANES = 2
SLOT_BYTES = 16 << 20
EVENTS = 3  # that are pending, each after one work more than there are lanes, so that every lane has its turn at them
_ABI = 1  # of kernels/host_lanes.c

ARGUMENT = np.dtype(CopyArgument)


class Works(NamedTuple):
    """What is done one after another, a lane at a time: rows by the kernel, then runs, or in a fetch the reverse."""

    arguments: NDArray[Any]  # ARGUMENT (n,)
    table: Int64s  # int64 (n, 4): which argument, or -1; its blocks; first run, end run
    runs: Int64s  # int64 (n, 3): source address, target address, bytes
    fetch: bool


class Lanes:
    """For one thread at a time; `slots` are made at their first use and never freed."""

    def __init__(self, here: Card, *, count: int | None = None, slot_bytes: int | None = None) -> None:
        self.card, self.slot_bytes = here, slot_bytes or SLOT_BYTES
        self.streams = [here.stream() for _ in range(count or LANES)]
        self._events = [here.event() for _ in range(EVENTS)]
        self._fork, self._joins = here.event(), [here.event() for _ in self.streams]
        self._slots: list[int] = []

    @property
    def slots(self) -> list[int]:
        """The address of each lane's slot."""
        if not self._slots:
            start = self.card.allocate(self.slot_bytes * len(self.streams))
            self._slots = [start + at * self.slot_bytes for at in range(len(self.streams))]
        return self._slots

    @property
    def ahead(self) -> int:
        """The most works that are queued and not done, as far as lanes keep step."""
        return self._every * len(self._events)

    @property
    def _every(self) -> int:
        return len(self.streams) + 1

    def run(self, works: Works, *, stream: int, cancel: Cancel | None, progress: Progress | None) -> None:
        """Queues all works, between what `stream` has now and what it will have later, until `cancel` is set.

        This is only some works ahead of the card, so that what is set stops all but those. What `progress`
        says last is true of every work. Where the card refuses, this raises WorldError once nothing is pending any
        more; if the card does not say that either, `progress` stays RUNNING, and nobody can tell what is still written.
        """
        here, ticket = self.card, progress.begin() if progress is not None else 0
        works = _whole(works, here)
        try:
            here.enter()
            here.record(self._fork, stream)
            native = _native()
            state = self._by_c(native, works, cancel) if native is not None else self._by_python(works, cancel)
            for lane, event in zip(self.streams, self._joins[: len(works.table)], strict=False):
                here.record(event, lane)
                here.follow(stream, event)
            if progress is not None:
                here.write(progress.address, ticket << 2 | state, stream)
        except BaseException:
            for each in (*self.streams, stream):
                here.synchronise(each)
            if progress is not None:
                progress.end(State.CANCELLED)
            raise

    def _by_c(self, native: Callable[..., None], works: Works, cancel: Cancel | None) -> State:
        here, calls = self.card, self.card.calls()
        columns = np.ascontiguousarray(works.runs.T)
        streams, events = (_handles(each) for each in (self.streams, self._events))
        attributes = Attributes(order=1)  # in the stream's order
        argument = _LanesArgument(
            calls=ctypes.addressof(calls),
            context=here.context,
            function=here.function("kv_copy") if len(works.arguments) else 0,
            streams=ctypes.addressof(streams),
            events=ctypes.addressof(events),
            cancel=0 if cancel is None else cancel.address,
            arguments=works.arguments.ctypes.data,
            works=works.table.ctypes.data,
            sources=columns[0].ctypes.data,
            targets=columns[1].ctypes.data,
            sizes=columns[2].ctypes.data,
            attributes=ctypes.addressof(attributes),
            lanes=len(self.streams),
            event_count=len(self._events),
            every=self._every,
            work_count=len(works.table),
            argument_bytes=ARGUMENT.itemsize,
            threads=THREADS,
            fetch=works.fetch,
        )
        native(ctypes.byref(argument), int(self._fork))
        if argument.status:
            raise WorldError(f"card {here.ordinal}: work {argument.queued - 1}: {here.status_of(argument.status)}")
        return State.CANCELLED if argument.cancelled else State.COMPLETE

    def _by_python(self, works: Works, cancel: Cancel | None) -> State:
        here = self.card
        for turn, (argument, blocks, first, end) in enumerate(works.table.tolist()):
            stream, group = self.streams[turn % len(self.streams)], turn // self._every
            event = self._events[group % len(self._events)]
            if turn < len(self.streams):
                here.follow(stream, self._fork)
            if turn % self._every == 0 and group >= len(self._events):
                here.reach(event)
            if cancel is not None and cancel.is_set:
                return State.CANCELLED
            runs = works.runs[first:end]
            if works.fetch:
                copy_runs(here, runs, stream)
            if argument >= 0:
                told = CopyArgument.from_buffer_copy(works.arguments[argument].tobytes())
                here.launch("kv_copy", told, blocks=blocks, threads=THREADS, stream=stream)
            if not works.fetch:
                copy_runs(here, runs, stream)
            if (turn + 1) % self._every == 0:
                here.record(event, stream)
        return State.COMPLETE


def _whole(works: Works, here: Card) -> Works:
    """The same with no run across two registrations."""
    if not len(here.borders):
        return works
    runs, origins = cut(works.runs, here.borders)
    if len(runs) == len(works.runs):
        return works
    table = works.table.copy()
    table[:, 2:] = np.searchsorted(origins, works.table[:, 2:])
    return works._replace(runs=runs, table=table)


def _handles(each: list[Any]) -> Any:
    return (ctypes.c_uint64 * len(each))(*map(int, each))


class _LanesArgument(ctypes.Structure):
    """Lanes of kernels/host_lanes.c."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("calls", "context", "function", "streams", "events", "cancel")),
        *((name, ctypes.c_uint64) for name in ("arguments", "works", "sources", "targets", "sizes", "attributes")),
        *((name, ctypes.c_int64) for name in ("lanes", "event_count", "every", "work_count", "argument_bytes")),
        *((name, ctypes.c_int64) for name in ("threads", "fetch", "queued")),
        ("status", ctypes.c_int32), ("cancelled", ctypes.c_int32),
    )  # fmt: skip


@cache
def _native() -> Callable[..., None] | None:
    """kernels/host_lanes.c, unless nothing can compile it."""
    try:
        return loaded("host_lanes", None, _opened)
    except UnusableError:
        return None


def _opened(path: Path) -> Callable[..., None]:
    try:
        library = ctypes.CDLL(str(path))
        abi, function = library.pdtransfer_abi(), library.pdtransfer_lanes
    except (OSError, AttributeError) as error:
        raise UnusableError(f"{path}: {error}") from None
    if abi != _ABI:
        raise UnusableError(f"{path}: its interface is {abi}, not {_ABI}")
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_uint64), None
    return function


@contextmanager
def borrowed(here: Card) -> Generator[Lanes]:
    """Lanes that nobody else queues to meanwhile; what is still pending there only goes before."""
    with _lock:
        idle = _idle.setdefault(here, [])
        lanes = idle.pop() if idle else None
    lanes = lanes or Lanes(here)
    try:
        yield lanes
    finally:
        with _lock:
            idle.append(lanes)


_lock = threading.Lock()
_idle: dict[Card, list[Lanes]] = {}
