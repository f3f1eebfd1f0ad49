"""Threads that do queued works piece by piece, in turn between grants, copies above all: a small one waits for no
large one. A turn is of PIECE_BYTES or so, be they in one piece or in several."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from .. import kernels
from ..errors import TransportError
from ..handoff.effects import Outcome, Write
from ..kernels import checksum_copy
from ..kernels.cancel import Cancel
from ..layout.checksum import MASK, Lines
from ..layout.pairing import Pairing
from ..layout.plan import Plan, plan
from .base import WriteDone

PIECE_BYTES = 4 << 20  # copied between two turns: some 0.5 ms

_LEFT_BYTES = PIECE_BYTES // 8  # of a turn that are not worth another piece: whole rows seldom fill one

CANCELLED = "cancelled"
_NICE = 5  # a loop that has something to say, that a room is aborted for one, need not wait for a core that copies
_Result = TypeVar("_Result")

Piece = Callable[[], int]
"""Does a piece of a work, and returns its share of the work's checksum; raises TransportError when it is cancelled."""


class Work(Protocol):
    """What threads do piece by piece. When it has ended, `text` is "" if all of it was done."""

    text: str
    checksum: int  # of what was done, mod 2**64
    # The copier's own, for who holds its lock.
    running: int
    exhausted: bool

    @property
    def piece_bytes(self) -> int:
        """What the piece that it gave last counts for in its grant's turn."""
        ...

    @property
    def turn(self) -> tuple[int, int]:
        """What takes turns: session and grant."""
        ...

    def next(self) -> Piece | None:
        """The next piece, or None when there is none. Only the thread whose turn it is asks."""
        ...


AnyWork = TypeVar("AnyWork", bound=Work)


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One write between two mappings of this process. When it has ended, `text` is "" if all of it has landed.

    Whatever it says, no byte of an ended job moves any more.
    """

    order: Write
    done: WriteDone
    pairing: Pairing
    source_address: int
    target_address: int
    lines: Lines | None = None  # of the source, where a checksum is wanted
    cancel: Cancel = field(default_factory=Cancel)
    text: str = ""
    checksum: int = 0
    running: int = 0
    exhausted: bool = False
    pieces: Iterator[Plan] | None = None
    rows_taken: int = 0  # in pieces
    piece_bytes: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        """What takes turns: session and grant."""
        return self.order.session, self.order.grant

    @property
    def outcome(self) -> Outcome:
        """How it has ended. FAILED is quiescent like LANDED: the copy has returned, and its stores with it."""
        return Outcome.FAILED if self.text else Outcome.LANDED

    def stop(self) -> None:
        """Ends it at its next rows, from any thread."""
        self.cancel.set()

    @property
    def byte_count(self) -> int:
        """What it copies."""
        return len(self.order.source_slots) * self.pairing.row_bytes

    def carry(self) -> None:
        """Does all of it, here and now."""
        plan, self.text = attempt(self._plan)
        if plan is not None:
            checksum, self.text = attempt(partial(self._copy, plan, 0))
            self.checksum = checksum or 0

    def next(self) -> Piece | None:
        """The next piece, or None when there is none; raises what planning raises."""
        if self.cancel.is_set:
            raise TransportError(CANCELLED)
        if self.pieces is None:
            self.pieces = self._plan().pieces(PIECE_BYTES)
        plan = next(self.pieces, None)
        if plan is None:
            return None
        first, self.rows_taken = self.rows_taken, self.rows_taken + plan.rows
        self.piece_bytes = plan.rows * self.pairing.row_bytes
        return partial(self._copy, plan, first)

    def _copy(self, piece: Plan, first: int) -> int:
        """Copies a piece whose first row is row `first` of the order's; its checksum is of what it read."""
        between = piece, self.source_address, self.target_address
        if self.lines is None:
            checksum = 0 if kernels.copy(*between, cancel=self.cancel) else None
        else:
            row = self.order.first_row + first
            checksum = checksum_copy.copy(*between, lines=self.lines, first_row=row, cancel=self.cancel)
        if checksum is None:
            raise TransportError(CANCELLED)
        return checksum

    def _plan(self) -> Plan:
        return plan(self.pairing, self.order.source_slots, self.order.target_slots)


@dataclass(slots=True, eq=False)
class _Grant(Generic[AnyWork]):
    """Its works that are not exhausted, and how much of its turn is left."""

    jobs: deque[AnyWork]
    left_bytes: int = PIECE_BYTES


class Copier(Generic[AnyWork]):
    """`threads` threads, each of which takes one piece of one grant at a time; `ended` is called in them."""

    def __init__(self, threads: int, ended: Callable[[AnyWork], None], *, name: str = "copy") -> None:
        self._ended = ended
        self._changed = threading.Condition()
        self._grants: dict[tuple[int, int], _Grant[AnyWork]] = {}  # that have works
        self._turns: deque[_Grant[AnyWork]] = deque()  # the same, but for what some thread is just taking a piece of
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"pdtransfer-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, job: AnyWork) -> None:
        """Queues a work behind those of its own grant."""
        with self._changed:
            assert not self._closing
            if (grant := self._grants.get(job.turn)) is not None:
                grant.jobs.append(job)
                return
            grant = self._grants[job.turn] = _Grant(deque((job,)))
            self._turns.append(grant)
            self._changed.notify()

    def close(self) -> None:
        """Lets queued jobs end, and joins the threads; not on the loop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread alone
        while (grant := self._turn()) is not None:
            job = grant.jobs[0]
            piece, text = (None, job.text) if job.text else attempt(job.next)
            over = self._taken(grant, piece, text)
            if piece is not None:
                checksum, text = attempt(piece)
                over = self._done(job, checksum or 0, text)
            if over:
                self._ended(job)

    def _turn(self) -> _Grant[AnyWork] | None:
        """The grant whose turn it is; None when this is closed and all turns are given."""
        with self._changed:
            while not self._turns:
                if self._closing and not self._grants:
                    return None
                self._changed.wait()
            return self._turns.popleft()

    def _taken(self, grant: _Grant[AnyWork], piece: Piece | None, text: str) -> bool:
        """Gives the turn on, if it is over; whether the grant's first job is."""
        with self._changed:
            jobs = grant.jobs
            job = jobs[0]
            if piece is None:
                jobs.popleft()
                job.exhausted, job.text = True, job.text or text
            else:
                job.running += 1
                grant.left_bytes -= job.piece_bytes
            if jobs and grant.left_bytes > _LEFT_BYTES:
                self._turns.appendleft(grant)
                self._changed.notify()
            elif jobs:
                grant.left_bytes = PIECE_BYTES
                self._turns.append(grant)
                self._changed.notify()
            else:
                del self._grants[job.turn]
                self._changed.notify_all()  # who waits to close may have waited for this
            return job.exhausted and not job.running

    def _done(self, job: AnyWork, checksum: int, text: str) -> bool:
        """Whether that was the last piece of an exhausted job."""
        with self._changed:
            job.running -= 1
            job.checksum = (job.checksum + checksum) & MASK
            job.text = job.text or text
            return job.exhausted and not job.running


def attempt(step: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """What a step of a job gives, or why it failed.

    What fails fails its write and not the thread, which carries others; nothing of the step is in flight any more.
    """
    try:
        return step(), ""
    except TransportError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 (it becomes the write's outcome)
        return None, f"{type(error).__name__}: {error}"
