"""Prefill's side of shared memory: maps arenas, and writes there from its own memory or a GPU's."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ...errors import PDTransferError, TransportError, WorldError
from ...handoff.effects import Map, Outcome, Write
from ...handoff.sharing import facing
from ...handoff.slot_allocator import Extents, extents_of
from ...kernels.pools import Pool
from ...layout.checksum import Lines
from ...layout.geometry import Int64s
from ...layout.layout import Component
from ...layout.pairing import Pairing
from ...memory.cuda_ipc import Opened
from ...memory.mapping import Mapping, map_received
from ...threads import in_pool, in_thread
from ...wire import Reach
from ..base import Ready, WakeHint, Wrote
from ..component_match import Planes, lines_for, paired
from ..copier import CANCELLED, Copier, CopyWork, attempt, copy_job
from ..gpu_launcher import WriterGpu, prepare_copies
from ..gpu_writer import GpuWrite, GpuWriter, Staged
from ..options import WriterOptions
from ..works import Tasks, Work
from .entering import EnteredArena, parts_of
from .handover import receive

_HANDOVER_SECONDS = 5.0
_MAP_THREADS = 4
_FOLLOW_SECONDS = 0.05  # the arena's owner backs some 100 MiB meanwhile
_Result = TypeVar("_Result")

log = logging.getLogger(__name__)


_lost: list[_WritableArena] = []  # they stay mapped and locked: a GPU may write them as long as this process lives


@dataclass(slots=True, eq=False)
class _WritableArena:
    """What a writer may write of one decode rank: the arena, and the memory of HBM components if a GPU reaches it."""

    components: tuple[Component, ...]  # those of Register, where this writer writes them
    pairings: tuple[Pairing, ...]  # one for each of them
    mapping: Mapping  # it keeps the lock that came with the arena's descriptor
    entered: EnteredArena
    hbm: Opened | None

    def awaits(self, component: int) -> bool:
        """True if rows of this component may land in bytes that are not entered yet."""
        return not self.entered.whole and (self.hbm is None or self.components[component].memory != "hbm")

    def close(self) -> None:
        """In a worker thread. Releases HBM first: a free lock of the arena proves that neither is written. What the GPU
        does not release stays mapped, and its lock stays locked."""
        self.entered.close_fd()
        try:
            if self.hbm is not None:
                self.hbm.close()
            self.mapping.close()
        except WorldError as error:
            log.critical("an arena stays mapped until this process ends: %s", error)
            _lost.append(self)


@dataclass(slots=True, eq=False)
class _Session:
    """One session of the writer; `arena` is None while it is being mapped."""

    reach: Reach
    arena: _WritableArena | None = None
    cuts: dict[Planes, Pairing] = field(default_factory=dict[Planes, Pairing])
    lines: dict[Planes, Lines] = field(default_factory=dict[Planes, Lines])
    pools: dict[Planes, tuple[Pool, Pool]] = field(default_factory=dict[Planes, tuple[Pool, Pool]])
    writes: int = 0  # that were not reported yet
    held: dict[int, Write] = field(default_factory=dict[int, Write])  # those whose slots are being entered
    unknown: bool = False  # whether one of its writes has ended so
    leaving: bool = False
    entering: int = 0  # how many threads enter bytes of the arena, or are about to

    def grantable(self, arena: _WritableArena) -> int:
        """How many of the arena's first bytes may be granted: all, once those in which rows land are backed."""
        return self.reach.arena_bytes if arena.entered.is_ready else arena.entered.bytes_ready

    def pairing(self, arena: _WritableArena, component: int, layers: tuple[int, int]) -> Pairing:
        """The component's planes of these layers, neighbours fused."""
        if (cut := self.cuts.get((component, layers))) is None:
            cut = self.cuts[component, layers] = arena.pairings[component].within_layers(*layers).fused()
        return cut


