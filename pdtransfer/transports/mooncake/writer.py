"""Prefill's side of Mooncake: rows are gathered into a session's ring here, and sent from there by its process.

The pool is read by this process's own threads alone, so that its pages are safe once a write is over; what a process
may still send when a write's end is unknown is the ring, which is dropped with it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ... import kernels, sums
from ...checksum import Lines
from ...effects import Outcome, Write
from ...errors import TransportError
from ...layout import Component
from ...limits import ENGINES_MAX
from ...pairing import Pairing
from ...wire import Reach
from ..base import Ready, WriteDone
from ..copier import CANCELLED, Copier
from ..meeting import Planes, lines_for, paired
from ..network import Network
from ..reports import Reports
from . import child
from .jobs import Gather, Job
from .process import EngineProcess
from .ring import Cut, Ring, cut

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}:[1-9]\d{0,4}")
_SHARE = 2  # slots that a grant may hold for each that is free: one alone takes two thirds, and leaves some for others
_STALL_SECONDS = 10.0  # without a reply: the engine's own patience is 3 to 5 s
_LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class _Session:
    """One arena, and the process that writes there."""

    id: int
    reach: Reach
    components: tuple[Component, ...]
    pairings: tuple[Pairing, ...]
    ring: Ring
    process: EngineProcess | None = None
    cuts: dict[Planes, Cut] = field(default_factory=dict[Planes, Cut])
    lines: dict[Planes, Lines] = field(default_factory=dict[Planes, Lines])
    grants: dict[int, deque[Job]] = field(default_factory=dict[int, deque[Job]])  # that are not exhausted
    waiting: deque[int] = field(default_factory=deque[int])  # the same, in the order of their turns
    jobs: dict[int, set[Job]] = field(default_factory=dict[int, set[Job]])  # not yet reported, by grant
    held: dict[int, int] = field(default_factory=dict[int, int])  # slots, by grant
    batches: dict[int, Job] = field(default_factory=dict[int, Job])  # what was sent, by slot
    up: bool = False  # its process has been ready
    gathering: int = 0
    heard: float = 0.0  # when something of it was known to be under way
    watch: asyncio.TimerHandle | None = None
    broken: str = ""  # nothing more is sent, and the ends of what was are unknown: why
    leaving: bool = False
    quiet: asyncio.Event = field(default_factory=asyncio.Event)  # dead, and its ring dropped

    @property
    def gone(self) -> bool:
        """Whether neither its process nor a copy thread knows of its ring any more."""
        return (self.process is None or self.process.dead) and not self.gathering

    def cut(self, component: int, layers: tuple[int, int]) -> Cut:
        """The component's planes of these layers, as they pass through the ring."""
        if (found := self.cuts.get((component, layers))) is None:
            pairing = self.pairings[component].within_layers(*layers).fused()
            found = self.cuts[component, layers] = cut(pairing)
        return found

    def release(self, slot: int, grant: int) -> None:
        """The slot is free again."""
        self.ring.free.append(slot)
        self.held[grant] -= 1
        if not self.held[grant]:
            del self.held[grant]


