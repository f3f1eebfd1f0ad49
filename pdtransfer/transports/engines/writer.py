"""Prefill's side of engines: this process gathers rows into a session's ring, and the session's process sends them.

Where a write's outcome is unknown, its process may still send from the ring, which is dropped with it. The process may
also read a pool in a memfd: then a write has ended only once its outcome is known, or the process is dead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ...errors import TransportError, WorldError
from ...handoff.effects import Map, Outcome, Write
from ...handoff.slot_allocator import Extents
from ...layout.checksum import Lines
from ...layout.layout import Component
from ...layout.pairing import Pairing
from ...memory.cuda_ipc import Handle
from ...wire import Reach
from ..base import Ready, Wrote
from ..component_match import Planes, lines_for, paired
from ..copier import CANCELLED, attempt
from ..gpu_launcher import WriterGpu
from ..options import WriterOptions
from ..turns import Turns
from ..works import Work
from . import child
from .card_use import CardMemory, CardUse
from .gather import CopyGatherer, Gather, Gatherer, LaunchGatherer, RingJob
from .library import Library
from .process import EngineProcess, Sending
from .ring import Cut, SendRing
from .settings import engines_left, hbm_address

_PORTS = re.compile(r"([1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*)?")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}:[1-9][0-9]{0,4}")
_SHARE = 2  # slots that a grant may hold for each free one: a grant alone takes two thirds of them
_STALL_SECONDS = 10.0  # without a reply: the engine's own timeouts are 3 to 5 s
_LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)

_lost: list[SendRing] = []  # a GPU may write these as long as this process lives


@dataclass(slots=True, eq=False, kw_only=True)
class EngineSession:
    """One arena, and the process that writes there."""

    id: int
    reach: Reach
    components: tuple[Component, ...]
    pairings: tuple[Pairing, ...]
    ring: SendRing
    gatherer: Gatherer
    process: EngineProcess | None = None
    cuts: dict[Planes, Cut] = field(default_factory=dict[Planes, Cut])
    lines: dict[Planes, Lines] = field(default_factory=dict[Planes, Lines])
    turns: Turns[RingJob] = field(default_factory=Turns[RingJob])  # by grant, those that are not exhausted
    jobs: dict[int, set[RingJob]] = field(default_factory=dict[int, set[RingJob]])  # not yet reported, by grant
    hbm: int = 0  # the address there of offset 0 of HBM components; 0: their rows land in the arena
    straight: bool = False  # its process can read the pool
    held: dict[int, int] = field(default_factory=dict[int, int])  # slots, by grant
    batches: dict[int, RingJob] = field(default_factory=dict[int, RingJob])  # those under way, by slot
    up: bool = False  # its process was ready
    busy: int = 0  # slots that are being filled, and threads that prepare or close the ring
    dropped: bool = False  # the ring
    lost: bool = False  # a GPU may still write the ring
    last_reply: float = 0.0  # when the process replied last, or got the first batch
    watch: asyncio.TimerHandle | None = None
    broken: str = ""  # why nothing more is sent, and the outcomes of what was sent are unknown
    leaving: bool = False
    quiet: asyncio.Event = field(default_factory=asyncio.Event)  # its process is dead, and its ring dropped

    @property
    def gone(self) -> bool:
        """True if neither its process nor a thread uses its ring any more."""
        return (self.process is None or self.process.dead) and not self.busy

    @property
    def known(self) -> bool:
        """True if the outcome of each write will be known, or at least the moment when the pool is read no more."""
        return not self.broken or (self.straight and self.process is not None and not self.process.dead)

    def cut(self, component: int, layers: tuple[int, int]) -> Cut:
        """The component's planes of these layers, as they pass through the ring."""
        if (found := self.cuts.get((component, layers))) is None:
            pairing = self.pairings[component].within_layers(*layers).fused()
            found = self.cuts[component, layers] = self.gatherer.cut(pairing)
        return found

    def base(self, component: int) -> int:
        """The address there of offset 0 of a component."""
        return self.hbm if self.hbm and self.components[component].memory == "hbm" else self.reach.base

    def may_take(self, job: RingJob) -> bool:
        """True if the job's grant may hold one more slot."""
        held = self.held.get(job.order.grant, 0)
        return not held or held < _SHARE * len(self.ring.free)

    def release(self, slot: int, grant: int) -> None:
        """Frees a slot."""
        self.ring.free.append(slot)
        self.held[grant] -= 1
        if not self.held[grant]:
            del self.held[grant]


