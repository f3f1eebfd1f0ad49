"""Sums landed rows in decode's arena off the loop, but those of a small grant on the loop, as small copies are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

from ..errors import TransportError
from ..handoff.effects import Settle
from ..kernels import checksum_copy
from ..kernels.cancel import CancelWord
from ..layout.checksum import Lines, lines_of, runs_of
from ..layout.geometry import Int64s
from ..layout.layout import Component
from ..layout.plan import pieces_of
from .copier import CANCELLED, PIECE_BYTES, Copier, CopyWork, Piece, Settled

_THREADS = 2
_LINES_MAX = 256  # components whose Lines are cached


def _pieces(address: int, rows: Sequence[tuple[Lines, Int64s]], cancel: CancelWord) -> Iterator[tuple[int, Piece]]:
    """One grant's rows in a mapping of this process."""

    def summed(lines: Lines, runs: Int64s) -> int:
        checksum = checksum_copy.checksum(lines, runs, address, cancel=cancel)
        if checksum is None:
            raise TransportError(CANCELLED)
        return checksum

    for lines, runs in rows:
        for piece in pieces_of(runs, max(1, PIECE_BYTES // lines.row_bytes)):
            yield PIECE_BYTES, partial(summed, lines, piece)


class Verifier(Copier):
    """Reads an arena that is mapped at `address` until after close. Make it on the loop's thread."""

    def __init__(self, address: int, settled: Settled) -> None:
        super().__init__(_THREADS, name="verify")
        self._address, self._settled = address, settled
        self._native = asyncio.get_running_loop().run_in_executor(None, checksum_copy.native)  # may compile
        self._lines: dict[Component, Lines] = {}

    def verify(self, order: Settle) -> None:
        """Starts reading, in turn between grants."""
        rows = [
            (self._lines_of(part.component), runs_of(part.extents[:, 0], part.extents[:, 1], part.first_row))
            for part in order.parts
        ]
        cancel, byte_count = CancelWord(), sum(lines.row_bytes * int(runs[:, 2].sum()) for lines, runs in rows)
        reading = CopyWork(
            turn=(order.session, order.grant), pieces=_pieces(self._address, rows, cancel), cancel=cancel,
            report=lambda work: self._settled(order, work.checksum, work.text), byte_count=byte_count,
        )  # fmt: skip
        self.add(reading, here=self._native.done())

    async def close(self) -> None:
        """Stops reading, and returns once nothing of the arena is read."""
        await super().close()
        await self._native

    def _lines_of(self, component: Component) -> Lines:
        if (lines := self._lines.get(component)) is None:
            if len(self._lines) >= _LINES_MAX:
                self._lines.clear()
            lines = self._lines[component] = lines_of(component.name, component.layout)
        return lines
