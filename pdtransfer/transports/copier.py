"""Threads that do queued works piece by piece, in turn between grants. A turn is some PIECE_BYTES, in one piece or in
several."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from .. import kernels
from ..errors import TransportError
from ..handoff.effects import Outcome, Write
from ..kernels import checksum_copy
from ..kernels.cancel import CancelWord
from ..layout.checksum import MASK, Lines
from ..layout.pairing import Pairing
from ..layout.plan import Plan, plan
from .base import WriteDone
from .turns import Queue, Turns

PIECE_BYTES = 4 << 20  # copied in one turn: some 0.5 ms

CANCELLED = "cancelled"
_NICE = 5  # so that a loop with a message to send does not wait for a core that copies
_Result = TypeVar("_Result")

Piece = Callable[[], int]
"""Does a piece of a work, and returns its share of the work's checksum. Raises TransportError when it is cancelled."""


class CopyWork(Protocol):
    """What the threads do piece by piece. Once it has ended, `text` is empty if all of it was done, else the reason."""

    text: str
    checksum: int  # of what was done, mod 2**64
    # For the Copier alone, under its lock:
    running: int
    exhausted: bool

    @property
    def piece_bytes(self) -> int:
        """What its latest piece counts for in its grant's turn."""
        ...

    @property
    def turn(self) -> tuple[int, int]:
        """What takes turns: session and grant."""
        ...

    def next(self) -> Piece | None:
        """The next piece; None when there is none. Only the thread that has taken the turn calls it."""
        ...


AnyWork = TypeVar("AnyWork", bound=CopyWork)


@dataclass(slots=True, eq=False, kw_only=True)
class CopyJob:
    """One write between two mappings of this process. Once it has ended, no byte of it moves any more, and `text` is
    empty if all of it has landed."""

    order: Write
    done: WriteDone
    pairing: Pairing
    source_address: int
    target_address: int
    lines: Lines | None = None  # of the source, where a checksum is wanted
    cancel: CancelWord = field(default_factory=CancelWord)
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
        """Its outcome once it has ended. FAILED is as quiet as LANDED: the copy and its stores are complete."""
        return Outcome.FAILED if self.text else Outcome.LANDED

    def stop(self) -> None:
        """Ends it at its next rows, from any thread."""
        self.cancel.set()

    @property
    def byte_count(self) -> int:
        """The bytes that it copies."""
        return len(self.order.source_slots) * self.pairing.row_bytes

    def carry(self) -> None:
        """Does all of it in the calling thread."""
        plan, self.text = attempt(self._plan)
        if plan is not None:
            checksum, self.text = attempt(partial(self._copy, plan, 0))
            self.checksum = checksum or 0

    def next(self) -> Piece | None:
        """As CopyWork.next; raises what planning raises."""
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
        """Copies a piece whose first row is row `first` of the order. The checksum is of the bytes that it read."""
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


class Copier(Generic[AnyWork]):
    """`threads` threads, each of which takes one piece of one grant at a time. They call `ended` with each work."""

    def __init__(self, threads: int, ended: Callable[[AnyWork], None], *, name: str = "copy") -> None:
        self._ended = ended
        self._changed = threading.Condition()
        self._turns: Turns[AnyWork] = Turns(PIECE_BYTES)
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
            if self._turns.add(job.turn, job):
                self._changed.notify()

    def close(self) -> None:
        """Waits until queued works have ended, and joins the threads; not on the loop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread alone
        while (queue := self._take()) is not None:
            job = queue.items[0]
            piece, text = (None, job.text) if job.text else attempt(job.next)
            over = self._put_back(queue, piece, text)
            if piece is not None:
                checksum, text = attempt(piece)
                over = self._done(job, checksum or 0, text)
            if over:
                self._ended(job)

    def _take(self) -> Queue[AnyWork] | None:
        """The queue of the grant whose turn it is; None when this is closed and nothing is queued."""
        with self._changed:
            while (queue := self._turns.take()) is None:
                if self._closing and not self._turns:
                    return None
                self._changed.wait()
            return queue

    def _put_back(self, queue: Queue[AnyWork], piece: Piece | None, text: str) -> bool:
        """Ends the turn, unless some of it is left; whether the grant's first work has ended."""
        with self._changed:
            job = queue.items[0]
            if piece is None:
                queue.items.popleft()
                job.exhausted, job.text = True, job.text or text
                self._turns.put_back(queue)
            else:
                job.running += 1
                self._turns.put_back(queue, job.piece_bytes)
            if queue.items:
                self._changed.notify()
            else:
                self._changed.notify_all()  # a thread may wait for this to close
            return job.exhausted and not job.running

    def _done(self, job: AnyWork, checksum: int, text: str) -> bool:
        """Whether that was the last piece of an exhausted work."""
        with self._changed:
            job.running -= 1
            job.checksum = (job.checksum + checksum) & MASK
            job.text = job.text or text
            return job.exhausted and not job.running


def attempt(step: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """What a step of a work returns, or why it failed: it fails this work alone, and the thread goes on."""
    try:
        return step(), ""
    except TransportError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 (it becomes the write's outcome)
        return None, f"{type(error).__name__}: {error}"
