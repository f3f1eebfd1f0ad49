"""Prefill's side of Mooncake: rows are gathered into a session's ring here, and sent from there by its process.

What a process may still send when a write's end is unknown is the ring, which is dropped with it. A pool in a memfd may
be read by that process as well: then a write is over only once its end is known, or the process is dead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import deque
from collections.abc import Callable

from ...errors import TransportError, WorldError
from ...handoff.effects import Outcome, Write
from ...handoff.ready_gate import Gate
from ...layout.checksum import MASK
from ...layout.layout import Component
from ...wire import Reach
from ..base import Ready, WriteDone
from ..card_launcher import WriterCard
from ..component_match import lines_for, paired
from ..copier import CANCELLED
from ..loop_mailbox import Reports
from ..network import Network, engines_left
from . import child
from .card import LaunchGatherer
from .gather import CopyGatherer, Gatherer
from .jobs import Gather, Job
from .process import EngineProcess, Sending
from .ring import Ring
from .session import Session

_PORTS = re.compile(r"([1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*)?")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}:[1-9][0-9]{0,4}")
_SHARE = 2  # slots that a grant may hold for each that is free: one alone takes two thirds, and leaves some for others
_STALL_SECONDS = 10.0  # without a reply: the engine's own patience is 3 to 5 s
_LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)

_lost: list[Ring] = []  # that a card may write as long as this process lives


class MooncakeWriter:
    """A WriterTransport. Make it on the loop's thread.

    `components` are the pool's own, whose bases are offsets from `pool_address`, or addresses where that is 0; the pool
    lies in this process's memory, or in that of `card`, and stays until after close; `pool_fd` is its memfd, if it has
    one. `lost` is called with a session whose process has died by itself: it writes no more, and is to be fenced.
    """

    def __init__(
        self,
        components: tuple[Component, ...],
        network: Network,
        *,
        pool_address: int = 0,
        pool_fd: int = -1,
        copy_threads: int = 2,
        card: WriterCard | None = None,
        lost: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._components = {component.name: component for component in components}
        self._network, self._lost = network, lost
        self._loop = asyncio.get_running_loop()
        self._reports: Reports[Gather] = Reports(self._gathered)
        self._pool_fd = pool_fd if network.protocol == "tcp" else -1  # else what is read has to be registered
        self._gatherer: Gatherer = (
            CopyGatherer(pool_address, copy_threads, self._reports.tell)
            if card is None
            else LaunchGatherer(card, pool_address, self._components, self._reports.tell)
        )
        self._sessions: dict[int, Session] = {}
        self._ending: set[Session] = set()  # unmapped, but not gone
        self._closing = False

    async def map(
        self,
        session: int,
        reach: Reach,
        components: tuple[Component, ...],
        more: Ready = lambda _: None,  # noqa: ARG002
    ) -> int:
        """As WriterTransport says; all is ready at once, as decode grants no more than it has backed."""
        assert session not in self._sessions, f"session {session:#x} is mapped already"
        targets = targets_of(reach)
        pairings = paired(self._components, components, reach.arena_bytes)
        if self._closing:
            raise TransportError("this writer is closing")
        sessions = (*self._sessions.values(), *self._ending)
        taken = sum(each.process.engines for each in sessions if each.process is not None)
        engines = engines_left(self._network.engines, taken=taken)
        mapped = self._sessions[session] = Session(
            id=session, reach=reach, components=components, pairings=pairings, ring=Ring(), gatherer=self._gatherer
        )
        mapped.straight = self._pool_fd >= 0
        try:
            pool_bytes = os.fstat(self._pool_fd).st_size if mapped.straight else 0
            process = mapped.process = EngineProcess(
                self._network, host="127.0.0.1", memory=mapped.ring.fd, byte_count=mapped.ring.byte_count,
                sending=Sending(
                    targets=targets[:engines], base=reach.base, pool=self._pool_fd, pool_bytes=pool_bytes
                ),
                heard=lambda packet: self._heard(mapped, packet), died=lambda: self._died(mapped),
            )  # fmt: skip
            await process.ready()  # it has met the engines there: only now is the ring worth its memory
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

    def hbm_direct(self, session: int) -> bool:  # noqa: ARG002
        """All rows land in the arena; decode copies up what belongs elsewhere."""
        return False

    def unmap(self, session: int) -> None:
        """Ends the session's process once its writes have been reported; idempotent."""
        if (mapped := self._sessions.get(session)) is not None:
            mapped.leaving = True
            if not mapped.jobs:
                self._leave(mapped)

    def _leave(self, mapped: Session) -> None:
        if self._sessions.get(mapped.id) is mapped:
            del self._sessions[mapped.id]
            self._ending.add(mapped)
        if mapped.watch is not None:
            mapped.watch.cancel()
        if mapped.process is not None:
            mapped.process.kill()
        self._drop(mapped)

    def _drop(self, mapped: Session) -> None:
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

    def _apart(self, mapped: Session, step: Callable[[Ring], None], ring: Ring) -> asyncio.Future[None]:
        """Has a thread do this to a session's ring, which stays until it has."""

        def done(step: asyncio.Future[None]) -> None:
            mapped.busy -= 1
            step.exception()  # nobody may be waiting
            self._drop(mapped)

        mapped.busy += 1
        future = self._loop.run_in_executor(None, step, ring)
        future.add_done_callback(done)
        return future

    def waits(self, gate: Gate) -> bool:  # noqa: ARG002
        """As WriterTransport says: a slot of its ring is not to wait for anything."""
        return False

    def write(self, order: Write, done: WriteDone) -> None:
        """Gathers it piece by piece, in turn with other grants', as slots of the ring come free."""
        mapped = self._sessions.get(order.session)
        if mapped is None or mapped.leaving or mapped.broken:
            text = f"session {order.session:#x} is not mapped" if mapped is None or mapped.leaving else mapped.broken
            self._loop.call_soon(done, order, Outcome.FAILED, text, 0)
            return
        cut = mapped.cut(order.component, order.layers)
        # A checksum is of what this process reads, which then copies it as well.
        straight = mapped.straight and not order.verify and cut.long(order.source_slots, order.target_slots)
        job = Job(
            order=order,
            done=done,
            cut=cut,
            straight=straight,
            theirs=mapped.components[order.component],
            lines=lines_for(order, self._components, mapped.components, mapped.lines) if order.verify else None,
        )
        mapped.jobs.setdefault(order.grant, set()).add(job)
        if order.grant not in mapped.grants:
            mapped.grants[order.grant] = deque()
            mapped.waiting.append(order.grant)
        mapped.grants[order.grant].append(job)
        self._advance(mapped)

    def _advance(self, mapped: Session) -> None:
        """Gives the free slots of the ring to grants, in turn."""
        ring, passed = mapped.ring, 0
        while ring.free and passed < len(mapped.waiting):
            grant = mapped.waiting[0]
            mapped.waiting.rotate(-1)
            held = mapped.held.get(grant, 0)
            if held and held >= _SHARE * len(ring.free):
                passed += 1
                continue
            passed, job = 0, mapped.grants[grant][0]
            piece = next(job.pieces)
            slot = ring.free.pop()
            mapped.held[grant] = held + 1
            mapped.busy += 1
            gather = Gather(job=job, piece=piece, slot=slot, ring=ring)
            job.gathering.add(gather)
            self._gatherer.add(gather)
            if job.cut.last(piece, len(job.order.source_slots)):
                self._exhaust(mapped, job)

    def _exhaust(self, mapped: Session, job: Job) -> None:
        """Takes a job whose pieces are all taken, or that is to end, out of its grant's turns."""
        job.exhausted = True
        grant = job.order.grant
        jobs = mapped.grants.get(grant)
        if jobs is None or job not in jobs:
            return
        jobs.remove(job)
        if not jobs:
            del mapped.grants[grant]
            mapped.waiting.remove(grant)

    def _fail(self, mapped: Session, job: Job, text: str) -> None:
        """No more of it is gathered."""
        job.fail(text)
        self._exhaust(mapped, job)
        for gather in job.gathering:
            self._gatherer.stop(gather)

    def _gathered(self, gather: Gather) -> None:
        """On the loop: a slot is full, or will not be."""
        job, mapped = gather.job, self._sessions[gather.job.order.session]
        mapped.busy -= 1
        job.gathering.remove(gather)
        if gather.text:
            self._fail(mapped, job, gather.text)
        if gather.lost:
            job.lost = mapped.lost = True
        elif job.text or mapped.broken:
            mapped.release(gather.slot, job.order.grant)
        else:
            job.checksum = (job.checksum + gather.checksum) & MASK
            self._send(mapped, job, gather)
        self._advance(mapped)
        self._settle(mapped, job)

    def _send(self, mapped: Session, job: Job, gather: Gather) -> None:
        assert mapped.process is not None
        table, count = mapped.ring.tell(gather.slot, gather.runs, mapped.reach.base, straight=job.straight)
        if not mapped.batches:
            mapped.heard = self._loop.time()
            if mapped.watch is None:
                mapped.watch = self._loop.call_later(_LOOK_SECONDS, self._watch, mapped)
        job.sent.add(gather.slot)
        mapped.batches[gather.slot] = job
        mapped.process.send(child.ORDER.pack(child.PUT, gather.slot, count, table, job.order.grant))

    def _heard(self, mapped: Session, packet: bytes) -> None:
        """Replies of the session's process."""
        mapped.heard = self._loop.time()
        whole = len(packet) % child.REPLY.size == 0
        for kind, slot in child.REPLY.iter_unpack(packet) if whole else [(child.UNKNOWN, 0)]:
            job = mapped.batches.pop(slot, None) if kind in (child.DONE, child.CANCELLED) else None
            if job is None:  # it does not know, or speaks of what it was never told
                words = mapped.process.last_words() if mapped.process is not None else ""
                self._break(mapped, f"a write to {mapped.reach.host} has failed{words}")
                return
            job.sent.remove(slot)
            mapped.release(slot, job.order.grant)
            if kind == child.CANCELLED:
                self._fail(mapped, job, CANCELLED)
            self._settle(mapped, job)
        self._advance(mapped)

    def _watch(self, mapped: Session) -> None:
        """An engine that says nothing, stopped or held by its own locks, is not waited for."""
        mapped.watch = None
        if mapped.process is None or mapped.broken or not mapped.batches:
            return
        mapped.process.look()  # it may have spoken while this process was the one that did not run
        if mapped.batches and not mapped.broken:
            silent = self._loop.time() - mapped.heard
            if silent >= _STALL_SECONDS:
                self._break(
                    mapped, f"the engine that writes to {mapped.reach.host} has said nothing for {silent:.0f} s"
                )
            else:
                mapped.watch = self._loop.call_later(_LOOK_SECONDS, self._watch, mapped)

    def _died(self, mapped: Session) -> None:
        if self._sessions.get(mapped.id) is mapped:
            self._break(mapped, f"the engine that writes to {mapped.reach.host} has ended")
            if mapped.up and not mapped.leaving:
                self._lost(mapped.id)
        for job in [job for jobs in mapped.jobs.values() for job in jobs]:
            self._settle(mapped, job)  # what waited for this
        self._drop(mapped)

    def _break(self, mapped: Session, text: str) -> None:
        """Nobody can say any more what has landed: ends every write, those that were sent as unknown."""
        if mapped.broken:
            return
        mapped.broken = text
        assert mapped.process is not None
        mapped.process.kill()
        for job in [job for jobs in mapped.jobs.values() for job in jobs]:
            self._fail(mapped, job, text)
            self._settle(mapped, job)

    def _settle(self, mapped: Session, job: Job) -> None:
        """Reports a job that is over."""
        grant = job.order.grant
        jobs = mapped.jobs.get(grant, set[Job]())
        if job not in jobs or not job.over(known=mapped.known):
            return
        jobs.remove(job)
        if not jobs:
            del mapped.jobs[grant]
        try:
            job.done(job.order, job.outcome, job.text, job.checksum)
        finally:
            if mapped.leaving and not mapped.jobs:
                self._leave(mapped)

    def cancel(self, session: int, grant: int) -> None:
        """Gathers and sends no more of this grant; each of its writes reports when nothing of it is in flight."""
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
        """Ends the session's process, and returns when it is dead and its ring dropped: True, nothing of it is sent any
        more, and no source read, unless its card was lost. What it has sent before may lie in decode's sockets, until
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
        await self._loop.run_in_executor(None, self._gatherer.close)


def _check_wanted(mapped: Session) -> None:
    if mapped.leaving:
        raise TransportError("the session was unmapped while its arena was being mapped")
    if mapped.broken:
        raise TransportError(mapped.broken)


def _close(ring: Ring) -> None:
    """In a worker thread. What a card does not let go of stays mapped."""
    try:
        ring.close()
    except WorldError as error:
        log.critical("a send ring stays mapped until this process ends: %s", error)
        _lost.append(ring)


def targets_of(reach: Reach) -> tuple[str, ...]:
    """The engines, host:port each, that an arena is reached by. Raises TransportError for what is not Mooncake's."""
    if reach.transport != "mooncake":
        raise TransportError(f"transport {reach.transport!r}, this is mooncake")
    # A peer names it, and we knock: it must be nothing that the engine takes for more than a host and a port.
    if not _HOST.fullmatch(reach.host):
        raise TransportError(f"host {reach.host!r}: must be a name or an IPv4 address, and a port")
    if not _PORTS.fullmatch(reach.address):
        raise TransportError(f"address {reach.address!r}: must be further ports of that host, comma by comma, or empty")
    host = reach.host.rpartition(":")[0]
    return reach.host, *(f"{host}:{port}" for port in reach.address.split(",") if port)
