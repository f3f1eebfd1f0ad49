"""Writes on their way through a ring: what of each is gathered, sent, and known to be there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ...handoff.effects import Outcome, Write
from ...kernels.cancel import Cancel
from ...layout.checksum import Lines
from ...layout.geometry import Int64s
from ...layout.layout import Component
from ..base import WriteDone
from .ring import Cut, Piece, Ring


@dataclass(slots=True, eq=False, kw_only=True)
class Gather:
    """One piece of a job on its way into a slot. When it is over, `text` is "" if all of it is there, and then `runs`,
    int64 (n, 3), says where its bytes go, as Cut.runs, or as Cut.straight."""

    job: Job
    piece: Piece
    slot: int
    ring: Ring
    cancel: Cancel = field(default_factory=Cancel)
    runs: Int64s = field(default_factory=lambda: np.empty((0, 3), np.int64))
    text: str = ""
    checksum: int = 0
    lost: bool = False  # it is over for us, and yet nobody can say that nothing reads its rows or writes its slot


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One write. When it is over, `text` is "" if all of it has landed."""

    order: Write
    done: WriteDone
    cut: Cut
    theirs: Component  # what the order's component is there
    lines: Lines | None  # of the source, where a checksum is wanted
    straight: bool = False  # from the pool, with nothing in its slots but what to send
    pieces: Iterator[Piece] = field(init=False)
    text: str = ""
    checksum: int = 0
    exhausted: bool = False  # no piece of it is still to be taken
    gathering: set[Gather] = field(default_factory=set[Gather])  # slots that are being filled
    sent: set[int] = field(default_factory=set[int])  # slots whose end is not known
    lost: bool = False  # so is that of a gather

    def __post_init__(self) -> None:
        self.pieces = self.cut.pieces(len(self.order.source_slots), straight=self.straight)

    def fail(self, text: str) -> None:
        """No more of it is taken."""
        self.text, self.exhausted = self.text or text, True

    def over(self, *, known: bool) -> bool:
        """Whether nothing of it is under way, or nobody will ever know (not `known`); the pool is read no more."""
        return self.exhausted and not self.gathering and (not self.sent or not known)

    @property
    def outcome(self) -> Outcome:
        """Once it is over."""
        if self.sent or self.lost:
            return Outcome.UNKNOWN
        return Outcome.FAILED if self.text else Outcome.LANDED
