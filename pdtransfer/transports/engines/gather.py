"""Fills the slots of a send ring: by threads of this process that copy, or by the GPU whose memory the pool is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
from msgspec import structs

from ... import kernels
from ...errors import TransportError
from ...handoff.effects import Write
from ...handoff.sharing import facing
from ...kernels import checksum_copy
from ...kernels.cancel import CancelWord
from ...kernels.pools import Pool
from ...layout.checksum import Lines, runs_of
from ...layout.geometry import Int64s
from ...layout.layout import Component
from ...layout.pairing import Pairing
from ..copier import CANCELLED, Copier, CopyWork
from ..gpu_launcher import WriterGpu, prepare_copies
from ..gpu_writer import GpuWrite, GpuWriter, Staged
from ..works import Work
from .ring import Cut, Piece, SendRing, cut

_STAGED_MAX = 64

Gathered = Callable[["RingJob", Work], None]
"""Called on the loop's thread once a work of a job has ended."""


@dataclass(slots=True, eq=False, kw_only=True)
class Gather:
    """One piece of a job on its way into a slot, by a work. Once that has landed, `runs`, int64 (n, 3), is where the
    bytes go, as Cut.runs or Cut.straight. If its outcome is unknown, its rows may still be read, and its slot written.
    """

    job: RingJob
    piece: Piece
    slot: int
    ring: SendRing
    runs: Int64s = field(default_factory=lambda: np.empty((0, 3), np.int64))

    def plan(self) -> int:
        """Finds `runs`, in any thread; has no checksum."""
        self.runs = self.job.runs(self.piece)
        return 0


@dataclass(slots=True, eq=False, kw_only=True)
class RingJob(Work):
    """One write, piece by piece."""

    order: Write
    cut: Cut
    theirs: Component  # the order's component in the arena
    lines: Lines | None  # of the source, where a checksum is wanted
    straight: bool = False  # sent from the pool itself: its slots have only tables of operations
    pieces: Iterator[Piece] = field(init=False)
    all_runs: Int64s | None = None  # where all its bytes go, once `planned`: None where each piece is planned
    planned: bool = False
    exhausted: bool = False  # no piece of it is left to take
    gathering: dict[Work, Gather] = field(default_factory=dict[Work, Gather])  # slots being filled
    sent: set[int] = field(default_factory=set[int])  # slots that may still be under way

    def __post_init__(self) -> None:
        self.pieces = self.cut.pieces(len(self.order.source_slots), straight=self.straight)

    def runs(self, piece: Piece) -> Int64s:
        """Where a piece's bytes leave, and go. In any copy thread: two may both plan all rows, to the same end."""
        if self.straight:
            return self.cut.straight(piece, self.order.source_slots, self.order.target_slots)
        if not self.planned:
            self.all_runs, self.planned = self.cut.all_runs(self.order.target_slots), True
        if self.all_runs is None:
            return self.cut.runs(piece, self.order.target_slots)
        return self.cut.runs_within(piece, self.all_runs)

    def stop(self) -> None:
        """On the loop: fills no more slots. What was sent goes on."""
        for work in self.gathering:
            work.stop()

    def over(self, *, known: bool) -> bool:
        """True if the pool is not read for it any more, and nothing of it is under way. Without `known` slots that were
        sent do not count, since their end will never be reported."""
        return self.exhausted and not self.gathering and (not self.sent or not known)


class Gatherer(Protocol):
    """Fills slots, in turn between grants. It reports the end of each gather once, on the loop. From then on nothing
    reads the rows or writes the slot, unless the outcome of its work is unknown."""

    def prepare(self, ring: SendRing) -> None:
        """In a worker thread: does now what the ring's first slot would have to wait for. Raises WorldError."""
        ...

    def cut(self, pairing: Pairing) -> Cut:
        """How rows of this pairing pass through a ring."""
        ...

    def add(self, gather: Gather) -> Work:
        """Makes the work of a gather, and queues it behind those of its own grant."""
        ...

    async def close(self) -> None:
        """Joins its threads, once all gathers were reported."""
        ...