class MooncakeWriter:
    """A WriterTransport. Make it on the loop's thread.

    `components` are the pool's own, whose bases are offsets from `pool_address`, or addresses where that is 0; the pool
    lies in this process's memory, and stays mapped until after close. `lost` is called with a session whose process
    has died by itself: it writes no more, and is to be fenced.
    """

    def __init__(
        self,
        components: tuple[Component, ...],
        network: Network,
        *,
        pool_address: int = 0,
        copy_threads: int = 2,
        lost: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._components = {component.name: component for component in components}
        self._network, self._pool_address, self._lost = network, pool_address, lost
        self._loop = asyncio.get_running_loop()
        self._reports: Reports[Gather] = Reports(self._gathered)
        self._copier: Copier[Gather] = Copier(copy_threads, self._reports.tell, name="gather")
        self._sessions: dict[int, _Session] = {}
        self._ending: set[_Session] = set()  # unmapped, but not gone
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
        _check_reachable(reach)
        pairings = paired(self._components, components, reach.arena_bytes)
        await asyncio.gather(*(self._loop.run_in_executor(None, each) for each in (kernels.native, sums.native)))
        if self._closing:
            raise TransportError("this writer is closing")
        if (engines := len(self._sessions) + len(self._ending)) >= ENGINES_MAX:
            raise TransportError(f"engines: {engines} of {ENGINES_MAX}, one for each session")
        mapped = _Session(id=session, reach=reach, components=components, pairings=pairings, ring=Ring())
        self._sessions[session] = mapped
        try:
            process = mapped.process = EngineProcess(
                "sender", self._network, host="127.0.0.1", memory=mapped.ring.fd, byte_count=mapped.ring.byte_count,
                target=(reach.host, str(reach.base)), heard=lambda packet: self._heard(mapped, packet),
                died=lambda: self._died(mapped),
            )  # fmt: skip
            await process.ready()
            if mapped.leaving:
                raise TransportError("the session was unmapped while its arena was being mapped")
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

    def _leave(self, mapped: _Session) -> None:
        if self._sessions.get(mapped.id) is mapped:
            del self._sessions[mapped.id]
            self._ending.add(mapped)
        if mapped.watch is not None:
            mapped.watch.cancel()
        if mapped.process is not None:
            mapped.process.kill()
        self._drop(mapped)

    def _drop(self, mapped: _Session) -> None:
        if mapped in self._ending and mapped.gone:
            self._ending.remove(mapped)
            mapped.ring.close()
            mapped.quiet.set()

    def write(self, order: Write, done: WriteDone) -> None:
        """Gathers it piece by piece, in turn with other grants', as slots of the ring come free."""
        mapped = self._sessions.get(order.session)
        if mapped is None or mapped.leaving or mapped.broken:
            text = f"session {order.session:#x} is not mapped" if mapped is None or mapped.leaving else mapped.broken
            self._loop.call_soon(done, order, Outcome.FAILED, text, 0)
            return
        job = Job(
            order=order,
            done=done,
            cut=mapped.cut(order.component, order.layers),
            source_address=self._pool_address,
            lines=lines_for(order, self._components, mapped.components, mapped.lines) if order.verify else None,
        )
        mapped.jobs.setdefault(order.grant, set()).add(job)
        if order.grant not in mapped.grants:
            mapped.grants[order.grant] = deque()
            mapped.waiting.append(order.grant)
        mapped.grants[order.grant].append(job)
        self._advance(mapped)

    def _advance(self, mapped: _Session) -> None:
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
            mapped.gathering += 1
            job.gathering += 1
            self._copier.add(Gather(job=job, piece=piece, slot=slot, ring=ring))
            if job.cut.last(piece, len(job.order.source_slots)):
                self._exhaust(mapped, job)

    def _exhaust(self, mapped: _Session, job: Job) -> None:
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

    def _gathered(self, gather: Gather) -> None:
        """On the loop: a slot is full, or will not be."""
        job, mapped = gather.job, self._sessions[gather.job.order.session]
        mapped.gathering -= 1
        job.gathering -= 1
        if gather.text:
            job.fail(gather.text)
            self._exhaust(mapped, job)
        if job.text or mapped.broken:
            mapped.release(gather.slot, job.order.grant)
        else:
            job.checksum += gather.checksum
            self._send(mapped, job, gather)
        self._advance(mapped)
        self._settle(mapped, job)

    def _send(self, mapped: _Session, job: Job, gather: Gather) -> None:
        assert mapped.process is not None
        table, count = mapped.ring.tell(gather.slot, gather.runs, mapped.reach.base)
        if not mapped.batches:
            mapped.heard = self._loop.time()
            if mapped.watch is None:
                mapped.watch = self._loop.call_later(_LOOK_SECONDS, self._watch, mapped)
        job.sent.add(gather.slot)
        mapped.batches[gather.slot] = job
        mapped.process.send(child.ORDER.pack(child.PUT, gather.slot, count, table, job.order.grant))

    def _heard(self, mapped: _Session, packet: bytes) -> None:
        """Replies of the session's process."""
        mapped.heard = self._loop.time()
        for kind, slot in child.REPLY.iter_unpack(packet):
            if kind == child.UNKNOWN:
                words = mapped.process.last_words() if mapped.process is not None else ""
                self._break(mapped, f"a write to {mapped.reach.host} has failed{words}")
                return
            job = mapped.batches.pop(slot)
            job.sent.remove(slot)
            mapped.release(slot, job.order.grant)
            if kind == child.CANCELLED:
                job.fail(CANCELLED)
            self._settle(mapped, job)
        self._advance(mapped)

    def _watch(self, mapped: _Session) -> None:
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

    def _died(self, mapped: _Session) -> None:
        if self._sessions.get(mapped.id) is mapped and not mapped.leaving:
            self._break(mapped, f"the engine that writes to {mapped.reach.host} has ended")
            if mapped.up:
                self._lost(mapped.id)
        self._drop(mapped)

    def _break(self, mapped: _Session, text: str) -> None:
        """Nobody can say any more what has landed: ends every write, those that were sent as unknown."""
        if mapped.broken:
            return
        mapped.broken = text
        assert mapped.process is not None
        mapped.process.kill()
        for job in [job for jobs in mapped.jobs.values() for job in jobs]:
            job.fail(text)
            self._exhaust(mapped, job)
            self._settle(mapped, job)

    def _settle(self, mapped: _Session, job: Job) -> None:
        """Reports a job that is over."""
        grant = job.order.grant
        jobs = mapped.jobs.get(grant, set[Job]())
        if job not in jobs or not job.over(known=not mapped.broken):
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
                job.fail(CANCELLED)
                self._exhaust(mapped, job)
            self._loop.call_soon(self._settle, mapped, job)
        if grant in mapped.jobs:
            mapped.process.send(child.ORDER.pack(child.CANCEL, 0, 0, 0, grant))

    async def fence(self, session: int) -> bool:
        """Ends the session's process, and returns when it is dead and its ring dropped: True, nothing of it is sent any
        more. What it has sent before may lie in decode's sockets, until decode's fence."""
        if (mapped := self._sessions.get(session)) is not None:
            self._break(mapped, "its writer was fenced")
            mapped.leaving = True
            if not mapped.jobs:
                self._leave(mapped)
            await mapped.quiet.wait()
        for ending in [each for each in self._ending if each.id == session]:
            await ending.quiet.wait()
        return True

    async def close(self) -> None:
        """Waits for what is in flight, ends every process, joins the threads."""
        self._closing = True
        for session in list(self._sessions):
            self.unmap(session)
        for mapped in [*self._sessions.values(), *self._ending]:
            await mapped.quiet.wait()
        await self._loop.run_in_executor(None, self._copier.close)


def _check_reachable(reach: Reach) -> None:
    if reach.transport != "mooncake":
        raise TransportError(f"transport {reach.transport!r}, this is mooncake")
    # A peer names it, and we knock: it must be nothing that the engine takes for more than a host and a port.
    if not _HOST.fullmatch(reach.host):
        raise TransportError(f"host {reach.host!r}: must be a name or an IPv4 address, and a port")
