"""Writes whose source is a card's memory: launches, at most two in flight, in turn between grants.

A launch never waits for an event, it looks at its write's cancel word between rows (between slots, where it goes by a
ring), and a write has ended only when the card has passed the event behind its last launch. Where the card cannot say
so any more, nobody knows how it ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from .. import sums
from ..cancel import Cancel
from ..checksum import MASK, Lines, lines_of, runs_of
from ..effects import Outcome, Write
from ..engine.base import Spans
from ..errors import PDTransferError, WorldError
from ..geometry import Int64s
from ..kernels.pools import Pool, State
from ..layout import Layout, Plane
from .base import WriteDone
from .lane import IN_FLIGHT_MAX, Lane

PIECE_BYTES = 16 << 20  # between two turns: some 0.3 ms of the bus

_CANCELLED = "cancelled"

log = logging.getLogger(__name__)


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

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing more of it to launch."""
        return self.outcome is not Outcome.LANDED or self.rows_taken == len(self.order.source_slots)


@dataclass(slots=True)
class _Launch:
    job: Push
    place: int
    first: int
    end: int
    begun_s: float  # 0 where nobody asks


@dataclass(slots=True, eq=False)
class _Turns:
    """Grants that have something to launch, the next one first, each with its writes in order."""

    waiting: deque[deque[Push]] = field(default_factory=deque[deque[Push]])
    grants: dict[tuple[int, int], deque[Push]] = field(default_factory=dict[tuple[int, int], deque[Push]])

    def add(self, job: Push) -> None:
        if (jobs := self.grants.get(job.turn)) is not None:
            jobs.append(job)
        else:
            jobs = self.grants[job.turn] = deque([job])
            self.waiting.append(jobs)

    def next(self) -> Push:
        """Whose turn it is; its grant goes behind the others."""
        jobs = self.waiting.popleft()
        job = jobs[0]
        self.waiting.append(jobs)
        return job

    def drop(self, job: Push) -> None:
        """It is exhausted."""
        jobs = self.grants[job.turn]
        if jobs[0] is job:
            jobs.popleft()
            if not jobs:
                del self.grants[job.turn]
                self.waiting.remove(jobs)


