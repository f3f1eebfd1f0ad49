"""Who fills the slots of a send ring: threads of this process that copy, or the card that the pool is of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ... import kernels
from ...errors import TransportError
from ...kernels import checksum_copy
from ...layout.checksum import runs_of
from ...layout.pairing import Pairing
from ..copier import CANCELLED, Copier
from ..copier import Piece as Step
from .jobs import Gather
from .ring import Cut, Ring, cut


class Gatherer(Protocol):
    """Fills slots, in turn between grants. Of each gather it says, once and in any thread, that it is over: nothing
    reads its rows or writes its slot any more, unless it is lost."""

    def prepare(self, ring: Ring) -> None:
        """In a worker thread: does now what the ring's first slot would have to wait for. WorldError where it can't."""
        ...

    def cut(self, pairing: Pairing) -> Cut:
        """How it has rows of this pairing pass through a ring."""
        ...

    def add(self, gather: Gather) -> None:
        """Queues a gather behind those of its own grant."""
        ...

    def stop(self, gather: Gather) -> None:
        """Ends a gather that was added at its next rows, if it is not over; never waits."""
        ...

    def close(self) -> None:
        """Carries out what is queued, and joins its threads; not on the loop."""
        ...


class CopyGatherer:
    """A Gatherer of a pool that lies in this process's memory at `pool_address`; `over` is called in copy threads."""

    def __init__(self, pool_address: int, threads: int, over: Callable[[Gather], None]) -> None:
        self._pool_address, self._over = pool_address, over
        self._copier: Copier[_Copy] = Copier(threads, self._ended, name="gather")

    def prepare(self, ring: Ring) -> None:  # noqa: ARG002
        kernels.native()
        checksum_copy.native()

    def cut(self, pairing: Pairing) -> Cut:
        return cut(pairing)

    def add(self, gather: Gather) -> None:
        self._copier.add(_Copy(gather=gather, source_address=self._pool_address))

    def stop(self, gather: Gather) -> None:
        gather.cancel.set()

    def close(self) -> None:
        self._copier.close()

    def _ended(self, copy: _Copy) -> None:
        gather = copy.gather
        gather.text, gather.checksum = copy.text, copy.checksum
        self._over(gather)


@dataclass(slots=True, eq=False, kw_only=True)
class _Copy:
    """A gather, as a copier's work."""

    gather: Gather
    source_address: int
    text: str = ""
    checksum: int = 0
    running: int = 0
    exhausted: bool = False
    taken: bool = False

    @property
    def piece_bytes(self) -> int:
        """What the slot sends."""
        return self.gather.job.cut.byte_count(self.gather.piece)

    @property
    def turn(self) -> tuple[int, int]:
        """What takes turns: session and grant."""
        return self.gather.job.order.session, self.gather.job.order.grant

    def next(self) -> Step | None:
        """All of it, once."""
        if self.gather.cancel.is_set:
            raise TransportError(CANCELLED)
        taken, self.taken = self.taken, True
        return None if taken else partial(self._fill)

    def _fill(self) -> int:
        gather, job, piece = self.gather, self.gather.job, self.gather.piece
        order, cancel = job.order, gather.cancel
        if job.straight:
            gather.runs = job.cut.straight(piece, order.source_slots, order.target_slots)
            return 0
        rows = job.cut.gather(piece, order.source_slots)
        between = rows, self.source_address, gather.ring.address(gather.slot)
        checksum: int | None = 0
        if job.lines is None or piece.low:
            checksum = 0 if kernels.copy(*between, cancel=cancel, by=_by()) else None
        elif job.cut.whole(piece):
            first_row = order.first_row + piece.first
            checksum = checksum_copy.copy(*between, lines=job.lines, first_row=first_row, cancel=cancel)
        elif kernels.copy(*between, cancel=cancel, by=_by()):
            # The first planes of these rows: it sums for all of them.
            of = runs_of(rows.runs[:, 0], rows.runs[:, 2], order.first_row + piece.first)
            checksum = checksum_copy.checksum(job.lines, of, self.source_address, cancel=cancel)
        if checksum is None:
            raise TransportError(CANCELLED)
        gather.runs = job.cut.runs(piece, order.target_slots)
        return checksum


def _by() -> kernels.Native:
    """This process's copy, without streaming stores: what is sent next should be in the cache."""
    return replace(kernels.native(), streams=0)
