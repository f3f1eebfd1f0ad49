"""Writes out of a card's memory, as far as they have got, and whose turn it is."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ..handoff.effects import Outcome, Write
from ..handoff.ready_gate import Gate
from ..kernels.cancel import Cancel
from ..kernels.pools import Pool
from ..layout.checksum import Lines, lines_of
from ..layout.layout import Layout, Plane
from .base import WriteDone
from .copier import CANCELLED

PIECE_BYTES = 16 << 20  # between two turns: some 0.3 ms of the bus


@dataclass(frozen=True, slots=True)
class Staged:
    """Where rows of a card's `pool` are put side by side, to be summed here: `lines` are of `layout`."""

    pool: Pool
    layout: Layout
    lines: Lines

    @classmethod
    def of(cls, component: str, pool: Pool) -> Staged:
        """For all planes of `pool`."""
        planes, at, row = list[Plane](), 0, pool.layout.row_bytes
        for plane in pool.layout.planes:
            planes.append(msgspec.structs.replace(plane, base=at, page_stride=row, row_stride=row))
            at += plane.row_bytes
        layout = Layout(tuple(planes), 1, max(1, PIECE_BYTES // row))
        return cls(pool, layout, lines_of(component, layout))


@dataclass(slots=True, eq=False, kw_only=True)
class Push:
    """One write from a pool of a card to registered memory. When it has ended, `outcome` says how and `text` why."""

    order: Write
    done: WriteDone
    source: Pool
    target: Pool
    row_bytes: int
    staged: Staged | None = None  # where a checksum is wanted
    outcome: Outcome = Outcome.LANDED
    text: str = ""
    checksum: int = 0
    # The pusher's own.
    rows_taken: int = 0
    running: int = 0
    spare: bool = False
    nears: int = 0  # times that it was said to be near
    woken: Callable[[], None] = lambda: None
    lock: threading.Lock = field(default_factory=threading.Lock)  # of these two:
    stopped: bool = False
    word: Cancel | None = None  # that its launches look at

    @property
    def turn(self) -> tuple[int, int]:
        """What takes turns: session and grant."""
        return self.order.session, self.order.grant

    def stop(self) -> None:
        """Ends it at its next rows, from any thread; never waits for the card."""
        with self.lock:
            self.stopped = True
            if self.word is not None:
                self.word.set()
        self.woken()

    @property
    def gate(self) -> Gate | None:
        """What it still waits for, as long as somebody wants it."""
        gate = self.order.after
        return None if gate is None or gate.opened_ns or gate.broken or self.stopped else gate

    @property
    def refusal(self) -> str:
        """Why nothing more of it is launched."""
        return CANCELLED if self.stopped else self.order.after.broken if self.order.after is not None else ""

    @property
    def piece_end(self) -> int:
        """Behind the rows that are launched next."""
        rows = max(1, PIECE_BYTES // max(1, self.row_bytes))
        return min(self.rows_taken + rows, len(self.order.source_slots))

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing more of it to launch."""
        return self.outcome is not Outcome.LANDED or self.rows_taken == len(self.order.source_slots)


@dataclass(slots=True, eq=False)
class Turns:
    """Grants that have something to launch, the next one first, each with its writes in order."""

    waiting: deque[deque[Push]] = field(default_factory=deque[deque[Push]])
    grants: dict[tuple[int, int], deque[Push]] = field(default_factory=dict[tuple[int, int], deque[Push]])

    def add(self, job: Push) -> None:
        """Behind those of its own grant."""
        if (jobs := self.grants.get(job.turn)) is not None:
            jobs.append(job)
        else:
            jobs = self.grants[job.turn] = deque([job])
            self.waiting.append(jobs)

    def next(self) -> Push | None:
        """Whose turn it is, of those that wait for nothing; its grant goes behind the others."""
        for jobs in self.waiting:
            if jobs[0].gate is None:
                self.waiting.remove(jobs)
                self.waiting.append(jobs)
                return jobs[0]
        return None

    def gated(self) -> list[Push]:
        """The next ones of the grants that wait for a gate, the earliest first."""
        return [jobs[0] for jobs in self.waiting if jobs[0].gate is not None]

    def drop(self, job: Push) -> None:
        """It is exhausted."""
        jobs = self.grants[job.turn]
        if jobs[0] is job:
            jobs.popleft()
            if not jobs:
                del self.grants[job.turn]
                self.waiting.remove(jobs)
