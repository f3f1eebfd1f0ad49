"""Sums landed rows in decode's arena off the loop, but those of a small grant on the loop, as small copies are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ..errors import TransportError
from ..handoff.effects import Verify
from ..kernels import checksum_copy
from ..kernels.cancel import CancelWord
from ..layout.checksum import Lines, lines_of, runs_of
from ..layout.geometry import Int64s
from ..layout.layout import Component
from ..layout.plan import pieces_of
from ..threads import in_thread
from .copier import CANCELLED, PIECE_BYTES, Copier, CopyWork, Piece
from .loop_mailbox import LoopMailbox

Verified = Callable[[Verify, int, str], None]
"""Called once for each Verify, on the loop's thread and never from within verify(), with the checksum, or with the
reason why it is missing."""

_INLINE_BYTES_MAX = 256 << 10  # of a grant: some 30 us, less than a thread takes to wake and to report
_INLINE_BYTES_TURN = 1 << 20  # of all in one turn of the loop
_LINES_MAX = 256  # components whose Lines are cached


def _pieces(address: int, rows: Sequence[tuple[Lines, Int64s]], cancel: CancelWord) -> Iterator[tuple[int, Piece]]:
    """One grant's rows in a mapping of this process."""

    def summed(lines: Lines, runs: Int64s) -> int:
        found = checksum_copy.checksum(lines, runs, address, cancel=cancel)
        if found is None:
            raise TransportError(CANCELLED)
        return found

    for lines, runs in rows:
        for piece in pieces_of(runs, max(1, PIECE_BYTES // lines.row_bytes)):
            yield PIECE_BYTES, partial(summed, lines, piece)


class Verifier:
    """Reads an arena that is mapped at `address` until after close. Make it on the loop's thread."""

    def __init__(self, address: int, verified: Verified, *, threads: int = 2) -> None:
        self._address, self._verified = address, verified
        self._loop = asyncio.get_running_loop()
        self._native = self._loop.run_in_executor(None, checksum_copy.native)  # may compile
        self._reports: LoopMailbox[CopyWork[Verify]] = LoopMailbox(self._ended)
        self._copier: Copier[Verify] = Copier(threads, self._reports.post, name="verify")
        self._lines: dict[Component, Lines] = {}
        self._readings: dict[tuple[int, int], CopyWork[Verify]] = {}  # by session and grant
        self._closing = False
        self._inline_bytes = 0  # read in this turn of the loop

    def verify(self, order: Verify) -> None:
        """Starts reading, in turn between grants."""
        rows = [
            (self._lines_of(part.component), runs_of(part.extents[:, 0], part.extents[:, 1], part.first_row))
            for part in order.parts
        ]
        cancel, byte_count = CancelWord(), sum(lines.row_bytes * int(runs[:, 2].sum()) for lines, runs in rows)
        pieces = _pieces(self._address, rows, cancel)
        reading = CopyWork(order=order, pieces=pieces, cancel=cancel, byte_count=byte_count)
        self._readings[reading.turn] = reading
        if self._closing:
            reading.text = CANCELLED
            self._reports.post(reading)
            return
        inline = byte_count <= _INLINE_BYTES_MAX and self._inline_bytes + byte_count <= _INLINE_BYTES_TURN
        if not inline or not self._native.done():
            self._copier.add(reading)
            return
        if not self._inline_bytes:
            self._loop.call_soon(self._next_turn)
        self._inline_bytes += byte_count
        reading.carry()
        self._reports.post(reading)

    def cancel(self, session: int, grant: int) -> None:
        """Stops reading this grant at its next rows; it reports nevertheless. A grant that has ended is ignored."""
        if (reading := self._readings.get((session, grant))) is not None:
            reading.stop()

    async def close(self) -> None:
        """Stops reading, and returns once nothing of the arena is read."""
        self._closing = True
        for key in self._readings:
            self.cancel(*key)
        await self._native
        await in_thread(self._copier.close)

    def _lines_of(self, component: Component) -> Lines:
        if (lines := self._lines.get(component)) is None:
            if len(self._lines) >= _LINES_MAX:
                self._lines.clear()
            lines = self._lines[component] = lines_of(component.name, component.layout)
        return lines

    def _next_turn(self) -> None:
        self._inline_bytes = 0

    def _ended(self, reading: CopyWork[Verify]) -> None:
        del self._readings[reading.turn]
        self._verified(reading.order, reading.checksum, reading.text)
