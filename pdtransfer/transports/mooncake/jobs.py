"""Writes on their way through a ring: what of each is gathered, sent, and known to be there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ... import kernels, sums
from ...cancel import Cancel
from ...checksum import Lines, runs_of
from ...effects import Outcome, Write
from ...errors import TransportError
from ...geometry import Int64s
from ..base import WriteDone
from ..copier import CANCELLED
from ..copier import Piece as Step
from .ring import Cut, Piece, Ring


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One write. When it is over, `text` is "" if all of it has landed."""

    order: Write
    done: WriteDone
    cut: Cut
    source_address: int
    lines: Lines | None  # of the source, where a checksum is wanted
    pieces: Iterator[Piece] = field(init=False)
    cancel: Cancel = field(default_factory=Cancel)
    text: str = ""
    checksum: int = 0
    exhausted: bool = False  # no piece of it is still to be taken
    gathering: int = 0  # slots that are being filled
    sent: set[int] = field(default_factory=set[int])  # slots whose end is not known

    def __post_init__(self) -> None:
        self.pieces = self.cut.pieces(len(self.order.source_slots))

    def fail(self, text: str) -> None:
        """No more of it is gathered."""
        self.text, self.exhausted = self.text or text, True
        self.cancel.set()

    def over(self, *, known: bool) -> bool:
        """Whether nothing of it is under way, or nobody will ever know (not `known`); the pool is read no more."""
        return self.exhausted and not self.gathering and (not self.sent or not known)

    @property
    def outcome(self) -> Outcome:
        """Once it is over."""
        if self.sent:
            return Outcome.UNKNOWN
        return Outcome.FAILED if self.text else Outcome.LANDED


@dataclass(slots=True, eq=False, kw_only=True)
class Gather:
    """One piece of a job on its way into a slot, as a copier's work; then `runs` says where its bytes go."""

    job: Job
    piece: Piece
    slot: int
    ring: Ring
    runs: Int64s = field(default_factory=lambda: np.empty((0, 3), np.int64))
    text: str = ""
    checksum: int = 0
    running: int = 0
    exhausted: bool = False
    taken: bool = False

    @property
    def turn(self) -> tuple[int, int]:
        """What takes turns: session and grant."""
        return self.job.order.session, self.job.order.grant

    def next(self) -> Step | None:
        """All of it, once."""
        if self.job.cancel.is_set:
            raise TransportError(CANCELLED)
        taken, self.taken = self.taken, True
        return None if taken else partial(self._fill)

    def _fill(self) -> int:
        job, order, piece = self.job, self.job.order, self.piece
        rows = job.cut.gather(piece, order.source_slots)
        between = rows, job.source_address, self.ring.address(self.slot)
        checksum: int | None = 0
        if job.lines is None or piece.low:
            checksum = 0 if kernels.copy(*between, cancel=job.cancel, by=_by()) else None
        elif job.cut.whole(piece):
            first_row = order.first_row + piece.first
            checksum = sums.copy(*between, lines=job.lines, first_row=first_row, cancel=job.cancel)
        elif kernels.copy(*between, cancel=job.cancel, by=_by()):
            # The first planes of these rows: it sums for all of them.
            of = runs_of(rows.runs[:, 0], rows.runs[:, 2], order.first_row + piece.first)
            checksum = sums.checksum(job.lines, of, job.source_address, cancel=job.cancel)
        if checksum is None:
            raise TransportError(CANCELLED)
        self.runs = job.cut.runs(piece, order.target_slots)
        return checksum


def _by() -> kernels.Native:
    """This process's copy, without streaming stores: what is sent next should be in the cache."""
    return replace(kernels.native(), streams=0)
