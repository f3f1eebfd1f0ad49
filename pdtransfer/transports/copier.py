"""Does works for a loop: small ones on the loop itself, others piece by piece in threads, in turn between grants.

A turn is some PIECE_BYTES, in one piece or in several.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from .. import kernels
from ..errors import TransportError
from ..handoff.effects import Settle, Write
from ..kernels import checksum_copy
from ..kernels.cancel import CancelWord
from ..layout.checksum import Lines
from ..layout.pairing import Pairing
from ..layout.plan import Plan, plan
from ..threads import in_thread
from .turns import Queue, Turns
from .works import OpenWorks, Work

PIECE_BYTES = 4 << 20  # copied in one turn: some 0.5 ms
SMALL_BYTES_MAX = 256 << 10  # of a work on the loop: some 30 us, less than a thread takes to wake and to report
_SMALL_BYTES_TURN = 1 << 20  # of all works in one turn of the loop: more would stall it

CANCELLED = "cancelled"
_NICE = 5  # so that a loop with a message to send does not wait for a core that copies
_Result = TypeVar("_Result")

Piece = Callable[[], int]
"""Does a piece of a work, and returns its share of the work's checksum. Raises TransportError when it is cancelled."""

Settled = Callable[[Settle, int, str], None]
"""Called once for each Settle, on the loop's thread and never from within the call that began it, once nothing is read
or copied any more. Gets the checksum of rows that were verified, or the reason why it is missing or a copy is."""


@dataclass(slots=True, eq=False, kw_only=True)
class CopyWork(Work):
    """Done piece by piece. `pieces` has each piece with the bytes that it counts for in its grant's turn. Only the
    thread that has taken the turn asks for the next one; what that raises fails the work."""

    pieces: Iterator[tuple[int, Piece]]
    cancel: CancelWord  # ends it at its next rows, from any thread
    byte_count: int = 0  # of all pieces
    # For the Copier alone, under its lock:
    running: int = 0
    exhausted: bool = False

    def stop(self) -> None:
        self.cancel.set()

    def done(self, checksum: int | None, text: str) -> None:
        """What was attempted of it has this checksum, or has failed for this reason."""
        self.add(checksum or 0)
        if text:
            self.fail(text)

    def next(self) -> tuple[int, Piece] | None:
        """The next piece; None when there is none. Raises what planning raises, and TransportError once cancelled."""
        if self.cancel.is_set:
            raise TransportError(CANCELLED)
        return next(self.pieces, None)


def copy_job(
    order: Write, pairing: Pairing, report: Callable[[Work], None], *, source_address: int, target_address: int,
    lines: Lines | None = None,
) -> CopyWork:  # fmt: skip
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

    byte_count, turn = len(order.source_slots) * pairing.row_bytes, (order.session, order.grant)
    return CopyWork(turn=turn, pieces=pieces(), cancel=cancel, report=report, byte_count=byte_count)


class Copier:
    """`threads` threads, each of which takes one piece of one grant at a time. Made and used on the loop's thread."""

    def __init__(self, threads: int, *, name: str = "copy") -> None:
        self._loop, self._works = asyncio.get_running_loop(), OpenWorks()
        self._small: deque[CopyWork] = deque()  # for the next turns of the loop
        self._small_bytes = 0  # done in this turn of the loop
        self._changed = threading.Condition()
        self._turns: Turns[CopyWork] = Turns(PIECE_BYTES)
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"pdtransfer-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, work: CopyWork, *, here: bool = False) -> None:
        """Queues a work behind those of its own grant. A small one that may be done `here` is done on the loop, in this
        turn or a later one."""
        self._works.add(work)
        if self._closing:
            work.fail(CANCELLED)
            self._works.end(work)
        elif not here or work.byte_count > SMALL_BYTES_MAX:
            with self._changed:
                if self._turns.add(work.turn, work):
                    self._changed.notify()
        elif self._has_turn(work):
            self._carry(work)
        else:
            self._small.append(work)

    def stop(self, session: int, grant: int) -> None:
        """Stops this grant's works at their next rows; each is reported all the same. One without any is ignored."""
        self._works.stop(session, grant)

    async def close(self) -> None:
        """Stops every work, and joins the threads: no row is read or written any more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._works.stop_all()
        await in_thread(self._join)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _has_turn(self, work: CopyWork) -> bool:
        return self._small_bytes + work.byte_count <= _SMALL_BYTES_TURN

    def _carry(self, work: CopyWork) -> None:
        if not self._small_bytes:
            self._loop.call_soon(self._next_turn)
        self._small_bytes += work.byte_count
        work.done(*attempt(lambda: sum(piece() for _, piece in work.pieces)))
        self._works.end(work)

    def _next_turn(self) -> None:
        self._small_bytes = 0
        while self._small and self._has_turn(self._small[0]):
            self._carry(self._small.popleft())

    def _work(self) -> None:
        thread = threading.get_native_id()
        given = os.getpriority(os.PRIO_PROCESS, thread)  # a process that is nicer still may not take that back
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, given))  # of this thread alone
        while (queue := self._take()) is not None:
            job = queue.items[0]
            found, text = (None, job.text) if job.text else attempt(job.next)
            over = self._put_back(queue, None if found is None else found[0], text)
            if found is not None:
                over = self._done(job, *attempt(found[1]))
            if over:
                self._works.end(job)

    def _take(self) -> Queue[CopyWork] | None:
        """The queue of the grant whose turn it is; None when this is closed and nothing is queued."""
        with self._changed:
            while (queue := self._turns.take()) is None:
                if self._closing and not self._turns:
                    return None
                self._changed.wait()
            return queue

    def _put_back(self, queue: Queue[CopyWork], byte_count: int | None, text: str) -> bool:
        """Ends the turn, unless some of it is left; whether the grant's first work has ended. `byte_count` is of the
        piece that was taken, None for none."""
        with self._changed:
            job = queue.items[0]
            if byte_count is None:
                queue.items.popleft()
                job.exhausted = True
                job.done(None, text)
                self._turns.put_back(queue)
            else:
                job.running += 1
                self._turns.put_back(queue, byte_count)
            if queue.items:
                self._changed.notify()
            else:
                self._changed.notify_all()  # a thread may wait for this to close
            return job.exhausted and not job.running

    def _done(self, job: CopyWork, checksum: int | None, text: str) -> bool:
        """True if that was the last piece of an exhausted work."""
        with self._changed:
            job.running -= 1
            job.done(checksum, text)
            return job.exhausted and not job.running


def attempt(step: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """What a step of a work returns, or why it failed: it fails this work alone, and the thread goes on."""
    try:
        return step(), ""
    except TransportError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 (it becomes the write's outcome)
        return None, f"{type(error).__name__}: {error}"
