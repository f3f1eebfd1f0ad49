"""Copies landed rows of HBM components from the arena to their memory, off the loop, in turn between grants."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ..errors import TransportError
from ..handoff.effects import Lift
from ..handoff.slot_allocator import slots_of
from ..kernels.cancel import CancelWord
from ..kernels.card import CudaEvent, card
from ..kernels.kv_copy import kv_copy
from ..kernels.pools import Pool
from ..layout.geometry import Int64s
from ..layout.layout import Layout
from ..memory.arena_memory import ArenaMemory
from ..memory.hbm import Hbm
from ..threads import in_thread
from .copier import CANCELLED, PIECE_BYTES, Copier, Piece
from .loop_mailbox import LoopMailbox

log = logging.getLogger(__name__)

LiftDone = Callable[[Lift, str], None]
"""Called once for each Lift, on the loop's thread and never from within lift(), once nothing of it is copied any more.
The text says why not all of it was copied. Not called where the card cannot report the end of a copy."""


@dataclass(frozen=True, slots=True)
class _ComponentRows:
    """One component's rows, which have the same slots on both sides."""

    target: Pool
    source: Pool
    slots: Int64s


@dataclass(slots=True, eq=False, kw_only=True)
class _HbmCopy:
    """One grant, as a CopyWork."""

    order: Lift
    done: LiftDone
    parts: list[_ComponentRows]
    copy: Callable[[_ComponentRows, Int64s], None]
    cancel: CancelWord = field(default_factory=CancelWord)
    text: str = ""
    checksum: int = 0
    running: int = 0
    exhausted: bool = False
    lost: bool = False  # the card cannot report whether its last copy has ended
    part: int = 0
    row: int = 0
    piece_bytes: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        return self.order.session, self.order.grant

    def next(self) -> Piece | None:
        if self.cancel.is_set:
            raise TransportError(CANCELLED)
        if self.lost or self.part == len(self.parts):
            return None
        part = self.parts[self.part]
        first, self.row = self.row, self.row + max(1, PIECE_BYTES // part.source.layout.row_bytes)
        if self.row >= len(part.slots):
            end, self.part, self.row = len(part.slots), self.part + 1, 0
        else:
            end = self.row
        self.piece_bytes = (end - first) * part.source.layout.row_bytes
        return partial(self._carry, part, part.slots[first:end])

    def _carry(self, part: _ComponentRows, slots: Int64s) -> int:
        try:
            self.copy(part, slots)
        except _LostError:
            self.lost = True
            raise
        return 0


class _LostError(Exception):
    """The card cannot report any more whether a copy has ended."""


class HbmCopier:
    """Copies within this process, or to a card. Make it on the loop's thread; both memories outlive `close`."""

    def __init__(self, arena: ArenaMemory, hbm: Hbm, *, threads: int = 1) -> None:
        self._arena, self._hbm = arena, hbm
        self._queue: tuple[int, CudaEvent] | None = None  # a stream, and the event behind its last copy
        self._loop = asyncio.get_running_loop()
        self._reports: LoopMailbox[_HbmCopy] = LoopMailbox(self._ended)
        # One thread launches on one stream, and waits for it.
        self._copier: Copier[_HbmCopy] = Copier(1 if hbm.card is not None else threads, self._reports.post, name="lift")
        self._open: dict[tuple[int, int], _HbmCopy] = {}
        self._closing = False

    def lift(self, order: Lift, done: LiftDone) -> None:
        """Starts copying, in turn between grants."""
        parts = [self._rows(part.component.layout, slots_of(part.extents)) for part in order.parts]
        work = self._open[order.session, order.grant] = _HbmCopy(order=order, done=done, parts=parts, copy=self._copy)
        if self._closing:
            work.text = CANCELLED
            self._reports.post(work)
        else:
            self._copier.add(work)

    def cancel(self, session: int, grant: int) -> None:
        """Stops at the next piece; the grant reports nevertheless. A grant that has ended is ignored."""
        if (work := self._open.get((session, grant))) is not None:
            work.cancel.set()

    async def close(self) -> None:
        """Stops copying, and returns once nothing is copied."""
        self._closing = True
        for key in self._open:
            self.cancel(*key)
        await in_thread(self._copier.close)

    def _rows(self, layout: Layout, slots: Int64s) -> _ComponentRows:
        mapping = self._arena.mapping
        if self._hbm.card is None:
            source = Pool(layout=layout, address=mapping.address)
        else:
            assert mapping.registered is not None
            source = Pool(layout=layout, address=mapping.registered.device_address, card=self._hbm.card, host=True)
        return _ComponentRows(self._hbm.pool(layout), source, slots)

    def _copy(self, part: _ComponentRows, slots: Int64s) -> None:
        """In the copier's thread; returns once the rows are there."""
        if self._hbm.card is None:
            kv_copy(part.target, part.source, slots, slots, len(slots))
            return
        here = card(self._hbm.card)
        if self._queue is None:
            self._queue = here.stream(), CudaEvent(here)
        (stream, copied), failure = self._queue, None
        try:
            kv_copy(part.target, part.source, slots, slots, len(slots), stream=stream)
        except Exception as error:  # noqa: BLE001 (it may have been queued all the same)
            failure = error
        try:
            copied.record(stream)
            copied.wait()
        except Exception as error:  # noqa: BLE001 (whatever it is, nothing reports what has ended)
            raise _LostError(str(failure or error)) from None
        if failure is not None:
            raise failure

    def _ended(self, work: _HbmCopy) -> None:
        del self._open[work.turn]
        if work.lost:
            text = "grant %d keeps its slots: the card cannot report whether a copy has ended: %s"
            log.critical(text, work.turn[1], work.text)
            return
        work.done(work.order, work.text)
