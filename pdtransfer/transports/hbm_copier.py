"""Copies landed rows of HBM components from the staging buffer up to their memory, off the loop, grants in turn."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

from ..errors import TransportError
from ..handoff.effects import Settle
from ..handoff.slot_allocator import slots_of
from ..kernels.cancel import CancelWord
from ..kernels.gpu import CudaEvent, gpu_at
from ..kernels.kv_copy import kv_copy
from ..kernels.pools import Pool
from ..layout.geometry import Int64s
from ..layout.layout import Layout
from ..memory.arena_memory import ArenaMemory
from ..memory.hbm import Hbm
from .copier import PIECE_BYTES, Copier, CopyWork, Piece, Settled
from .works import Turn, Work

log = logging.getLogger(__name__)


class HbmCopier(Copier):
    """Copies within this process, or to a GPU. Make it on the loop's thread; both memories outlive `close`."""

    def __init__(self, arena: ArenaMemory, hbm: Hbm, settled: Settled) -> None:
        """`settled` is not called where the GPU cannot report the end of a copy."""
        super().__init__(1, name="lift")  # a GPU's has one stream, and waits for it
        self._arena, self._hbm, self._settled = arena, hbm, settled
        self._queue: tuple[int, CudaEvent] | None = None  # a stream, and the event behind its last copy
        self._lost: set[Turn] = set()  # of which the GPU cannot report whether a copy has ended
        self.moved_bytes = 0  # of every piece that was copied, also for grants that failed

    def lift(self, order: Settle) -> None:
        """Starts copying, in turn between grants."""
        turn, report = (order.session, order.grant), partial(self._ended, order)
        self.add(CopyWork(turn=turn, pieces=self._pieces(order), cancel=CancelWord(), report=report))

    def _pieces(self, order: Settle) -> Iterator[tuple[int, Piece]]:
        for part, target in zip(order.parts, order.targets, strict=True):
            pool, layout = self._hbm.pool(target.component.layout), part.component.layout
            target_slots, source_slots = slots_of(target.extents), slots_of(part.extents)
            rows = max(1, PIECE_BYTES // layout.row_bytes)
            for first in range(0, len(source_slots), rows):
                slots = target_slots[first : first + rows], source_slots[first : first + rows]
                yield len(slots[1]) * layout.row_bytes, partial(self._piece, order, pool, self._source(layout), *slots)

    def _source(self, layout: Layout) -> Pool:
        """The staging buffer, where the copies read it."""
        mapping, device = self._arena.mapping, self._hbm.device
        if device is None:
            return Pool(layout=layout, address=mapping.address)
        assert mapping.registered is not None
        return Pool(layout=layout, address=mapping.registered.device_address, device=device, host=True)

    def _piece(self, order: Settle, target: Pool, source: Pool, targets: Int64s, sources: Int64s) -> int:
        """In the copier's thread; counts what has moved."""
        self._copy(order, target, source, targets, sources)
        self.moved_bytes += len(targets) * target.layout.row_bytes  # one thread copies
        return 0

    def _copy(self, order: Settle, target: Pool, source: Pool, targets: Int64s, sources: Int64s) -> None:
        """In the copier's thread; returns once the rows are there."""
        copy = partial(kv_copy, target, source, targets, sources, len(targets))
        if self._hbm.device is None:
            copy()
            return
        gpu = gpu_at(self._hbm.device)
        if self._queue is None:
            self._queue = gpu.stream(), CudaEvent(gpu)
        (stream, copied), failure = self._queue, None
        try:
            copy(stream=stream)
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
