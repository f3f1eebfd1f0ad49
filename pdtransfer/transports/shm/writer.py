"""Prefill's side of shared memory: maps arenas, and writes there from its own memory or a GPU's."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from ...errors import TransportError, WorldError
from ...handoff.effects import Outcome, Write
from ...handoff.ready_gate import ReadyGate
from ...handoff.sharing import facing
from ...kernels.pools import Pool
from ...kernels.registered import CHUNK_BYTES
from ...layout.checksum import Lines
from ...layout.layout import Component
from ...layout.pairing import Pairing
from ...memory.mapping import Mapping, enter_backed, map_received
from ...threads import in_pool, in_thread
from ...wire import Reach
from ..base import Ready, WakeHint, Wrote
from ..component_match import Planes, lines_for, paired
from ..copier import Copier, CopyWork, copy_job
from ..gpu_launcher import Exported, WriterGpu, prepare_copies
from ..gpu_writer import GpuWrite, GpuWriter, Staged
from ..loop_mailbox import LoopMailbox
from ..options import WriterOptions
from .handover import receive

_INLINE_BYTES_MAX = 256 << 10  # of a write on the loop: some 30 us, less than a thread takes to wake and to report
_INLINE_BYTES_TURN = 1 << 20  # of all writes in one turn of the loop: more would stall it
_HANDOVER_SECONDS = 5.0
_MAP_THREADS = 4
_ENTER_BYTES = CHUNK_BYTES  # of an arena at a time, some 50 ms: rooms land in it before the rest is ready
_FOLLOW_SECONDS = 0.05  # the arena's owner backs some 100 MiB meanwhile

log = logging.getLogger(__name__)


_lost: list[_WritableArena] = []  # they stay mapped and locked: a GPU may write them as long as this process lives


@dataclass(frozen=True, slots=True)
class _WritableArena:
    """What a writer may write of one decode rank: the arena, and the memory of HBM components if a GPU reaches it."""

    mapping: Mapping
    needed: int  # bytes of the mapping, from 0, in which rows land: no others are entered or registered
    hbm: Exported | None = None

    def close(self) -> None:
        """Releases HBM first: a free lock of the arena proves that neither is written. Raises WorldError where the GPU
        keeps something; the locked mapping stays then."""
        if self.hbm is not None:
            self.hbm.close()
        self.mapping.close()


@dataclass(slots=True, eq=False)
class _Session:
    """One arena; `reached` is None while it is being mapped."""

    components: tuple[Component, ...]
    reach: Reach
    reached: _WritableArena | None = None
    pairings: tuple[Pairing, ...] = ()  # one for each component of Register
    cuts: dict[Planes, Pairing] = field(default_factory=dict[Planes, Pairing])
    lines: dict[Planes, Lines] = field(default_factory=dict[Planes, Lines])
    pools: dict[Planes, tuple[Pool, Pool]] = field(default_factory=dict[Planes, tuple[Pool, Pool]])
    writes: int = 0  # that were not reported yet
    unknown: bool = False  # whether one of its writes has ended so
    leaving: bool = False
    bytes_ready: int = 0  # of the mapping
    bytes_backed: int = 0  # by the arena's owner, when last looked
    fd: int = -1  # of the arena, until all of it is ready
    growing: bool = False  # a thread is entering more of it in the page table

    @property
    def arena_ready(self) -> int:
        """How many of the arena's first bytes may be granted: all, once those in which rows land are ready."""
        assert self.reached is not None
        return self.reach.arena_bytes if self.bytes_ready == self.reached.needed else self.bytes_ready

    def close_fd(self) -> None:
        """Closes the descriptor; the mapping keeps the lock."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def pairing(self, component: int, layers: tuple[int, int]) -> Pairing:
        """The component's planes of these layers, neighbours fused."""
        if (cut := self.cuts.get((component, layers))) is None:
            cut = self.cuts[component, layers] = self.pairings[component].within_layers(*layers).fused()
        return cut


@dataclass(frozen=True, slots=True)
class _Attached:
    """An arena that was received and mapped; `fd` is open until all of it is ready."""

    reached: _WritableArena
    components: tuple[Component, ...]  # where this writer writes them
    pairings: tuple[Pairing, ...]
    fd: int
    bytes_ready: int
    bytes_backed: int

    def close(self) -> None:
        _unmap(self.reached)
        os.close(self.fd)


