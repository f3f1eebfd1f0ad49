"""Copies landed rows of HBM components from the staging buffer up to their memory, off the loop, grants in turn."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from threading import Lock

from ..errors import TransportError
from ..handoff.effects import ComponentRows, Settle
from ..handoff.slot_allocator import slots_of
from ..kernels.cancel import CancelWord
from ..kernels.gpu import CudaEvent, gpu_at
from ..kernels.kv_copy import kv_copy
from ..kernels.pools import Pool
from ..layout.geometry import Int64s
from ..memory.arena_memory import ArenaMemory
from ..memory.hbm import Hbm
from .copier import PIECE_BYTES, Copier, CopyWork, Piece, Settled
from .works import Turn, Work

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _ComponentRows:
    """One component's rows on both sides."""

    target: Pool
    source: Pool
    target_slots: Int64s
    source_slots: Int64s


class HbmCopier:
    """Copies within this process, or to a GPU. Make it on the loop's thread; both memories outlive `close`."""

    def __init__(self, arena: ArenaMemory, hbm: Hbm, settled: Settled, *, threads: int = 1) -> None:
        """`settled` is not called where the GPU cannot report the end of a copy."""
        self._arena, self._hbm, self._settled = arena, hbm, settled
        self._queue: tuple[int, CudaEvent] | None = None  # a stream, and the event behind its last copy
        # One thread launches on one stream, and waits for it.
        self._copier = Copier(1 if hbm.device is not None else threads, name="lift")
        self._lost: set[Turn] = set()  # of which the GPU cannot report whether a copy has ended
        self._counting = Lock()
        self.moved_bytes = 0  # of every piece that was copied, also for grants that failed

    def lift(self, order: Settle) -> None:
        """Starts copying, in turn between grants."""
        parts = [self._rows(*rows) for rows in zip(order.parts, order.targets, strict=True)]
        self._copier.add(
            CopyWork(
                turn=(order.session, order.grant), pieces=self._pieces(order, parts), cancel=CancelWord(),
                report=partial(self._ended, order),
            )
        )  # fmt: skip

    def cancel(self, session: int, grant: int) -> None:
        """Stops at the next piece; the grant reports nevertheless. A grant that has ended is ignored."""
        self._copier.stop(session, grant)

    async def close(self) -> None:
        """Stops copying, and returns once nothing is copied."""
        await self._copier.close()

    def _rows(self, part: ComponentRows, target: ComponentRows) -> _ComponentRows:
        mapping, layout = self._arena.mapping, part.component.layout
        if self._hbm.device is None:
            source = Pool(layout=layout, address=mapping.address)
        else:
            assert mapping.registered is not None
            source = Pool(layout=layout, address=mapping.registered.device_address, device=self._hbm.device, host=True)
        pool = self._hbm.pool(target.component.layout)
        return _ComponentRows(pool, source, slots_of(target.extents), slots_of(part.extents))

    def _pieces(self, order: Settle, parts: list[_ComponentRows]) -> Iterator[tuple[int, Piece]]:
        for part in parts:
            row_bytes = part.source.layout.row_bytes
            rows = max(1, PIECE_BYTES // row_bytes)
            for first in range(0, len(part.source_slots), rows):
                count = len(part.source_slots[first : first + rows])
                yield count * row_bytes, partial(self._piece, order, part, first, count)

    def _piece(self, order: Settle, part: _ComponentRows, first: int, count: int) -> int:
        """In the copier's thread; counts what has moved."""
        slots = part.target_slots[first : first + count], part.source_slots[first : first + count]
        self._copy(order, part, *slots, count)
        with self._counting:
            self.moved_bytes += count * part.target.layout.row_bytes
        return 0

    def _copy(self, order: Settle, part: _ComponentRows, targets: Int64s, sources: Int64s, count: int) -> None:
        """In the copier's thread; returns once the rows are there."""
        if self._hbm.device is None:
            kv_copy(part.target, part.source, targets, sources, count)
            return
        gpu = gpu_at(self._hbm.device)
        if self._queue is None:
            self._queue = gpu.stream(), CudaEvent(gpu)
        (stream, copied), failure = self._queue, None
        try:
            kv_copy(part.target, part.source, targets, sources, count, stream=stream)
        except Exception as error:  # noqa: BLE001 (it may have been queued all the same)
            failure = error
        try:
            copied.record(stream)
            copied.wait()
        except Exception as error:  # noqa: BLE001 (whatever it is, nothing reports what has ended)
            self._lost.add((order.session, order.grant))
            raise TransportError(str(failure or error)) from None
        if failure is not None:
            raise failure

    def _ended(self, order: Settle, work: Work) -> None:
        if work.turn in self._lost:
            text = "grant %d keeps its slots: the GPU cannot report whether a copy has ended: %s"
            log.critical(text, order.grant, work.text)
        else:
            self._settled(order, 0, work.text)
