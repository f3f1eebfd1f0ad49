"""A prefill daemon: prompts in, KV out. The engine computes, the node writes, and the router gets the result.

Three parties never wait for each other: the router's Service, the node, and the engine's thread. Every room that a
router began ends with one End, whichever party ends it. The leader of several ranks waits for all of them: a room has
landed once it has landed on every rank, fails on all once it fails on one, and its pages are free once every rank has
drained.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from ...client.settings import NodeSettings
from ...client.thread_queues import ThreadQueues
from ...clock_name import clock_digest
from ...errors import Cause, RemoteProtocolError
from ...wire import Begin, End, Hello, Load, Message, RankDrained, RankFailed, RankLanded, RankPicked, WorkerFigures
from ..engine_api import PrefillEngine, Request
from ..settings.worker import PrefillConfig
from ..tracing.ended_request import EndedRequests
from ..tracing.timeline import Journeys
from .daemon_figures import DaemonTotals
from .ended_rooms import WorkerFacts
from .engine_thread import Compute, Drop, Order, leader_steps
from .group.leader import GroupLeader, JoinedRank, RankReport
from .prefill_rank import PrefillRank
from .router_link import RouterLink, failure
from .service import Service


@dataclass(slots=True, eq=False)
class PrefillWork:
    """A room that the engines compute, or will. Sets hold ranks by their numbers in the group."""

    begin: Begin
    local_id: int  # used once; engines and other ranks know the room by it
    tokens: int
    landed: set[int] = field(default_factory=set[int])
    drained: set[int] = field(default_factory=set[int])
    computed: bool = False
    aux: bytes | None = None
    ended: bool = False
    kv_bytes: int = 0
    copy_us: int = 0
    stamp_ns: int = 0  # of the last rank, if every rank's is of `clock`
    clock: bytes = b""

    @property
    def room_id(self) -> int:
        """The router's id of the room; nodes know the room by it."""
        return self.begin.room


