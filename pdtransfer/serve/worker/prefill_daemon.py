"""A prefill daemon: prompts in, KV out. The engine computes, the node writes, and the router gets the result.

Three parties never wait for each other: the router's Service, the node, and the engine's thread. Every room that a
router began ends with one End, whichever party ends it. The leader of several ranks waits for all of them. A room has
landed once it has landed on every rank, and fails on all once it fails on one. Its pages are free once every rank has
drained.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from ...client.settings import NodeSettings, Others
from ...client.thread_queues import ThreadQueues
from ...clock_name import clock_digest
from ...errors import Cause, RemoteProtocolError
from ...wire import Begin, End, Hello, Load, Message, RankDrained, RankFailed, RankLanded, RankPicked, WorkerFigures
from ..engine_api import PrefillEngine, Request, Token
from ..settings.worker import PrefillConfig
from ..tracing.ended_request import EndedRequests
from ..tracing.timeline import Journeys
from .engine_thread import Compute, Drop, Order, leader_steps
from .group.leader import GroupLeader, JoinedRank, RankReport
from .prefill_rank import PrefillRank, PrefillRankRoom
from .router_link import RouterLink, failure
from .service import Service


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
        condemned: Callable[[], None] = lambda: None,
    ) -> None:
        """`ended` gets a record of each room at its end; `condemned` as PrefillNode has it."""
        self.config, self.port, self.group = config, port, group or GroupLeader()
        self.group.reported = self._on_report
        steps = leader_steps(engine, port, None if self.group.size == 1 else self.group.step)
        self._journeys, ended = journeys or Journeys(), ended or EndedRequests()
        self.rank = PrefillRank(
            config, settings, engine, port, steps, self, registry, self._journeys,
            others=Others(self._receive, self._gone), condemned=condemned,
        )  # fmt: skip
        ended.subscribe(self.rank.times.ended)
        self.node, self.thread = self.rank.node, self.rank.thread
        self.desk = RouterLink(
            Service(self.node.core.identity, config.limits),
            self.node.bus.send,
            self,
            full_sampling=engine.description.full_sampling,
            metrics=self.rank.metrics.rooms,
            journeys=self._journeys,
            ended=ended,
        )
        self._tokens = 0  # of the prompts whose pages an engine has, or waits for

    @property
    def idle(self) -> bool:
        """True if nothing runs and nothing waits for an acknowledgement of a live peer."""
        return self.rank.idle and self.desk.idle and not self.rank.rooms

    def load(self) -> Load:
        """Total and free tokens of the pool."""
        waiting = min(self.thread.waiting, len(self.rank.rooms))
        return Load(
            ready=True,
            draining=self.node.core.draining,
            rooms_running=len(self.rank.rooms) - waiting,
            rooms_queued=waiting,
            slots_free=max(0, self.config.slots - self._tokens),
            slots_total=self.config.slots,
        )

    def figures(self) -> WorkerFigures:
        """What the daemon has done."""
        return self.desk.totals.prefill_figures(self.node)

    def end_all(self, cause: Cause, detail: str) -> None:
        """Ends all rooms under way because the worker cannot go on, so that the routers get the reason."""
        for room in list(self.rank.rooms.values()):
            self._fail(room, cause, detail)

    # Reports of this process's rank

    def computed(self, room: PrefillRankRoom, aux: bytes | None, first: Token | None) -> None:
        if first is not None and room.begin.first_token:
            self.desk.tokens(room.room_id, [first.id], b"" if first.logprobs is None else first.logprobs.pack())
        room.computed = True
        self.rank.metrics.rooms.computed_tokens.inc(len(room.request.prompt))
        self._finish(room, aux)

    def landed(self, room: PrefillRankRoom, kv_bytes: int, copy_us: int, stamp_ns: int) -> None:
        self._landed(room, 0, kv_bytes, copy_us, stamp_ns, clock_digest())

    def failed(self, room: PrefillRankRoom, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        self._fail(room, cause, detail, retry_ms)

    def engine_failed(self, room: PrefillRankRoom, cause: Cause, detail: str) -> None:
        self._fail(room, cause, detail)

    def drained(self, room: PrefillRankRoom) -> None:
        self._drained(room, 0)

    # Reports of the other ranks

    def _on_report(self, rank: JoinedRank, report: RankReport) -> None:
        room = self.rank.rooms.get(report.local_id)
        if room is None:
            return  # The room was over on all ranks when that rank's engine made this.
        match report:
            case RankLanded(_, _, kv_bytes, copy_us, stamp_ns, clock) if rank.index not in room.landed:
                self._landed(room, rank.index, kv_bytes, copy_us, stamp_ns, clock)
            case RankFailed(_, _, cause, detail, retry_ms):
                self._fail(room, Cause.of(cause), f"{rank.name}: {detail}", retry_ms)
            case RankDrained() if rank.index not in room.drained:
                self._drained(room, rank.index)
            case RankPicked(_, _, aux) if room.aux is None:
                self._finish(room, aux)
            case _:
                raise RemoteProtocolError("kind", f"{type(report).__name__} of room {report.local_id}, not due")

    # Requests of routers

    def _receive(self, peer: str, message: Message) -> bool:
        """True if the message is a router's; its Hello decides."""
        router = message.identity.role == "router" if isinstance(message, Hello) else self.desk.service.knows(peer)
        if router:
            self.desk.receive(peer, message)
        return router

    def _gone(self, peer: str, evidence: str) -> None:
        self.desk.gone(peer, evidence)

    def introduce(self, peers: tuple[str, ...]) -> None:
        """Decode dials."""

    def check(self, begin: Begin, request: Request) -> None:  # noqa: ARG002
        """Raises ValueError for another router's room of this id, which has ended, and whose pages are still read."""
        if begin.room in self.rank.by_id:
            raise ValueError(f"room: {begin.room:016x} is in use")

    def start(self, begin: Begin, request: Request) -> None:
        """Has the room computed and written, on every rank."""
        self._tokens += len(request.prompt)
        self.group.room(request.room, begin)
        if not self.rank.start(begin, request).ended:  # it may have failed at once
            self.port.to_engine(Compute(request))

    def stop(self, room_id: int, cause: Cause) -> None:
        """Ends a room that its router gave up."""
        if (room := self.rank.by_id.get(room_id)) is not None:
            self._fail(room, cause, "the router gave it up")

    # Steps of a room

    def _finish(self, room: PrefillRankRoom, aux: bytes | None) -> None:
        """In a pipeline, the last stage picks the token; this rank sends it once both stages are done."""
        room.aux = room.aux if aux is None else aux
        if room.computed and room.aux is not None:
            self._journeys.computed(room.room_id, by_step=aux is not None)
            self.rank.finish(room.local_id, room.aux)

    def _landed(
        self, room: PrefillRankRoom, rank_index: int, kv_bytes: int, copy_us: int, stamp_ns: int, clock: bytes
    ) -> None:
        """The room has landed on one rank; it has landed once it has on all."""
        # The later of two stamps can be chosen where their clocks are the same.
        room.clock = clock if not room.landed or room.clock == clock else b""
        room.landed.add(rank_index)
        room.kv_bytes += kv_bytes
        room.copy_us += copy_us
        room.stamp_ns = max(room.stamp_ns, stamp_ns)
        self.desk.totals.landed(kv_bytes, copy_us=copy_us, tokens=0 if rank_index else len(room.request.prompt))
        if len(room.landed) == self.group.size and not room.ended:
            room.ended = True
            self._journeys.written(room.room_id)
            stamp_ns = room.stamp_ns if room.clock else 0
            end = End(
                room.room_id,
                "done",
                "",
                0,
                kv_bytes=room.kv_bytes,
                copy_us=room.copy_us,
                stamp_ns=stamp_ns,
                clock=room.clock,
            )
            self.desk.end(room.begin, end)

    def _fail(self, room: PrefillRankRoom, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        """Fails the room on every rank, with the first cause."""
        if room.ended:
            return
        room.ended = True
        self.port.to_engine(Drop(room.local_id))
        self.desk.end(room.begin, failure(room.room_id, cause, detail, retry_ms))
        self.group.abort(room.local_id, cause, detail)
        self.rank.abort(room.local_id, cause, detail)

    def _drained(self, room: PrefillRankRoom, rank_index: int) -> None:
        room.drained.add(rank_index)
        if len(room.drained) == self.group.size:
            self._tokens -= len(room.request.prompt)
            self.port.to_engine(self.rank.free(room.local_id))
