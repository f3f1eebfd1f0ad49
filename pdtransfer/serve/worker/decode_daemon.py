"""A decode daemon: KV in, tokens out. The node lands rooms in the arena, and the engine generates from them in place.

The leader of several ranks waits for every rank's arena. A room is admitted once it is READY on all ranks, and fails on
all ranks once it fails on one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import msgspec
from prometheus_client import CollectorRegistry

from ...client.settings import NodeSettings, Others
from ...client.thread_queues import ThreadQueues
from ...clock_name import clock_digest
from ...errors import ArenaFullError, Cause, LocalProtocolError, RemoteProtocolError
from ...limits import TEXT_LENGTH_MAX, TOKENS_MAX, UNUSABLE_MAX
from ...memory.arena_memory import ArenaMemory
from ...wire import Begin, End, Load, Message, RankFailed, RankReady, Unusable, WorkerFigures
from ..engine_api import DecodeEngine, Finished, Request, Token
from ..settings.worker import DecodeConfig
from ..tracing.ended_request import EndedRequests
from ..tracing.timeline import FIRST_TOKEN, LANDING, SLOTS, Journeys
from .decode_rank import DecodeRank, DecodeRankRoom
from .engine_thread import Drop, Order, leader_steps
from .group.leader import GroupLeader, JoinedRank, RankReport
from .router_link import RouterLink, failure
from .service import Service

RETRY_MS_MIN = 100  # smallest Retry-After of a request that is refused because too many wait


class DecodeDaemon:
    """Joins the rank of this process, the reports of the other ranks, and the routers."""

    def __init__(
        self,
        config: DecodeConfig,
        settings: NodeSettings,
        engine: DecodeEngine,
        arena: ArenaMemory,
        port: ThreadQueues[Order],
        registry: CollectorRegistry,
        group: GroupLeader | None = None,
        journeys: Journeys | None = None,
        ended: EndedRequests | None = None,
    ) -> None:
        """`ended` gets a record of each room at its end."""
        self.config, self._engine, self.port, self.group = config, engine, port, group or GroupLeader()
        self.group.reported = self._on_report
        steps = leader_steps(engine, port, None if self.group.size == 1 else self.group.step)
        self._journeys, ended = journeys or Journeys(), ended or EndedRequests()
        self.rank = DecodeRank(
            config, settings, engine, arena, port, steps, self, registry, self._journeys,
            others=Others(self._receive, self._gone), leased=self._leased, unusable_changed=self._report_soon,
        )  # fmt: skip
        ended.subscribe(self.rank.times.ended)
        self.node, self.thread = self.rank.node, self.rank.thread
        self.desk = RouterLink(
            Service(self.node.core.prefill_peers.identity, config.limits),
            self.node.bus.send,
            self,
            full_sampling=engine.description.full_sampling,
            metrics=self.rank.metrics.rooms,
            journeys=self._journeys,
            ended=ended,
        )

    @property
    def idle(self) -> bool:
        """True if nothing runs and nothing waits for an acknowledgement."""
        return self.rank.idle and self.desk.idle

    def load(self) -> Load:
        """Total and free tokens for requests of either kind. Slots that the prefix cache can give up are free."""
        core, cache = self.node.core, self.node.core.cache
        free, total = cache.scarcest(enable_hisparse=False)
        sparse_free, sparse_total = cache.scarcest(enable_hisparse=True)
        return Load(
            ready=True,
            draining=self.node.core.draining,
            rooms_running=len(core.rooms) - len(core.admission),
            rooms_queued=len(core.admission),
            slots_free=free,
            slots_total=total,
            slots_quarantined=cache.tokens_of(core.leases.quarantined_bytes),
            enable_hisparse=self.config.enable_hisparse,
            sparse_slots_free=sparse_free,
            sparse_slots_total=sparse_total,
            unusable=tuple(Unusable(name, why[:TEXT_LENGTH_MAX]) for name, why in self.node.unusable()[:UNUSABLE_MAX]),
            rest_max=self.rank.rest_max,
        )

    def figures(self) -> WorkerFigures:
        """What the daemon has done."""
        return self.desk.totals.decode_figures(self.node, self._engine.figures if self.config.enable_hisparse else None)

    def backed(self, bytes_ready: int) -> None:
        """The first `bytes_ready` bytes of the arena are backed now; routers get the new number of free slots."""
        self.node.ready(bytes_ready)
        self.desk.run([])

    def end_all(self, cause: Cause, detail: str) -> None:
        """Ends all rooms under way because the worker cannot go on, so that the routers get the reason.

        The engine may be inside a step, forever if another rank is gone: its slots come back when that step returns,
        or with the end of this process.
        """
        for room in list(self.rank.rooms.values()):
            self._fail(room, cause, detail)
            self._end(room, failure(room.room_id, cause, detail))

    # Reports of this process's rank

    def ready(self, room: DecodeRankRoom, kv_bytes: int, prefix: int) -> None:
        self._ready(room, 0, kv_bytes, prefix)

    def failed(self, room: DecodeRankRoom, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        self._fail(room, cause, detail, retry_ms)

    def tokens(self, new_tokens: Iterable[Token]) -> None:
        """Sends a room's tokens of one step in one message."""
        now = time.monotonic()
        tokens: dict[int, list[Token]] = {}
        for token in new_tokens:
            tokens.setdefault(token.room, []).append(token)
            if token.index == 0 and (room := self.rank.rooms.get(token.room)) is not None:
                self._journeys.reached(room.room_id, *FIRST_TOKEN)
                if room.begin.rest_max:
                    self.rank.metrics.rooms.computed_tokens.inc(len(room.request.prompt) - room.prefix)
        for local_id, room_tokens in tokens.items():
            ids = [token.id for token in room_tokens]
            logprobs = b"".join(token.logprobs.pack() for token in room_tokens if token.logprobs is not None)
            if (room := self.rank.rooms.get(local_id)) is None:
                continue
            if room.token_s:
                self.rank.times.token((now - room.token_s) / len(ids), len(ids))
            room.token_s = now
            room.tokens += len(ids)
            self.desk.totals.tokens += len(ids)
            try:
                self.desk.tokens(room.room_id, ids, logprobs)
            except LocalProtocolError as error:  # more tokens than the request asked for
                self._fail(room, Cause.ENGINE, str(error))

    def closed(self, room: DecodeRankRoom, reason: str, detail: str, finished: Finished | None) -> None:
        if room.dropped is not None:
            reason, detail, finished = room.dropped[0].value, room.dropped[1], None
        end = End(
            room.room_id,
            reason,
            detail[:TEXT_LENGTH_MAX],
            0,
            kv_bytes=room.kv_bytes,
            stamp_ns=room.ready_ns,
            prefix=room.prefix,
            clock=clock_digest() if room.ready_ns else b"",
        )
        if finished is not None:
            end = msgspec.structs.replace(
                end,
                tokens_digest=finished.tokens_digest,
                logits_digest=finished.logits_digest,
                kv_digest=finished.kv_digest,
            )
        self._end(room, end)

    # Reports of the other ranks

    def _on_report(self, rank: JoinedRank, report: RankReport) -> None:
        room = self.rank.rooms.get(report.local_id)
        match report:
            case RankReady() | RankFailed() if room is None:
                pass  # The room has failed since.
            case RankReady(_, _, kv_bytes, prefix) if room is not None and rank.index not in room.ranks_ready:
                if room.begin.rest_max and prefix != room.prefix:
                    raise RemoteProtocolError("RankReady.prefix", f"{prefix} of a rest, its leader has {room.prefix}")
                self._ready(room, rank.index, kv_bytes, prefix)
            case RankFailed(_, _, cause, detail, retry_ms):
                self._fail(room, Cause.of(cause), f"{rank.name}: {detail}", retry_ms)
            case _:
                raise RemoteProtocolError("kind", f"{type(report).__name__} of room {report.local_id}, not due")

    # Requests of routers

    def _receive(self, peer: str, message: Message) -> bool:
        """True if the message came from a peer that dialled this node, which only routers do."""
        router = peer not in self.node.core.prefill_peers.peers
        if router:
            self.desk.receive(peer, message)
        return router

    def _gone(self, peer: str, evidence: str) -> None:
        self.desk.gone(peer, evidence)

    def _report_soon(self) -> None:
        """Routers get it at once, and not with the next Ping: they choose no pair that cannot work together."""
        asyncio.get_running_loop().call_soon(self.desk.report_load)

    def introduce(self, peers: tuple[str, ...]) -> None:
        """Opens sessions with prefill ranks that rooms may name, on every rank."""
        self.node.introduce(peers)
        self.group.introduce(peers)

    def check(self, begin: Begin, request: Request) -> None:
        """Raises ValueError for a room that cannot be had here, ArenaFullError for one that cannot be had now."""
        if begin.room in self.rank.by_id:  # another router's, which has ended; the engine still holds its slots
            raise ValueError(f"room: {begin.room:016x} is in use")
        if begin.enable_hisparse and not self.config.enable_hisparse:
            raise ValueError("enable_hisparse: the request wants it, this node is run without it")
        if begin.rest_max > (most := 0 if begin.enable_hisparse else self.rank.rest_max):
            raise ValueError(f"rest_max: {begin.rest_max}, this node computes at most {most} prompt tokens")
        self._engine.check(request)
        if begin.enable_hisparse:
            figures, most = self._engine.figures, self.config.limits.hisparse_queue_max
            sparse = sum(room.begin.enable_hisparse for room in self.rank.rooms.values())
            if (waiting := sparse - figures.running) >= most:
                detail = f"hisparse_queue_max = {most}: {waiting} requests wait for the device"
                raise ArenaFullError(detail, retry_ms=max(figures.retry_ms, RETRY_MS_MIN))

    def start(self, begin: Begin, request: Request) -> None:
        """Expects the room's KV, and then generates."""
        self.rank.start(begin, request)

    def stop(self, room_id: int, cause: Cause) -> None:
        """Ends a room that its router gave up."""
        self._fail(self.rank.by_id.get(room_id), cause, "the router gave it up")

    def _leased(self, room_id: int) -> None:
        """Starts the room on the other ranks. They lease in the leader's order: two rooms with some slots each would
        wait for each other. Of a room without prefill each has to have cached what this one has, which it may have
        given up. Such a rank refuses the room, and the router hands it over."""
        if (journey := self._journeys.of(room_id)) is not None:
            journey.peer, journey.transport = self.node.way_of(room_id)
        self._journeys.reached(room_id, *SLOTS)
        room = self.rank.by_id.get(room_id)
        if room is not None:
            begin = room.begin
            if begin.rest_max:
                rest = len(room.request.prompt) - self.node.core.rooms[room_id].prefix
                begin = msgspec.structs.replace(begin, rest_max=rest)
            self.group.room(room.local_id, begin)

    # Steps of a room

    def _ready(self, room: DecodeRankRoom, rank_index: int, kv_bytes: int, prefix: int) -> None:
        """The room is ready on one rank; it generates once it is ready on all."""
        room.ranks_ready.add(rank_index)
        room.kv_bytes += kv_bytes
        self.desk.totals.landed(kv_bytes)
        room.prefix = min(room.prefix, prefix)
        if len(room.ranks_ready) == self.group.size:
            self._journeys.reached(room.room_id, *LANDING, byte_count=room.kv_bytes)
            room.ready_ns = time.monotonic_ns()
            assert room.landing is not None, "this rank is one of them"
            self.port.to_engine(self.rank.generate(room.local_id, room.landing.aux))

    def _fail(self, room: DecodeRankRoom | None, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        """Fails a room before it generates, on every rank, with the first cause. Its slots are the engine's until
        Dropped."""
        if room is None:
            return
        if room.ready_ns:
            room.dropped = cause, detail
            self.port.to_engine(Drop(room.local_id))
            return
        self._end(room, failure(room.room_id, cause, detail, retry_ms))
        self.group.abort(room.local_id, cause, detail)
        self.rank.abort(room.local_id, cause, detail)

    def _end(self, room: DecodeRankRoom, end: End) -> None:
        """Ends the room once for its router, though its slots may be held for longer."""
        if not room.ended:
            room.ended = True
            cached = None if room.prefix == TOKENS_MAX else room.prefix
            self.desk.end(room.begin, end, tokens=room.tokens, cached=cached)