class ShmWriter:
    """A WriterTransport. Make it on the loop's thread.

    `components` are the pool's own, and meet a session's components by name. With a `gpu` their addresses are the
    GPU's, and it writes: what it writes of an arena is registered with it. An arena is ready as far as its owner has
    backed it. A write waits until its slots are entered, which they are ahead of the rest.
    """

    def __init__(
        self,
        components: tuple[Component, ...],
        options: WriterOptions,
        wrote: Wrote,
        *,
        gpu: WriterGpu | None = None,
        wake_hint: WakeHint = lambda _: None,
    ) -> None:
        self._components, self._wrote = {component.name: component for component in components}, wrote
        self._pool_address, self._keep_line = options.pool_address, options.network.keep_line
        self._loop = asyncio.get_running_loop()
        self._gpu, self.sleeps_on_cuda = gpu, gpu is not None
        self._writer = Copier(options.copy_threads) if gpu is None else GpuWriter(gpu.launcher, gpu.spans, wake_hint)
        self._apart = ThreadPoolExecutor(_MAP_THREADS, thread_name_prefix="pdtransfer-map")
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="pdtransfer-enter")  # for rows that are granted
        self._due = ThreadPoolExecutor(_MAP_THREADS, thread_name_prefix="pdtransfer-due")  # for rows that are computed
        self._tasks = Tasks()
        self._sessions: dict[int, _Session] = {}
        self._closing = False
        self._unmapped = asyncio.Event()

    async def map(self, order: Map, more: Ready = lambda _: None) -> int:
        """As WriterTransport. What is ready was backed by the arena's owner."""
        session, reach = order.session, order.reach
        if session in self._sessions:  # its peer may have gone and come again while its arena is still being entered
            raise TransportError(f"session {session:#x} is mapped already")
        if self._closing:
            raise TransportError("this writer is closing")
        mapped = self._sessions[session] = _Session(reach)
        try:
            fd = await receive(reach, session, seconds=_HANDOVER_SECONDS, keep_line=self._keep_line)
            attached = self._apart.submit(self._attach, fd, order)
            try:
                arena = await asyncio.shield(asyncio.wrap_future(attached))
            except asyncio.CancelledError:
                attached.add_done_callback(_discard)
                raise
            if mapped.leaving:
                in_pool(self._apart, arena.close)
                raise TransportError("the session was unmapped while its arena was being mapped")
        except OSError as error:  # out of descriptors, most likely
            self._forget(session)
            raise TransportError(f"session {session:#x} cannot be mapped: {error}") from None
        except BaseException:
            self._forget(session)
            raise
        mapped.arena = arena
        ready = mapped.grantable(arena)
        self._tasks.spawn(self._follow(session, mapped, arena, ready, more))
        return ready

    async def _follow(self, session: int, mapped: _Session, arena: _WritableArena, ready: int, more: Ready) -> None:
        """Enters the rest, step by step, and reports what its owner backs meanwhile. After a step the next one comes at
        once: without one, the owner has backed no more yet. After an error it only reports; writes enter their rows."""
        ahead = True
        while not mapped.leaving:
            if mapped.grantable(arena) > ready:
                ready = mapped.grantable(arena)
                more(ready)
            if arena.entered.whole:
                arena.entered.close_fd()
                return
            if not ahead and arena.entered.is_ready:
                return
            step = arena.entered.enter_next if ahead else arena.entered.look
            try:
                if not await self._enter(session, mapped, self._apart, step):
                    await asyncio.sleep(_FOLLOW_SECONDS)
            except Exception as error:  # noqa: BLE001 (whatever it is, what is entered stays in use)
                if not ahead:
                    return
                ahead = False
                log.error("session %#x: its arena is entered no further ahead of its rows: %s", session, error)

    async def _enter(
        self, session: int, mapped: _Session, threads: ThreadPoolExecutor, call: Callable[[], _Result]
    ) -> _Result:
        """Makes a call that enters bytes of the arena, in a thread: until its end the arena stays mapped."""
        mapped.entering += 1
        try:
            return await self._loop.run_in_executor(threads, call)
        finally:
            mapped.entering -= 1
            self._leave(session, mapped)

    def _attach(self, fd: int, order: Map) -> _WritableArena:
        """In a worker thread."""
        reach, components = order.reach, order.components
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            mapping = map_received(fd, reach.arena_bytes)
            undo.callback(mapping.close)
            prepare_copies(self._gpu)
            hbm = self._opened(reach) if any(component.memory == "hbm" for component in components) else None
            if hbm is not None:
                undo.callback(hbm.close)
            components = order.landing if hbm is None else components
            pairings = paired(self._components, components, reach, hbm_direct=hbm is not None)
            ends = [component.layout.end for component in components if component.memory != "hbm"]
            needed = mapping.byte_count  # where HBM is written directly, without a staging buffer in the arena
            if hbm is not None:
                needed = min(needed, -(-max(ends, default=0) // mmap.PAGESIZE) * mmap.PAGESIZE)
            entered = EnteredArena(mapping, fd, needed, self._gpu)
            entered.enter_next()
            undo.pop_all()
        return _WritableArena(components, pairings, mapping, entered, hbm)

    def _opened(self, reach: Reach) -> Opened | None:
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
        return mapped is not None and mapped.arena is not None and mapped.arena.hbm is not None

    def unmap(self, session: int) -> None:
        """Drops the mapping, and with it the lock, once the session's writes have been reported; idempotent."""
        if (mapped := self._sessions.get(session)) is not None:
            mapped.leaving = True
            self._leave(session, mapped)

    def _leave(self, session: int, mapped: _Session) -> None:
        quiet = not mapped.writes and not mapped.entering
        if mapped.leaving and mapped.arena is not None and quiet and self._sessions.get(session) is mapped:
            if mapped.unknown:
                mapped.arena.entered.close_fd()
                _lost.append(mapped.arena)
            else:
                in_pool(self._apart, mapped.arena.close)  # it takes long for a large one
            self._forget(session)

    def _forget(self, session: int) -> None:
        del self._sessions[session]
        if not self._sessions:
            self._unmapped.set()

    def write(self, order: Write) -> None:
        """Copies a small write on the loop, in this turn or a later one, and a larger one in copy threads, in turn with
        those of other grants."""
        mapped = self._sessions.get(order.session)
        if mapped is None or mapped.arena is None or mapped.leaving:
            self._loop.call_soon(self._wrote, order, Outcome.FAILED, f"session {order.session:#x} is not mapped", 0)
            return
        mapped.writes += 1
        if mapped.arena.awaits(order.component):
            mapped.held[order.write] = order
            self._tasks.spawn(self._write_entered(mapped, mapped.arena, order))
        else:
            self._start(mapped, mapped.arena, order)

    async def _write_entered(self, mapped: _Session, arena: _WritableArena, order: Write) -> None:
        """Starts a write once its slots are entered, unless it was cancelled meanwhile."""
        text = ""
        try:
            pairing = mapped.pairing(arena, order.component, order.layers)
            await self._enter_rows(
                order.session, mapped, self._due,
                parts=lambda: parts_of(pairing, extents_of(order.target_slots)),
                wanted=lambda: order.write in mapped.held,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 (it becomes the write's outcome)
            text = str(error) or type(error).__name__
        if mapped.held.pop(order.write, None) is None:
            return
        if text:
            self._fail(order, text)
        else:
            self._start(mapped, arena, order)

    def expect_rows(self, session: int, component: int, extents: Extents) -> None:
        """As WriterTransport: enters their slots. What fails here fails their writes, with the reason."""
        mapped = self._sessions.get(session)
        if mapped is None or (arena := mapped.arena) is None or mapped.leaving or not arena.awaits(component):
            return

        async def enter() -> None:
            parts, wanted = partial(parts_of, arena.pairings[component], extents), lambda: not mapped.leaving
            with suppress(PDTransferError, RuntimeError):  # no thread starts while the interpreter exits
                await self._enter_rows(session, mapped, self._ahead, parts=parts, wanted=wanted)

        self._tasks.spawn(enter())

    async def _enter_rows(
        self,
        session: int,
        mapped: _Session,
        threads: ThreadPoolExecutor,
        *,
        parts: Callable[[], Int64s],
        wanted: Callable[[], bool],
    ) -> None:
        """Enters these parts while they are `wanted`, step by step, each behind those of others. A small room does not
        wait for all of a long prompt, of whatever session."""
        if not wanted():
            return
        assert mapped.arena is not None
        enter = partial(mapped.arena.entered.enter, urgent=threads is self._due)
        left = await self._enter(session, mapped, threads, lambda: enter(parts()))
        while len(left) and wanted():
            left = await self._enter(session, mapped, threads, partial(enter, left))

    def _start(self, mapped: _Session, arena: _WritableArena, order: Write) -> None:
        """A write that cannot be made ends as failed."""
        if isinstance(self._writer, GpuWriter):
            write, text = attempt(partial(self._gpu_write, mapped, arena, order))
            if write is not None:
                self._writer.add(write)
        else:
            job, text = attempt(partial(self._copy_job, mapped, arena, order))
            if job is not None:
                self._writer.add(job, here=True)
        if text:
            self._fail(order, text)

    def _copy_job(self, mapped: _Session, arena: _WritableArena, order: Write) -> CopyWork:
        lines = lines_for(order, self._components, arena.components, mapped.lines) if order.verify else None
        return copy_job(
            order, mapped.pairing(arena, order.component, order.layers), partial(self._ended, order), lines=lines,
            source_address=self._pool_address, target_address=arena.mapping.address,
        )  # fmt: skip

    def _gpu_write(self, mapped: _Session, arena: _WritableArena, order: Write) -> GpuWrite:
        key = order.component, order.layers
        if (pools := mapped.pools.get(key)) is None:
            assert self._gpu is not None
            theirs = arena.components[order.component]
            target = theirs.layout.layers(*order.layers)
            source = facing(self._components[theirs.name].layout, target)
            device, host = self._gpu.ordinal, theirs.memory != "hbm" or arena.hbm is None
            if host:
                assert arena.mapping.registered is not None
                target_address = arena.mapping.registered.device_address
            else:
                assert arena.hbm is not None
                target_address = arena.hbm.address - mapped.reach.hbm_base
            pools = mapped.pools[key] = (
                Pool(layout=source, address=self._pool_address, device=device),
                Pool(layout=target, address=target_address, device=device, host=host),
            )
        source, target = pools
        staged = Staged.of(arena.components[order.component].name, source) if order.verify else None
        report = partial(self._ended, order)
        apart = not target.host and arena.hbm is not None and not arena.hbm.same_gpu
        return GpuWrite(order=order, source=source, target=target, report=report, staged=staged, apart=apart)

    def _ended(self, order: Write, work: Work) -> None:
        """On the loop."""
        mapped = self._sessions[order.session]
        mapped.unknown |= work.outcome is Outcome.UNKNOWN
        mapped.writes -= 1
        try:
            self._wrote(order, work.outcome, work.text, work.checksum)
        finally:
            self._leave(order.session, mapped)

    def _fail(self, order: Write, text: str) -> None:
        """Ends a write of which nothing was begun, in a later turn of the loop."""
        work = Work(turn=(order.session, order.grant), report=partial(self._ended, order))
        work.fail(text)
        self._loop.call_soon(work.report, work)

    def cancel(self, session: int, grant: int) -> None:
        """Stops this grant's writes at their next rows. Each still reports: FAILED, unless it had ended."""
        if (mapped := self._sessions.get(session)) is not None:
            for order in [order for order in mapped.held.values() if order.grant == grant]:
                del mapped.held[order.write]
                self._fail(order, CANCELLED)
        self._writer.stop(session, grant)

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
        await self._writer.close()
        for threads in (self._apart, self._ahead, self._due):
            await in_thread(threads.shutdown)


def _discard(attached: Future[_WritableArena]) -> None:
    """In the worker thread: closes a mapping that no caller waits for any more."""
    if attached.exception() is None:
        attached.result().close()