class EngineWriter:
    """A WriterTransport. Make it on the loop's thread.

    `components` are the pool's own. The pool lies in this process's memory, or in that of `gpu`, and stays until after
    close. `lost` is called for a session whose process has died by itself: it writes no more, and is to be fenced.
    """

    sleeps_on_cuda = False  # a slot of the ring must not wait for a gate

    def __init__(
        self,
        library: Library,
        components: tuple[Component, ...],
        options: WriterOptions,
        wrote: Wrote,
        *,
        gpu: WriterGpu | None = None,
        lost: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._library, self._components = library, {component.name: component for component in components}
        self._network, self._wrote, self._lost = options.network, wrote, lost
        self._loop = asyncio.get_running_loop()
        self._pool_fd = options.pool_fd if library.reads_pool(self._network) else -1
        self._gatherer: Gatherer = (
            CopyGatherer(options.pool_address, options.copy_threads, self._gathered)
            if gpu is None
            else LaunchGatherer(gpu, options.pool_address, self._components, self._gathered)
        )
        self._pool_address, self._gpu = options.pool_address, gpu
        what = "rows leave from a ring in host memory"
        self._card = CardUse(library, options.network, self._pool_handle, what=what)
        self._sessions: dict[int, EngineSession] = {}
        self._ending: set[EngineSession] = set()  # unmapped, but not gone
        self._closing = False

    async def map(self, order: Map, more: Ready = lambda _: None) -> int:  # noqa: ARG002
        """As WriterTransport. All is ready at once, since decode grants only what it has backed."""
        session, reach = order.session, order.reach
        assert session not in self._sessions, f"session {session:#x} is mapped already"
        targets, hbm = targets_of(reach), hbm_address(reach)
        components = order.components if hbm else order.landing
        pairings = paired(self._components, components, reach, hbm_direct=bool(hbm))
        if self._closing:
            raise TransportError("this writer is closing")
        mapped = self._sessions[session] = EngineSession(
            id=session, reach=reach, components=components, pairings=pairings, ring=SendRing(), gatherer=self._gatherer,
            hbm=hbm, straight=self._pool_fd >= 0,
        )  # fmt: skip
        try:
            handle = await self._card.handle()
            _check_wanted(mapped)
            sessions = (*self._sessions.values(), *self._ending)
            taken = sum(each.process.engines for each in sessions if each.process is not None)
            engines = engines_left(self._network, taken=taken)
            card = None if handle is None else CardMemory(handle=handle, place=self._first_byte - self._pool_address)
            pool_bytes = os.fstat(self._pool_fd).st_size if mapped.straight else 0
            process = mapped.process = EngineProcess(
                self._library, self._network, host="127.0.0.1",
                memory=mapped.ring.fd, byte_count=mapped.ring.byte_count,
                sending=Sending(
                    targets=targets[:engines], base=reach.base, pool=self._pool_fd, pool_bytes=pool_bytes
                ),
                card=card, session=session, received=lambda packet: self._on_replies(mapped, packet),
                died=lambda: self._died(mapped),
            )  # fmt: skip
            await process.ready()  # it has met the peer's engines: a ring takes memory only from now on
            if card is not None:
                mapped.straight = bool(process.card_address)
                if not mapped.straight:
                    self._card.report(process.why_no_card)
            _check_wanted(mapped)
            await asyncio.shield(self._apart(mapped, self._gatherer.prepare, mapped.ring))
            _check_wanted(mapped)
            mapped.up = True
        except TransportError as error:
            self._leave(mapped)
            raise TransportError(f"{reach.host}: {error}") from None
        except BaseException:
            self._leave(mapped)
            raise
        return reach.arena_bytes

    def hbm_direct(self, session: int) -> bool:
        """As WriterTransport. Where decode's engines do not reach its GPU, all rows land in the arena."""
        return (mapped := self._sessions.get(session)) is not None and bool(mapped.hbm)

    @property
    def _first_byte(self) -> int:
        """The address of the pool's first byte."""
        layouts = [component.layout for component in self._components.values()]
        return self._pool_address + min(int(layout.table[:, 3].min()) for layout in layouts)

    def _pool_handle(self) -> Handle | None:
        """The pool in a GPU's memory, for engines that send from it."""
        if self._gpu is None or not self._library.reads_pool(self._network):
            return None
        end = self._pool_address + max(component.layout.end for component in self._components.values())
        return self._gpu.export(self._first_byte, end - self._first_byte)

    def unmap(self, session: int) -> None:
        """Ends the session's process once its writes have been reported; idempotent."""
        if (mapped := self._sessions.get(session)) is not None:
            mapped.leaving = True
            if not mapped.jobs:
                self._leave(mapped)

    def _leave(self, mapped: EngineSession) -> None:
        if self._sessions.get(mapped.id) is mapped:
            del self._sessions[mapped.id]
            self._ending.add(mapped)
        if mapped.watch is not None:
            mapped.watch.cancel()
        if mapped.process is not None:
            mapped.process.kill()
        self._drop(mapped)

    def _drop(self, mapped: EngineSession) -> None:
        if mapped not in self._ending or not mapped.gone:
            return
        if not mapped.dropped:
            mapped.dropped = True
            if not mapped.lost:
                self._apart(mapped, _close, mapped.ring)
                return
            _lost.append(mapped.ring)
        self._ending.remove(mapped)
        mapped.quiet.set()

    def _apart(self, mapped: EngineSession, step: Callable[[SendRing], None], ring: SendRing) -> asyncio.Future[None]:
        """Runs a step on a session's ring in a thread; the ring stays until the step has ended."""

        def done(step: asyncio.Future[None]) -> None:
            mapped.busy -= 1
            step.exception()  # retrieved: perhaps no caller waits
            self._drop(mapped)

        mapped.busy += 1
        future = self._loop.run_in_executor(None, step, ring)
        future.add_done_callback(done)
        return future

    def expect_rows(self, session: int, component: int, extents: Extents) -> None:
        """As WriterTransport: there is nothing that a write would wait for."""

    def write(self, order: Write) -> None:
        """Gathers it piece by piece, in turn with other grants, as slots of the ring come free."""
        mapped = self._sessions.get(order.session)
        if mapped is None or mapped.leaving or mapped.broken:
            text = f"session {order.session:#x} is not mapped" if mapped is None or mapped.leaving else mapped.broken
            self._loop.call_soon(self._wrote, order, Outcome.FAILED, text, 0)
            return
        job, text = attempt(lambda: self._job(mapped, order))
        if job is None:
            self._loop.call_soon(self._wrote, order, Outcome.FAILED, text, 0)
            return
        mapped.jobs.setdefault(order.grant, set()).add(job)
        mapped.turns.add(order.grant, job)
        self._advance(mapped)

    def _job(self, mapped: EngineSession, order: Write) -> RingJob:
        cut = mapped.cut(order.component, order.layers)
        # For a checksum this process has to read the rows, so it gathers them as well.
        straight = mapped.straight and not order.verify and cut.long(order.source_slots, order.target_slots)
        lines = lines_for(order, self._components, mapped.components, mapped.lines) if order.verify else None
        theirs = mapped.components[order.component]
        return RingJob(
            turn=(order.session, order.grant),
            report=lambda job: self._wrote(order, job.outcome, job.text, job.checksum),
            order=order, cut=cut, straight=straight, theirs=theirs, lines=lines,
        )  # fmt: skip

    def _advance(self, mapped: EngineSession) -> None:
        """Gives the free slots of the ring to grants, in turn."""
        ring = mapped.ring
        while ring.free and (queue := mapped.turns.take(mapped.may_take)) is not None:
            job = queue.items[0]
            mapped.turns.put_back(queue)
            _, text = attempt(partial(self._gather, mapped, job))
            if text:
                self._fail(mapped, job, text)
                self._loop.call_soon(self._settle, mapped, job)

    def _gather(self, mapped: EngineSession, job: RingJob) -> None:
        """Gathers its next piece into the last free slot. What this raises leaves the slot free."""
        piece, free, grant = next(job.pieces), mapped.ring.free, job.order.grant
        gather = Gather(job=job, piece=piece, slot=free[-1], ring=mapped.ring)
        job.gathering[self._gatherer.add(gather)] = gather
        free.pop()
        mapped.held[grant] = mapped.held.get(grant, 0) + 1
        mapped.busy += 1
        if job.cut.last(piece, len(job.order.source_slots)):
            self._exhaust(mapped, job)

    def _exhaust(self, mapped: EngineSession, job: RingJob) -> None:
        """Ends the turns of a job whose pieces are all taken, or that is to end."""
        job.exhausted = True
        mapped.turns.remove(job.order.grant, job)

    def _fail(self, mapped: EngineSession, job: RingJob, text: str, outcome: Outcome = Outcome.FAILED) -> None:
        """Gathers no more of it."""
        job.fail(text, outcome)
        self._exhaust(mapped, job)
        job.stop()

    def _gathered(self, job: RingJob, work: Work) -> None:
        """On the loop: a slot is full, or will never be."""
        gather, mapped = job.gathering.pop(work), self._sessions[job.order.session]
        mapped.busy -= 1
        if work.outcome is not Outcome.LANDED:
            self._fail(mapped, job, work.text, work.outcome)
        if work.outcome is Outcome.UNKNOWN:
            mapped.lost = True
        elif job.outcome is not Outcome.LANDED or mapped.broken:
            mapped.release(gather.slot, job.order.grant)
        else:
            job.add(work.checksum)
            self._send(mapped, job, gather)
        self._advance(mapped)
        self._settle(mapped, job)

    def _send(self, mapped: EngineSession, job: RingJob, gather: Gather) -> None:
        assert mapped.process is not None
        base = mapped.base(job.order.component)
        written, text = attempt(lambda: mapped.ring.write_table(gather.slot, gather.runs, base, straight=job.straight))
        if written is None:
            mapped.release(gather.slot, job.order.grant)
            self._fail(mapped, job, text)
            return
        table, count = written
        if not mapped.batches:
            mapped.last_reply = self._loop.time()
            if mapped.watch is None:
                mapped.watch = self._loop.call_later(_LOOK_SECONDS, self._watch, mapped)
        job.sent.add(gather.slot)
        mapped.batches[gather.slot] = job
        mapped.process.send(child.ORDER.pack(child.PUT, gather.slot, count, table, job.order.grant))

    def _on_replies(self, mapped: EngineSession, packet: bytes) -> None:
        mapped.last_reply = self._loop.time()
        whole = len(packet) % child.REPLY.size == 0
        for kind, slot in child.REPLY.iter_unpack(packet) if whole else [(child.UNKNOWN, 0)]:
            job = mapped.batches.pop(slot, None) if kind in (child.DONE, child.CANCELLED) else None
            if job is None:  # the process does not know the outcome, or replies to no order
                words = mapped.process.last_log() if mapped.process is not None else ""
                self._break(mapped, f"a write to {mapped.reach.host} has failed{words}")
                return
            job.sent.remove(slot)
            mapped.release(slot, job.order.grant)
            if kind == child.CANCELLED:
                self._fail(mapped, job, CANCELLED)
            self._settle(mapped, job)
        self._advance(mapped)

    def _watch(self, mapped: EngineSession) -> None:
        """Gives up on an engine that does not reply, because it is stopped or in a deadlock."""
        mapped.watch = None
        if mapped.process is None or mapped.broken or not mapped.batches:
            return
        mapped.process.read()  # perhaps it was this process that did not run
        if mapped.batches and not mapped.broken:
            silent = self._loop.time() - mapped.last_reply
            if silent >= _STALL_SECONDS:
                self._break(mapped, f"the engine that writes to {mapped.reach.host} has not replied for {silent:.0f} s")
            else:
                mapped.watch = self._loop.call_later(_LOOK_SECONDS, self._watch, mapped)

    def _died(self, mapped: EngineSession) -> None:
        if self._sessions.get(mapped.id) is mapped:
            self._break(mapped, f"the engine that writes to {mapped.reach.host} has ended")
            if mapped.up and not mapped.leaving:
                self._lost(mapped.id)
        for job in [job for jobs in mapped.jobs.values() for job in jobs]:
            self._settle(mapped, job)  # what waited for this
        self._drop(mapped)

    def _break(self, mapped: EngineSession, text: str) -> None:
        """Ends every write of a session that cannot report outcomes any more, those that were sent as unknown."""
        if mapped.broken:
            return
        mapped.broken = text
        if mapped.process is not None:
            mapped.process.kill()
        for job in [job for jobs in mapped.jobs.values() for job in jobs]:
            self._fail(mapped, job, text)
            self._settle(mapped, job)

    def _settle(self, mapped: EngineSession, job: RingJob) -> None:
        """Reports a job that has ended."""
        grant = job.order.grant
        jobs = mapped.jobs.get(grant, set[RingJob]())
        if job not in jobs or not job.over(known=mapped.known):
            return
        jobs.remove(job)
        if not jobs:
            del mapped.jobs[grant]
        if job.sent:
            job.fail(mapped.broken, Outcome.UNKNOWN)
        try:
            job.report(job)
        finally:
            if mapped.leaving and not mapped.jobs:
                self._leave(mapped)

    def cancel(self, session: int, grant: int) -> None:
        """Gathers and sends no more of this grant. Each of its writes reports once nothing of it is in flight."""
        mapped = self._sessions.get(session)
        if mapped is None or mapped.process is None:
            return
        for job in list(mapped.jobs.get(grant, ())):
            if not job.exhausted or job.gathering:
                self._fail(mapped, job, CANCELLED)
            self._loop.call_soon(self._settle, mapped, job)
        if grant in mapped.jobs:
            mapped.process.send(child.ORDER.pack(child.CANCEL, 0, 0, 0, grant))

    async def fence(self, session: int) -> bool:
        """Ends the session's process, and returns once it is dead and its ring dropped. Then nothing of it is sent or
        read any more: True, unless its GPU was lost. Bytes that were sent before may lie in decode's sockets, until
        decode's fence."""
        ending = [each for each in self._ending if each.id == session]
        if (mapped := self._sessions.get(session)) is not None:
            ending.append(mapped)
            self._break(mapped, "its writer was fenced")
            mapped.leaving = True
            if not mapped.jobs:
                self._leave(mapped)
        for each in ending:
            await each.quiet.wait()
        return not any(each.lost for each in ending)

    async def close(self) -> None:
        """Waits for what is in flight, ends every process, joins the threads."""
        self._closing = True
        for session in list(self._sessions):
            self.unmap(session)
        for mapped in [*self._sessions.values(), *self._ending]:
            await mapped.quiet.wait()
        await self._gatherer.close()


def _check_wanted(mapped: EngineSession) -> None:
    if mapped.leaving:
        raise TransportError("the session was unmapped while its arena was being mapped")
    if mapped.broken:
        raise TransportError(mapped.broken)


def _close(ring: SendRing) -> None:
    """In a worker thread. A ring that its GPU does not release stays mapped."""
    try:
        ring.close()
    except WorldError as error:
        log.critical("a send ring stays mapped until this process ends: %s", error)
        _lost.append(ring)


def targets_of(reach: Reach) -> tuple[str, ...]:
    """The engines, host:port each, that reach an arena. Raises TransportError for another form."""
    # A peer chose this text: the engine must take it for nothing but a host and a port.
    if not _HOST.fullmatch(reach.host):
        raise TransportError(f"host {reach.host!r}: must be a name or an IPv4 address, and a port")
    if not _PORTS.fullmatch(reach.address):
        raise TransportError(f"address {reach.address!r}: must be further ports of that host, comma by comma, or empty")
    host = reach.host.rpartition(":")[0]
    return reach.host, *(f"{host}:{port}" for port in reach.address.split(",") if port)
