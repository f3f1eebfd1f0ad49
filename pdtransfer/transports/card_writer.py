"""Writes whose source is a card's memory: launches, at most two in flight, in turn between grants.

A write's gate is waited for here, asleep: no launch is queued before it is open, and then it only has to be made. A
launch looks at its write's cancel word between rows (between slots, where it goes by a ring), and a write has ended
only when the card has passed the event behind its last launch. Where the card cannot say so any more, nobody knows how
it ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..engine_api import Spans
from ..errors import PDTransferError, WorldError
from ..handoff.effects import Outcome
from ..kernels import checksum_copy
from ..kernels.lanes import NEVER_NS
from ..kernels.pools import State
from ..layout.checksum import MASK, runs_of
from ..layout.geometry import Int64s
from .card_launcher import IN_FLIGHT_MAX, Lane
from .copier import CANCELLED
from .pushes import Push, Turns

NEAR_NS = 500_000  # between two words of a write that is near: who has slept for a millisecond is slow to wake again
NEAR_MAX = 128  # words of one write: an engine may have a single event for all that it computes

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Launch:
    job: Push
    place: int
    first: int
    end: int
    begun_s: float  # 0 where nobody asks


class _Ahead(NamedTuple):
    """A launch that is prepared, and only waits for its gate."""

    job: Push
    place: int
    queue: Callable[[], None]


class Pusher:
    """One thread that launches and waits; `ended` is called in it, and `lane` makes what it needs of the card there.
    `spans` hears of each launch, `near` of an urgent write that waited for its rows, again and again: while it waits
    for nothing but the last of them, and while it is in flight."""

    def __init__(
        self,
        lane: Callable[[], Lane],
        ended: Callable[[Push], None],
        spans: Spans | None = None,
        near: Callable[[Push], None] = lambda _: None,
    ) -> None:
        self._make, self._ended, self._spans, self._near = lane, ended, spans, near
        self._near_ns = 0  # when that is to hear again
        self._landed_s = 0.0  # when the latest launch had ended
        self._changed = threading.Condition()
        self._turns = Turns()
        self._closing = False
        self._lane: Lane | None = None
        self._ahead: _Ahead | None = None
        self._broken = ""  # the card can say nothing any more: why
        self._thread = threading.Thread(target=self._work, name="pdtransfer-push", daemon=True)
        self._thread.start()

    def add(self, job: Push) -> None:
        """Queues a write behind those of its own grant."""
        with self._changed:
            assert not self._closing
            job.woken = self._wake
            self._turns.add(job)
        self._wake()

    def _wake(self) -> None:
        """Has the thread look again what there is to do."""
        with self._changed:
            self._changed.notify()
        if self._lane is not None:
            self._lane.wake()

    def close(self) -> None:
        """Carries out what is queued, and joins the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._lane = self._make()
        except Exception as error:  # noqa: BLE001 (it becomes every write's outcome)
            self._broken = str(error) or type(error).__name__
        lane = self._lane
        flying: deque[_Launch] = deque()
        while True:
            while len(flying) < IN_FLIGHT_MAX and (job := self._next()) is not None:
                place = self._place(flying)
                first, begun_s = job.rows_taken, 0.0 if self._spans is None else time.monotonic()
                if self._launched(lane, job, place):
                    flying.append(_Launch(job, place, first, job.rows_taken, begun_s))
            gated = self._gated()
            if not flying and not gated:
                if not self._sleep():
                    return
                continue
            assert lane is not None
            there = len(flying) < IN_FLIGHT_MAX
            if gated and there and not self._prepare_ahead(lane, gated[0], self._place(flying)):
                continue
            self._wait(lane, flying, gated)

    def _sleep(self) -> bool:
        """Until there is something to do; False where there never will be."""
        with self._changed:
            while not self._turns.waiting and not self._closing:
                self._changed.wait()
            return bool(self._turns.waiting)

    def _next(self) -> Push | None:
        """Whose turn it is; None where nobody wants one now."""
        with self._changed:
            if self._broken and self._turns.waiting:
                return self._turns.waiting[0][0]
            return self._turns.next()

    def _gated(self) -> list[Push]:
        with self._changed:
            return self._turns.gated()

    def _place(self, flying: deque[_Launch]) -> int:
        """Where the next launch is made."""
        if flying:
            return 1 - flying[-1].place
        return 0 if self._ahead is None else self._ahead.place

    def _launched(self, lane: Lane | None, job: Push, place: int) -> bool:
        """Launches the next rows of a write; False where none of these are in flight."""
        launched, end = False, job.piece_end
        try:
            queue = self._prepared(lane, job, place)
        except Exception as error:  # noqa: BLE001 (it becomes the write's outcome)
            self._refused(lane, job, Outcome.FAILED, _text(error))
            return False
        if queue is not None:
            try:
                queue()
            except Exception as error:  # noqa: BLE001 (it becomes the write's outcome)
                self._refused(lane, job, self._drained(lane), _text(error))
                return False
            launched = True
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

    def _prepared(self, lane: Lane | None, job: Push, place: int) -> Callable[[], None] | None:
        """What queues the next rows of a write; None where there is not a byte of them. Raises where none is launched
        any more."""
        if lane is None or self._broken:
            raise WorldError(self._broken)
        word = job.word or lane.word()
        with job.lock:
            job.word, refusal = word, job.refusal
        if refusal:
            raise WorldError(refusal)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.job is job and ahead.place == place:
            return ahead.queue
        first, end = job.rows_taken, job.piece_end
        if not job.row_bytes or end == first:
            return None
        ours, theirs = _slots(job.order.target_slots[first:end]), _slots(job.order.source_slots[first:end])
        if not first:  # who would wait for a write that is there before its rows computes meanwhile
            job.spare = job.gate is not None and not job.order.urgent
        return lane.prepare(place, job.target, job.source, ours, theirs, end - first, word, spare=job.spare)

    def _prepare_ahead(self, lane: Lane, job: Push, place: int) -> bool:
        """Has the first rows of a write that waits for its gate ready for the card; False where it need not wait."""
        if self._ahead is not None and self._ahead.job is job and self._ahead.place == place:
            return True
        try:
            if (gate := job.gate) is not None:
                lane.look(gate)
            if job.gate is None:
                return False
            queue = self._prepared(lane, job, place)
        except Exception as error:  # noqa: BLE001 (it becomes the write's outcome)
            self._refused(lane, job, Outcome.FAILED, _text(error))
            return False
        self._ahead = None if queue is None else _Ahead(job, place, queue)
        return True

    def _drained(self, lane: Lane | None) -> Outcome:
        """How a write has failed of which a launch may have been queued: only what has ended is known."""
        assert lane is not None
        try:
            lane.drain()
        except Exception as lost:  # noqa: BLE001 (whatever it is, nobody can say what has ended)
            self._broken = str(lost) or type(lost).__name__
            return Outcome.UNKNOWN
        return Outcome.FAILED

    def _refused(self, lane: Lane | None, job: Push, outcome: Outcome, text: str) -> None:
        """No more of a write is launched: it has failed once all that was queued has ended."""
        with self._changed:
            _fail(job, outcome, text)
            self._turns.drop(job)
            over = not job.running
        if over:
            self._end(lane, job)

    def _wait(self, lane: Lane, flying: deque[_Launch], gated: list[Push]) -> None:
        """For the oldest launch, or until one of these may go, or there is something else to do."""
        gates = [gate for job in gated if (gate := job.gate) is not None]
        if len(gates) < len(gated):
            return  # one has been opened meanwhile, by another thread
        try:
            if not lane.wait(flying[0].place if flying else None, gates, self._told_near(flying, gated)):
                return
        except Exception as error:  # noqa: BLE001 (whatever it is, nobody can say what has ended)
            text = str(error) or type(error).__name__
            self._broken = self._broken or text
            log.critical("no launch can be waited for any more: %s", text)
            if flying:
                self._landed(lane, flying.popleft(), Outcome.UNKNOWN, text)
            return
        launch = flying.popleft()
        if self._spans is not None:
            self._report(self._spans, launch)
        self._landed(lane, launch, *self._ending(lane, launch))

    def _told_near(self, flying: deque[_Launch], gated: list[Push]) -> int:
        """Tells of a write that is near, if there is one and it is time to; when that will be so again."""
        for job in (*(launch.job for launch in flying), *gated[:1]):
            gate = job.order.after
            if job.order.urgent and gate is not None and gate.nearly and job.nears < NEAR_MAX:
                if (now_ns := time.monotonic_ns()) >= self._near_ns:
                    self._near_ns, job.nears = now_ns + NEAR_NS, job.nears + 1
                    self._near(job)
                return self._near_ns
        return NEVER_NS

    def _ending(self, lane: Lane, launch: _Launch) -> tuple[Outcome, str]:
        """How a launch has ended, that the card has passed."""
        match lane.ended(launch.place):
            case State.COMPLETE, 0:
                return self._summed(lane, launch)
            case State.COMPLETE, left_out:
                return Outcome.FAILED, f"{left_out} rows lie outside their pool"
            case State.CANCELLED, _:
                return Outcome.FAILED, CANCELLED
            case _:
                return Outcome.UNKNOWN, "the card has passed a launch that never said its end"

    def _landed(self, lane: Lane, launch: _Launch, outcome: Outcome, text: str) -> None:
        job = launch.job
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
                checksum = checksum_copy.checksum(staged.lines, runs, address)
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


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, PDTransferError) else f"{type(error).__name__}: {error}"


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