class CopyGatherer:
    """A Gatherer for a pool in this process's memory at `pool_address`."""

    def __init__(self, pool_address: int, threads: int, over: Gathered) -> None:
        self._pool_address, self._over = pool_address, over
        self._copier = Copier(threads, name="gather")

    def prepare(self, ring: SendRing) -> None:  # noqa: ARG002
        prepare_copies(None)

    def cut(self, pairing: Pairing) -> Cut:
        return cut(pairing)

    def add(self, gather: Gather) -> Work:
        cancel, byte_count = CancelWord(), gather.job.cut.byte_count(gather.piece)
        work = CopyWork(
            turn=gather.job.turn, pieces=iter([(byte_count, partial(self._fill, gather, cancel))]),
            cancel=cancel, report=partial(self._over, gather.job),
        )  # fmt: skip
        self._copier.add(work)
        return work

    async def close(self) -> None:
        await self._copier.close()

    def _fill(self, gather: Gather, cancel: CancelWord) -> int:
        job, piece = gather.job, gather.piece
        order = job.order
        if job.straight:
            return gather.plan()
        rows = job.cut.gather(piece, order.source_slots)
        between = rows, self._pool_address, gather.ring.address(gather.slot)
        checksum: int | None = 0
        if job.lines is None or piece.low:
            checksum = 0 if kernels.copy(*between, cancel=cancel, by=_by()) else None
        elif job.cut.whole(piece):
            first_row = order.first_row + piece.first
            checksum = checksum_copy.copy(*between, lines=job.lines, first_row=first_row, cancel=cancel)
        elif kernels.copy(*between, cancel=cancel, by=_by()):
            # The piece with the first planes of these rows sums all of their planes.
            of = runs_of(rows.runs[:, 0], rows.runs[:, 2], order.first_row + piece.first)
            checksum = checksum_copy.checksum(job.lines, of, self._pool_address, cancel=cancel)
        if checksum is None:
            raise TransportError(CANCELLED)
        gather.plan()
        return checksum


def _by() -> kernels.NativeCopy:
    """This process's copy, without streaming stores, since what is sent next should be in the cache."""
    return replace(kernels.native(), streams=0)


class LaunchGatherer:
    """A Gatherer for a pool at `pool_address` of a GPU's memory. A gather is one launch, so at most two are in flight
    while full slots are sent.

    `components` are the pool's own, by name.
    """

    def __init__(self, gpu: WriterGpu, pool_address: int, components: dict[str, Component], over: Gathered) -> None:
        self._gpu, self._pool_address, self._components, self._over = gpu, pool_address, components, over
        self._gpu_writer = GpuWriter(gpu.launcher, gpu.spans)
        self._planner = Copier(1, name="plan")  # of what leaves from the GPU's memory itself, without a launch

    def prepare(self, ring: SendRing) -> None:
        prepare_copies(self._gpu)
        ring.register(self._gpu)

    def cut(self, pairing: Pairing) -> Cut:
        return cut(pairing, paged=True)

    def add(self, gather: Gather) -> Work:
        job, piece = gather.job, gather.piece
        if job.straight:
            plan = CopyWork(
                turn=job.turn, pieces=iter([(0, gather.plan)]), cancel=CancelWord(), report=partial(self._over, job)
            )  # fmt: skip
            self._planner.add(plan)
            return plan
        source, ring = job.cut.layouts(piece)
        first, device, staged = gather.slot * piece.room, self._gpu.ordinal, None
        if job.order.verify and not piece.low:
            ours = self._components[job.theirs.name]
            staged = _staged(ours, job.theirs, job.order.layers, self._pool_address, device)
        work = GpuWrite(
            order=structs.replace(
                job.order,
                source_slots=job.order.source_slots[piece.first : piece.end],
                target_slots=np.arange(first, first + piece.rows),
                first_row=job.order.first_row + piece.first,
            ),
            source=Pool(layout=source, address=self._pool_address, device=device),
            target=Pool(layout=ring, address=gather.ring.device_address, device=device, host=True),
            report=partial(self._over, job),
            then=gather.plan,
            staged=staged,
        )
        self._gpu_writer.add(work)
        return work

    async def close(self) -> None:
        await self._gpu_writer.close()
        await self._planner.close()


@lru_cache(_STAGED_MAX)
def _staged(ours: Component, theirs: Component, layers: tuple[int, int], address: int, device: int) -> Staged:
    """For all planes of the rows: the piece with the first planes sums all of them."""
    source = facing(ours.layout, theirs.layout.layers(*layers))
    return Staged.of(ours.name, Pool(layout=source, address=address, device=device))
