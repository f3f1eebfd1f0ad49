"""Threads that copy queued plans piece by piece, in turn between grants: a small one waits for no large one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from .. import kernels
from ..cancel import Cancel
from ..effects import Write
from ..errors import TransportError
from ..layout import Pairing
from ..plan import Plan, plan
from .base import WriteDone

PIECE_BYTES = 4 << 20  # copied between two turns: some 0.5 ms

_CANCELLED = "cancelled"
_Result = TypeVar("_Result")


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
    cancel: Cancel = field(default_factory=Cancel)
    text: str = ""
    # The copier's own. `pieces` belongs to the thread whose turn it is, the rest to who holds the lock.
    pieces: Iterator[Plan] | None = None
    running: int = 0
    exhausted: bool = False

    @property
    def turn(self) -> tuple[int, int]:
        """What takes turns: session and grant."""
        return self.order.session, self.order.grant

    @property
    def byte_count(self) -> int:
        """What it copies."""
        return len(self.order.source_slots) * self.pairing.row_bytes

    def carry(self) -> None:
        """Does all of it, here and now."""
        plan, self.text = _attempt(self._plan)
        if plan is not None:
            _, self.text = _attempt(partial(self.copy, plan))

    def next(self) -> Plan | None:
        """The next piece, or None when there is none; raises what planning raises."""
        if self.cancel.is_set:
            raise TransportError(_CANCELLED)
        if self.pieces is None:
            self.pieces = self._plan().pieces(PIECE_BYTES)
        return next(self.pieces, None)

    def copy(self, piece: Plan) -> None:
        """Copies a piece; raises TransportError when it was cancelled."""
        if not kernels.copy(piece, self.source_address, self.target_address, cancel=self.cancel):
            raise TransportError(_CANCELLED)

    def _plan(self) -> Plan:
        return plan(self.pairing, self.order.source_slots, self.order.target_slots)


class Copier:
    """`threads` threads, each of which takes one piece of one grant at a time; `ended` is called in them."""

    def __init__(self, threads: int, ended: Callable[[Job], None]) -> None:
        self._ended = ended
        self._changed = threading.Condition()
        self._grants: dict[tuple[int, int], deque[Job]] = {}  # what is not exhausted
        self._turns: deque[deque[Job]] = deque()  # the same, but for what some thread is just taking a piece of
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"pdtransfer-copy-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, job: Job) -> None:
        """Queues a job behind those of its own grant."""
        with self._changed:
            assert not self._closing
            if (jobs := self._grants.get(job.turn)) is not None:
                jobs.append(job)
                return
            jobs = self._grants[job.turn] = deque((job,))
            self._turns.append(jobs)
            self._changed.notify()

    def close(self) -> None:
        """Lets queued jobs end, and joins the threads; not on the loop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (jobs := self._turn()) is not None:
            job = jobs[0]
            piece, text = (None, job.text) if job.text else _attempt(job.next)
            over = self._taken(jobs, piece, text)
            if piece is not None:
                _, text = _attempt(partial(job.copy, piece))
                over = self._copied(job, text)
            if over:
                self._ended(job)

    def _turn(self) -> deque[Job] | None:
        """The grant whose turn it is; None when this is closed and all turns are given."""
        with self._changed:
            while not self._turns:
                if self._closing and not self._grants:
                    return None
                self._changed.wait()
            return self._turns.popleft()

    def _taken(self, jobs: deque[Job], piece: Plan | None, text: str) -> bool:
        """Gives the turn on; whether the grant's first job is over."""
        with self._changed:
            job = jobs[0]
            if piece is None:
                jobs.popleft()
                job.exhausted, job.text = True, job.text or text
            else:
                job.running += 1
            if jobs:
                self._turns.append(jobs)
                self._changed.notify()
            else:
                del self._grants[job.turn]
                self._changed.notify_all()  # who waits to close may have waited for this
            return job.exhausted and not job.running

    def _copied(self, job: Job, text: str) -> bool:
        """Whether that was the last piece of an exhausted job."""
        with self._changed:
            job.running -= 1
            job.text = job.text or text
            return job.exhausted and not job.running


def _attempt(step: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """What a step of a job gives, or why it failed.

    What fails fails its write and not the thread, which carries others; nothing of the step is in flight any more.
    """
    try:
        return step(), ""
    except TransportError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 (it becomes the write's outcome)
        return None, f"{type(error).__name__}: {error}"
