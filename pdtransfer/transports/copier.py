"""Threads that do queued works piece by piece, in turn between grants. A turn is some PIECE_BYTES, in one piece or in
several."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from .turns import Queue, Turns

PIECE_BYTES = 4 << 20  # copied in one turn: some 0.5 ms

CANCELLED = "cancelled"
_NICE = 5  # so that a loop with a message to send does not wait for a core that copies
_Result = TypeVar("_Result")

Piece = Callable[[], int]
"""Does a piece of a work, and returns its share of the work's checksum. Raises TransportError when it is cancelled."""


class OrderOfGrant(Protocol):
    """What a session orders for one of its grants."""

    @property
    def session(self) -> int: ...

    @property
    def grant(self) -> int: ...


_Order = TypeVar("_Order", bound=OrderOfGrant)


@dataclass(slots=True, eq=False, kw_only=True)
class CopyWork(Generic[_Order]):
    """What the threads do piece by piece. Once it has ended, nothing of it is under way, and `text` is empty if all of
    it was done, else the reason.

    `pieces` has each piece with the bytes that it counts for in its grant's turn. Only the thread that has taken the
    turn asks for the next one; what that raises fails the work.
    """

    order: _Order
    pieces: Iterator[tuple[int, Piece]]
    cancel: CancelWord  # ends it at its next rows, from any thread
    byte_count: int = 0  # of all pieces
    text: str = ""
    checksum: int = 0  # of what was done, mod 2**64
    # For the Copier alone, under its lock:
    running: int = 0
    exhausted: bool = False

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

    def carry(self) -> None:
        """Does all of it in the calling thread."""
        checksum, self.text = attempt(lambda: sum(piece() for _, piece in self.pieces) & MASK)
        self.checksum = checksum or 0

    def next(self) -> tuple[int, Piece] | None:
        """The next piece; None when there is none. Raises what planning raises, and TransportError once cancelled."""
        if self.cancel.is_set:
            raise TransportError(CANCELLED)
        return next(self.pieces, None)


def copy_job(
    order: Write, pairing: Pairing, *, source_address: int, target_address: int, lines: Lines | None = None
) -> CopyWork[Write]:
    """One write between two mappings of this process. `lines` are of the source, where a checksum is wanted: it is of
    the bytes that were read."""
    cancel = CancelWord()

    def copied(piece: Plan, first_row: int) -> int:
        between = piece, source_address, target_address
        if lines is None:
            checksum = 0 if kernels.copy(*between, cancel=cancel) else None
        else:
            checksum = checksum_copy.copy(*between, lines=lines, first_row=first_row, cancel=cancel)
        if checksum is None:
            raise TransportError(CANCELLED)
        return checksum

    def pieces() -> Iterator[tuple[int, Piece]]:
        row = order.first_row
        for piece in plan(pairing, order.source_slots, order.target_slots).pieces(PIECE_BYTES):
            yield piece.bytes, partial(copied, piece, row)
            row += piece.rows

    byte_count = len(order.source_slots) * pairing.row_bytes
    return CopyWork(order=order, pieces=pieces(), cancel=cancel, byte_count=byte_count)


class Copier(Generic[_Order]):
    """`threads` threads, each of which takes one piece of one grant at a time. They call `ended` with each work."""

    def __init__(self, threads: int, ended: Callable[[CopyWork[_Order]], None], *, name: str = "copy") -> None:
        self._ended = ended
        self._changed = threading.Condition()
        self._turns: Turns[CopyWork[_Order]] = Turns(PIECE_BYTES)
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"pdtransfer-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, job: CopyWork[_Order]) -> None:
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
        thread = threading.get_native_id()
        given = os.getpriority(os.PRIO_PROCESS, thread)  # a process that is nicer still may not take that back
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, given))  # of this thread alone
        while (queue := self._take()) is not None:
            job = queue.items[0]
            found, text = (None, job.text) if job.text else attempt(job.next)
            over = self._put_back(queue, None if found is None else found[0], text)
            if found is not None:
                checksum, text = attempt(found[1])
                over = self._done(job, checksum or 0, text)
            if over:
                self._ended(job)

    def _take(self) -> Queue[CopyWork[_Order]] | None:
        """The queue of the grant whose turn it is; None when this is closed and nothing is queued."""
        with self._changed:
            while (queue := self._turns.take()) is None:
                if self._closing and not self._turns:
                    return None
                self._changed.wait()
            return queue

    def _put_back(self, queue: Queue[CopyWork[_Order]], byte_count: int | None, text: str) -> bool:
        """Ends the turn, unless some of it is left; whether the grant's first work has ended. `byte_count` is of the
        piece that was taken, None for none."""
        with self._changed:
            job = queue.items[0]
            if byte_count is None:
                queue.items.popleft()
                job.exhausted, job.text = True, job.text or text
                self._turns.put_back(queue)
            else:
                job.running += 1
                self._turns.put_back(queue, byte_count)
            if queue.items:
                self._changed.notify()
            else:
                self._changed.notify_all()  # a thread may wait for this to close
            return job.exhausted and not job.running

    def _done(self, job: CopyWork[_Order], checksum: int, text: str) -> bool:
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