class Pusher:
    """One thread that launches and waits; `ended` is called in it, and `lane` makes what it needs of the card there.
    `spans` hears of each launch."""

    def __init__(self, lane: Callable[[], Lane], ended: Callable[[Push], None], spans: Spans | None = None) -> None:
        self._make, self._ended, self._spans = lane, ended, spans
        self._landed_s = 0.0  # when the latest launch had ended
        self._changed = threading.Condition()
        self._turns = _Turns()
        self._closing = False
        self._broken = ""  # the card can say nothing any more: why
        self._thread = threading.Thread(target=self._work, name="pdtransfer-push", daemon=True)
        self._thread.start()

    def add(self, job: Push) -> None:
        """Queues a write behind those of its own grant."""
        with self._changed:
            assert not self._closing
            self._turns.add(job)
            self._changed.notify()

    def close(self) -> None:
        """Carries out what is queued, and joins the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        try:
            lane: Lane | None = self._make()
        except Exception as error:  # noqa: BLE001 (it becomes every write's outcome)
            lane, self._broken = None, str(error) or type(error).__name__
        flying: deque[_Launch] = deque()
        while True:
            while len(flying) < IN_FLIGHT_MAX and (job := self._next(wait=not flying)) is not None:
                place = 1 - flying[-1].place if flying else 0
                first, begun_s = job.rows_taken, 0.0 if self._spans is None else time.monotonic()
                if self._launched(lane, job, place):
                    flying.append(_Launch(job, place, first, job.rows_taken, begun_s))
            if not flying:
                return
            assert lane is not None
            self._landed(lane, flying)

    def _next(self, *, wait: bool) -> Push | None:
        """Whose turn it is; None where nobody wants one, and with `wait` only once this is closed."""
        with self._changed:
            while wait and not self._turns.waiting and not self._closing:
                self._changed.wait()
            return self._turns.next() if self._turns.waiting else None

    def _launched(self, lane: Lane | None, job: Push, place: int) -> bool:
        """Launches the next rows of a write; False where none of these are in flight."""
        first, launched = job.rows_taken, False
        end = min(first + max(1, PIECE_BYTES // max(1, job.row_bytes)), len(job.order.source_slots))
        try:
            if lane is None or self._broken:
                raise WorldError(self._broken)
            word = job.word or lane.word()
            with job.lock:
                job.word, stopped = word, job.stopped
            if stopped:
                raise WorldError(_CANCELLED)
            if job.row_bytes and end > first:
                ours, theirs = _slots(job.order.target_slots[first:end]), _slots(job.order.source_slots[first:end])
                lane.launch(place, job.target, job.source, ours, theirs, end - first, word)
                launched = True
        except Exception as error:  # noqa: BLE001 (it becomes the write's outcome)
            self._refused(lane, job, error)
            return False
        over = False
        with self._changed:
            job.rows_taken = end
            job.running += launched
            if job.exhausted:
                self._turns.drop(job)
                over = not job.running
        if over:
            self._end(lane, job)
        return launched

    def _refused(self, lane: Lane | None, job: Push, error: Exception) -> None:
        """A launch was not made, or only perhaps: the write has failed once all that was queued has ended."""
        text = str(error) if isinstance(error, PDTransferError) else f"{type(error).__name__}: {error}"
        outcome = Outcome.FAILED
        if lane is not None and not self._broken and text != _CANCELLED:
            try:
                lane.drain()
            except Exception as lost:  # noqa: BLE001 (whatever it is, nobody can say what has ended)
                outcome, self._broken = Outcome.UNKNOWN, str(lost) or type(lost).__name__
        with self._changed:
            _fail(job, outcome, text)
            self._turns.drop(job)
            over = not job.running
        if over:
            self._end(lane, job)

    def _landed(self, lane: Lane, flying: deque[_Launch]) -> None:
        """Waits for the oldest launch."""
        outcome, text = Outcome.LANDED, ""
        try:
            state, left_out = lane.wait(flying[0].place)
        except Exception as error:  # noqa: BLE001 (whatever it is, nobody can say what has ended)
            text = str(error) or type(error).__name__
            self._broken = self._broken or text
            log.critical("no launch can be waited for any more: %s", text)
            outcome = Outcome.UNKNOWN
        else:
            if self._spans is not None:
                self._report(self._spans, flying[0])
            match state:
                case State.COMPLETE if left_out:
                    outcome, text = Outcome.FAILED, f"{left_out} rows lie outside their pool"
                case State.COMPLETE:
                    outcome, text = self._summed(lane, flying[0])
                case State.CANCELLED:
                    outcome, text = Outcome.FAILED, _CANCELLED
                case State.RUNNING:
                    outcome, text = Outcome.UNKNOWN, "the card has passed a launch that never said its end"
        job = flying.popleft().job
        with self._changed:
            job.running -= 1
            if outcome is not Outcome.LANDED:
                if not job.exhausted:
                    self._turns.drop(job)
                _fail(job, outcome, text)
            over = job.exhausted and not job.running
        if over:
            self._end(lane, job)

    def _report(self, spans: Spans, launch: _Launch) -> None:
        """From its launch, or the end of the one before it, behind which it waited."""
        begin_s, self._landed_s = max(launch.begun_s, self._landed_s), time.monotonic()
        order, rows = launch.job.order, range(launch.first, launch.end)
        at = order.first_row + launch.first
        name = f"rows {at}-{at + len(rows)}, layers {order.layers[0]}-{order.layers[1]}"
        spans(
            "launch", name, begin_s, self._landed_s, room=order.room, layer=order.layers[0],
            byte_count=len(rows) * launch.job.row_bytes,
        )  # fmt: skip

    def _summed(self, lane: Lane, launch: _Launch) -> tuple[Outcome, str]:
        """Adds what the rows of a launch sum to, where that is wanted, as they lie in the pool."""
        job, staged = launch.job, launch.job.staged
        if staged is None:
            return Outcome.LANDED, ""
        try:
            for first in range(launch.first, launch.end, staged.layout.slots):
                slots = job.order.source_slots[first : min(first + staged.layout.slots, launch.end)]
                address = lane.fetch(staged.pool, staged.layout, _slots(slots), len(slots))
                runs = runs_of(np.array([0]), np.array([len(slots)]), job.order.first_row + first)
                checksum = sums.checksum(staged.lines, runs, address)
                assert checksum is not None
                job.checksum = (job.checksum + checksum) & MASK
        except Exception as error:  # noqa: BLE001 (the rows are where they should be, and nothing writes there any more)
            return Outcome.FAILED, str(error) or type(error).__name__
        return Outcome.LANDED, ""

    def _end(self, lane: Lane | None, job: Push) -> None:
        with job.lock:
            word, job.word = job.word, None
        if word is not None and lane is not None and job.outcome is not Outcome.UNKNOWN:
            lane.reuse(word)
        self._ended(job)


def _fail(job: Push, outcome: Outcome, text: str) -> None:
    """UNKNOWN outweighs FAILED; of two texts the first is kept."""
    if job.outcome is not Outcome.UNKNOWN:
        job.outcome = outcome
    job.text = job.text or text


def _slots(slots: Int64s) -> range | Int64s:
    """A run as a range: nothing of it need go to the card."""
    first, count = int(slots[0]), len(slots)
    whole = int(slots[-1]) - first == count - 1 and bool((slots[1:] - slots[:-1] == 1).all())
    return range(first, first + count) if whole else slots