class ShmWriter:
    """A WriterTransport. Make it on the loop's thread.

    `components` are the pool's own, and meet a session's components by name. With a `gpu` their addresses are the
    GPU's, and it writes: a mapped arena is registered with it, and is ready only then.
    """

    def __init__(
        self,
        components: tuple[Component, ...],
        options: WriterOptions,
        wrote: Wrote,
        *,
        gpu: WriterGpu | None = None,
        uids: frozenset[int] | None = None,
        wake_hint: WakeHint = lambda _: None,
    ) -> None:
        self._components, self._wrote = {component.name: component for component in components}, wrote
        self._pool_address, self._uids, self._keep_line = options.pool_address, uids, options.network.keep_line
        self._loop = asyncio.get_running_loop()
        self._reports: LoopMailbox[CopyWork[Write] | GpuWrite] = LoopMailbox(self._ended)
        self._gpu = gpu
        self._hints: LoopMailbox[GpuWrite] = LoopMailbox(self._report_hint)
        self._wake_hint = wake_hint
        self._gpu_writer = (
            None if gpu is None else GpuWriter(gpu.launcher, self._reports.post, gpu.spans, self._hints.post)
        )
        self._copier: Copier[Write] = Copier(0 if gpu else options.copy_threads, self._reports.post)
        self._apart = ThreadPoolExecutor(_MAP_THREADS, thread_name_prefix="pdtransfer-map")
        self._sessions: dict[int, _Session] = {}
        self._jobs: dict[tuple[int, int], set[CopyWork[Write] | GpuWrite]] = {}  # by session and grant
        self._inline_bytes = 0  # copied in this turn of the loop
        self._small: deque[CopyWork[Write]] = deque()  # writes for the next turns of the loop
        self._closing = False
        self._unmapped = asyncio.Event()

    async def map(
        self,
        session: int,
        reach: Reach,
        components: tuple[Component, ...],
        more: Ready = lambda _: None,
        *,
        landing: tuple[Component, ...] | None = None,
    ) -> int:
        """As WriterTransport. What is ready is in our page table, and was backed by the arena's owner."""
        assert session not in self._sessions, f"session {session:#x} is mapped already"
        if self._closing:
            raise TransportError("this writer is closing")
        mapped = self._sessions[session] = _Session(components, reach)
        try:
            fd = await receive(reach, session, seconds=_HANDOVER_SECONDS, uids=self._uids, keep_line=self._keep_line)
            attached = self._apart.submit(self._attach, fd, reach, components, landing or components)
            try:
                made = await asyncio.shield(asyncio.wrap_future(attached))
            except asyncio.CancelledError:
                attached.add_done_callback(_discard)
                raise
            if mapped.leaving:
                in_pool(self._apart, made.close)
                raise TransportError("the session was unmapped while its arena was being mapped")
        except OSError as error:  # out of descriptors, most likely
            self._forget(session)
            raise TransportError(f"session {session:#x} cannot be mapped: {error}") from None
        except BaseException:
            self._forget(session)
            raise
        mapped.reached, mapped.pairings, mapped.fd = made.reached, made.pairings, made.fd
        mapped.components = made.components
        mapped.bytes_ready, mapped.bytes_backed = made.bytes_ready, made.bytes_backed
        self._follow_later(session, mapped, more, mapped.bytes_ready)
        return mapped.arena_ready

    def _follow_later(self, session: int, mapped: _Session, more: Ready, entered: int) -> None:
        """Schedules the next piece, unless all is ready or the session is being unmapped.

        It comes at once after a whole piece: a partial one means that the arena's owner has backed no more yet."""
        assert mapped.reached is not None
        if mapped.bytes_ready == mapped.reached.needed:
            mapped.close_fd()
        elif not mapped.leaving:
            wait_s = _FOLLOW_SECONDS if entered < _ENTER_BYTES else 0.0
            self._loop.call_later(wait_s, self._follow, session, mapped, more)

    def _follow(self, session: int, mapped: _Session, more: Ready) -> None:
        if mapped.leaving or mapped.reached is None:
            return
        mapped.growing = True
        grown = self._apart.submit(self._enter, mapped.reached, mapped.fd, mapped.bytes_ready, mapped.bytes_backed)
        grown.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._grown, session, mapped, more, done))

    def _grown(self, session: int, mapped: _Session, more: Ready, done: Future[tuple[int, int]]) -> None:
        mapped.growing = False
        if (error := done.exception()) is not None:
            log.error("session %#x: only %d bytes of its arena can be used: %s", session, mapped.bytes_ready, error)
        elif not mapped.leaving:
            before, (mapped.bytes_ready, mapped.bytes_backed) = mapped.bytes_ready, done.result()
            if mapped.bytes_ready > before:
                more(mapped.arena_ready)
            self._follow_later(session, mapped, more, mapped.bytes_ready - before)
        self._leave(session, mapped)

    def _attach(
        self, fd: int, reach: Reach, components: tuple[Component, ...], landing: tuple[Component, ...]
    ) -> _Attached:
        """In a worker thread. The mapping keeps the lock that came with `fd`."""
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            mapping = map_received(fd, reach.arena_bytes)
            undo.callback(mapping.close)
            prepare_copies(self._gpu)
            hbm = self._opened(reach) if any(each.memory == "hbm" for each in components) else None
            if hbm is not None:
                undo.callback(hbm.close)
            components = landing if hbm is None else components
            hbm_end = None if hbm is None else reach.hbm_base + reach.hbm_bytes
            pairings = paired(self._components, components, reach.arena_bytes, hbm_end=hbm_end)
            ends = [each.layout.end for each in components if each.memory != "hbm"]
            reached = _WritableArena(mapping, mapping.byte_count if hbm is None else max(ends, default=0), hbm)
            ready, backed = self._enter(reached, fd, 0, 0)
            undo.pop_all()
        return _Attached(reached, components, pairings, fd, ready, backed)

    def _opened(self, reach: Reach) -> Exported | None:
        """In a worker thread, under the arena's lock: the memory of HBM components. None where our GPU does not reach
        it: then their rows land in the staging buffer, and decode copies them up."""
        if self._gpu is None or not reach.hbm_handle:
            return None
        try:
            hbm = self._gpu.open(reach.hbm_handle)
        except (TransportError, WorldError) as error:
            log.info("rows of HBM components land in the staging buffer at %s: %s", reach.address, error)
            return None
        if hbm.byte_count < reach.hbm_bytes:
            hbm.close()
            text = f"HBM components: {hbm.byte_count} bytes were opened, {reach.hbm_bytes} were announced"
            raise TransportError(text)
        return hbm

    def hbm_direct(self, session: int) -> bool:
        """As WriterTransport."""
        mapped = self._sessions.get(session)
        return mapped is not None and mapped.reached is not None and mapped.reached.hbm is not None

    def _enter(self, reached: _WritableArena, fd: int, first: int, backed: int) -> tuple[int, int]:
        """In a worker thread: enters one more piece; returns how much is ready then, and how much its owner backs."""
        mapping, needed = reached.mapping, reached.needed
        entered, backed = enter_backed(mapping, fd, first, _ENTER_BYTES, backed, end=needed)
        if self._gpu is None or not needed:  # without rows to land it is mapped for its lock alone
            return entered, backed
        return mapping.register(self._gpu, entered, rest=entered == needed), backed

    def unmap(self, session: int) -> None:
        """Drops the mapping, and with it the lock, once the session's writes have been reported; idempotent."""
        if (mapped := self._sessions.get(session)) is not None:
            mapped.leaving = True
            self._leave(session, mapped)

    def _leave(self, session: int, mapped: _Session) -> None:
        quiet = not mapped.writes and not mapped.growing
        if mapped.leaving and mapped.reached is not None and quiet and self._sessions.get(session) is mapped:
            mapped.close_fd()
            if mapped.unknown:
                _lost.append(mapped.reached)
            else:
                in_pool(self._apart, partial(_unmap, mapped.reached))  # it takes long for a large one
            self._forget(session)

    def _forget(self, session: int) -> None:
        del self._sessions[session]
        if not self._sessions:
            self._unmapped.set()

    def waits(self, gate: ReadyGate) -> bool:
        """A GPU waits for its own events."""
        return self._gpu_writer is not None and gate.next is not None

    def write(self, order: Write) -> None:
        """Copies a small write on the loop, in this turn or a later one, and a larger one in copy threads, in turn with
        those of other grants."""
        mapped = self._sessions.get(order.session)
        if mapped is None or mapped.reached is None or mapped.leaving:
            self._loop.call_soon(self._wrote, order, Outcome.FAILED, f"session {order.session:#x} is not mapped", 0)
            return
        mapped.writes += 1
        if self._gpu_writer is not None:
            write = self._gpu_write(mapped, mapped.reached, order)
            self._jobs.setdefault(write.turn, set()).add(write)
            self._gpu_writer.add(write)
            return
        job = copy_job(
            order,
            mapped.pairing(order.component, order.layers),
            source_address=self._pool_address,
            target_address=mapped.reached.mapping.address,
            lines=lines_for(order, self._components, mapped.components, mapped.lines) if order.verify else None,
        )
        self._jobs.setdefault(job.turn, set()).add(job)
        if job.byte_count > _INLINE_BYTES_MAX:
            self._copier.add(job)
        elif self._has_turn(job):
            self._carry(job)
        else:
            self._small.append(job)

    def _gpu_write(self, mapped: _Session, reached: _WritableArena, order: Write) -> GpuWrite:
        key = order.component, order.layers
        if (pools := mapped.pools.get(key)) is None:
            assert self._gpu is not None
            theirs = mapped.components[order.component]
            target = theirs.layout.layers(*order.layers)
            source = facing(self._components[theirs.name].layout, target)
            card, host = self._gpu.ordinal, theirs.memory != "hbm" or reached.hbm is None
            if host:
                assert reached.mapping.registered is not None
                there = reached.mapping.registered.device_address
            else:
                assert reached.hbm is not None
                there = reached.hbm.address - mapped.reach.hbm_base
            pools = mapped.pools[key] = (
                Pool(layout=source, address=self._pool_address, card=card),
                Pool(layout=target, address=there, card=card, host=host),
            )
        source, target = pools
        staged = Staged.of(mapped.components[order.component].name, source) if order.verify else None
        return GpuWrite(order=order, source=source, target=target, staged=staged)

    def _has_turn(self, job: CopyWork[Write]) -> bool:
        return self._inline_bytes + job.byte_count <= _INLINE_BYTES_TURN

    def _carry(self, job: CopyWork[Write]) -> None:
        if not self._inline_bytes:
            self._loop.call_soon(self._next_turn)
        self._inline_bytes += job.byte_count
        job.carry()
        self._reports.post(job)

    def _next_turn(self) -> None:
        self._inline_bytes = 0
        while self._small and self._has_turn(self._small[0]):
            self._carry(self._small.popleft())

    def _ended(self, job: CopyWork[Write] | GpuWrite) -> None:
        """On the loop."""
        jobs = self._jobs[job.turn]
        jobs.remove(job)
        if not jobs:
            del self._jobs[job.turn]
        mapped = self._sessions[job.order.session]
        mapped.writes -= 1
        mapped.unknown |= job.outcome is Outcome.UNKNOWN
        try:
            self._wrote(job.order, job.outcome, job.text, job.checksum)
        finally:
            self._leave(job.order.session, mapped)

    def _report_hint(self, write: GpuWrite) -> None:
        """On the loop; the write may have ended meanwhile."""
        if write in self._jobs.get(write.turn, ()):
            self._wake_hint(write.order)

    def cancel(self, session: int, grant: int) -> None:
        """Stops this grant's writes at their next rows. Each still reports: FAILED, unless it had ended."""
        for job in self._jobs.get((session, grant), ()):
            job.stop()

    async def fence(self, session: int) -> bool:  # noqa: ARG002 (of any session)
        """Returns False: this process is the only writer, so an unknown outcome stays unknown until it has ended."""
        return False

    async def close(self) -> None:
        """Waits for what is in flight, unmaps everything, joins every thread."""
        self._closing = True
        self._unmapped.clear()
        for session in list(self._sessions):
            self.unmap(session)
        if self._sessions:
            await self._unmapped.wait()
        await in_thread(self._join)

    def _join(self) -> None:
        if self._gpu_writer is not None:
            self._gpu_writer.close()
        self._copier.close()
        self._apart.shutdown()


def _unmap(reached: _WritableArena) -> None:
    """In a worker thread. Memory that the GPU does not release stays mapped, and its lock stays locked."""
    try:
        reached.close()
    except WorldError as error:
        log.critical("an arena stays mapped until this process ends: %s", error)
        _lost.append(reached)


def _discard(attached: Future[_Attached]) -> None:
    """In the worker thread: closes a mapping that no caller waits for any more."""
    if attached.exception() is None:
        attached.result().close()