class PrefillDaemon:
    """Joins the rank of this process, the reports of the other ranks, and the routers."""

    def __init__(
        self,
        config: PrefillConfig,
        settings: NodeSettings,
        engine: PrefillEngine,
        port: ThreadQueues[Order],
        registry: CollectorRegistry,
        group: GroupLeader | None = None,
        journeys: Journeys | None = None,
        ended: EndedRequests | None = None,
    ) -> None:
        """`ended` gets a record of each room at its end."""
        self.config, self.port, self.group = config, port, group or GroupLeader()
        self.group.reported = self._on_report
        announce = None if self.group.size == 1 else self.group.step
        steps = leader_steps(engine, port, announce)
        self._journeys, ended = journeys or Journeys(), ended or EndedRequests()
        self.rank = PrefillRank(
            config, settings, engine, port, steps, self, registry, self._journeys, others=self._receive
        )
        ended.subscribe(self.rank.times.ended)
        self.node, self.thread = self.rank.node, self.rank.thread
        self._totals = DaemonTotals()
        self.desk = RouterLink(
            Service(self.node.core.identity, config.limits), self.node.bus.send, self,
            facts=WorkerFacts("prefill", config.node, engine.card.model), full_sampling=engine.card.full_sampling,
            metrics=self.rank.metrics.rooms, totals=self._totals, journeys=self._journeys, ended=ended,
        )  # fmt: skip
        self.node.others_gone = self.desk.gone
        self._work: dict[int, PrefillWork] = {}  # by local id: rooms whose pages an engine has, or waits for
        self._rooms: dict[int, PrefillWork] = {}  # by room id
        self._tokens = 0  # prompt tokens of all of them

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits for an acknowledgement of a live peer."""
        return self.rank.idle and self.desk.idle and not self._work

    def load(self) -> Load:
        """Total and free tokens of the pool."""
        waiting = min(self.thread.waiting, len(self._work))
        return Load(
            ready=True,
            draining=self.node.core.draining,
            rooms_running=len(self._work) - waiting,
            rooms_queued=waiting,
            slots_free=max(0, self.config.slots - self._tokens),
            slots_total=self.config.slots,
        )

    def figures(self) -> WorkerFigures:
        """What the daemon has done."""
        return self._totals.prefill_figures(self.node)

    def end_all(self, cause: Cause, detail: str) -> None:
        """Ends all rooms under way because the worker cannot go on, so that the routers get the reason."""
        for work in list(self._work.values()):
            self._fail(work, cause, detail)

    # Reports of this process's rank

    def computed(self, local_id: int, aux: bytes | None) -> None:
        work = self._work[local_id]
        work.computed = True
        self._finish(work, aux)

    def landed(self, local_id: int, kv_bytes: int, copy_us: int, stamp_ns: int) -> None:
        self._landed(self._work[local_id], 0, kv_bytes, copy_us, stamp_ns, clock_digest())

    def failed(self, local_id: int, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        self._fail(self._work[local_id], cause, detail, retry_ms)

    def engine_failed(self, local_id: int, cause: Cause, detail: str) -> None:
        self._fail(self._work[local_id], cause, detail)

    def drained(self, local_id: int) -> None:
        self._drained(self._work[local_id], 0)

    # Reports of the other ranks

    def _on_report(self, rank: JoinedRank, report: RankReport) -> None:
        work = self._work.get(report.local_id)
        if work is None:
            return  # The room was over on all ranks when that rank's engine made this.
        match report:
            case RankLanded(_, _, kv_bytes, copy_us, stamp_ns, clock) if rank.place not in work.landed:
                self._landed(work, rank.place, kv_bytes, copy_us, stamp_ns, clock)
            case RankFailed(_, _, cause, detail, retry_ms):
                self._fail(work, Cause.of(cause), f"{rank.name}: {detail}", retry_ms)
            case RankDrained() if rank.place not in work.drained:
                self._drained(work, rank.place)
            case RankPicked(_, _, aux) if work.aux is None:
                self._finish(work, aux)
            case _:
                raise RemoteProtocolError("kind", f"{type(report).__name__} of room {report.local_id}, not due")

    # Requests of routers

    def _receive(self, peer: str, message: Message) -> bool:
        """Whether the message is a router's; its Hello decides."""
        router = message.identity.role == "router" if isinstance(message, Hello) else self.desk.service.knows(peer)
        if router:
            self.desk.receive(peer, message)
        return router

    def introduce(self, peers: tuple[str, ...]) -> None:
        """Decode dials."""

    def check(self, begin: Begin, request: Request) -> None:  # noqa: ARG002
        """Raises ValueError for another router's room of this id, which has ended, and whose pages are still read."""
        if begin.room in self._rooms:
            raise ValueError(f"room: {begin.room:016x} is in use")

    def start(self, begin: Begin, request: Request) -> None:
        """Has the room computed and written, on every rank."""
        work = PrefillWork(begin, request.room, len(request.prompt))
        self._work[work.local_id] = self._rooms[work.room_id] = work
        self._tokens += work.tokens
        self.group.room(work.local_id, begin)
        self.rank.start(begin, request)
        if not work.ended:  # it may have failed at once
            self.port.to_engine(Compute(request))

    def stop(self, room_id: int, cause: Cause) -> None:
        """Ends a room that its router gave up."""
        if (work := self._rooms.get(room_id)) is not None:
            self._fail(work, cause, "the router gave it up")

    # Steps of a room

    def _finish(self, work: PrefillWork, aux: bytes | None) -> None:
        """In a pipeline, the last stage picks the token; this rank sends it once both stages are done."""
        work.aux = work.aux if aux is None else aux
        if work.computed and work.aux is not None:
            self._journeys.computed(work.room_id, here=aux is not None)
            self.rank.finish(work.local_id, work.aux)

    def _landed(self, work: PrefillWork, place: int, kv_bytes: int, copy_us: int, stamp_ns: int, clock: bytes) -> None:
        """The room has landed on one rank; it has landed once it has on all."""
        # The later of two stamps can be told where their clocks are the same.
        work.clock = clock if not work.landed or work.clock == clock else b""
        work.landed.add(place)
        work.kv_bytes += kv_bytes
        work.copy_us += copy_us
        work.stamp_ns = max(work.stamp_ns, stamp_ns)
        self._totals.landed(kv_bytes, copy_us=copy_us, tokens=0 if place else work.tokens)
        if len(work.landed) == self.group.size and not work.ended:
            work.ended = True
            self._journeys.written(work.room_id)
            stamp_ns = work.stamp_ns if work.clock else 0
            end = End(
                work.room_id, "done", "", 0,
                kv_bytes=work.kv_bytes, copy_us=work.copy_us, stamp_ns=stamp_ns, clock=work.clock,
            )  # fmt: skip
            self.desk.end(work.begin, end)

    def _fail(self, work: PrefillWork, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        """Fails the room on every rank, with the first cause."""
        if work.ended:
            return
        work.ended = True
        self.port.to_engine(Drop(work.local_id))
        self.desk.end(work.begin, failure(work.room_id, cause, detail, retry_ms))
        self.group.abort(work.local_id, cause, detail)
        self.rank.abort(work.local_id, cause, detail)

    def _drained(self, work: PrefillWork, place: int) -> None:
        work.drained.add(place)
        if len(work.drained) == self.group.size:
            del self._work[work.local_id], self._rooms[work.room_id]
            self._tokens -= work.tokens
            self.port.to_engine(self.rank.free(work.local_id))
