"""A follower: its node and engine carry out the leader's orders, and the leader gets the results.

No router knows a follower. Its engine repeats the leader's steps, so both have the same rooms at every step. Reports of
its node may come at any time. Without its leader it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from ...clock_name import clock_digest
from ...errors import Cause, RemoteProtocolError
from ...limits import TEXT_LENGTH_MAX
from ...wire import (
    Message,
    Ping,
    RankDrained,
    RankFailed,
    RankLanded,
    RankPicked,
    RankReady,
    RankReload,
    RankRoom,
    StepOrders,
)
from ..engine_api import Finished, Token
from .decode_rank import DecodeRank, DecodeRankRoom
from .engine_thread import FollowerPort
from .group.follower import GroupFollower
from .prefill_rank import PrefillRank, PrefillRankRoom
from .router_link import request_of


class Follower:
    """Connects the leader with the `rank` of this process, which is set later. `reload` reads the allow-list again."""

    rank: PrefillRank | DecodeRank

    def __init__(self, group: GroupFollower, port: FollowerPort, reload: Callable[[], None]) -> None:
        self.port, self._send, self._reload = port, group.bus.send, reload
        self._behind: dict[int, RankRoom] = {}  # rooms that start once the engine has done the steps before them

    # Orders of the leader

    def take(self, message: Message) -> None:
        """Carries out a leader's message. Raises RemoteProtocolError for an invalid one."""
        rank = self.rank
        match message:
            case StepOrders(_, orders):
                self.port.to_engine([rank.order(order) for order in orders])
            case RankRoom(_, local_id, begin) if begin.rest_max or self._behind:
                # The turn before it has ended on the leader: here, too, its blocks have to be kept first. Rooms that
                # come later stay behind it, since all ranks lease in the same order.
                self._behind[local_id] = message
                self.port.to_engine(partial(self._start_behind, local_id))
            case RankRoom():
                self._start(message)
            case RankFailed(_, local_id, cause, detail):
                if self._behind.pop(local_id, None) is None and rank.abort(local_id, Cause.of(cause), detail):
                    self._ended(cause)
            case Ping(_, peers) if isinstance(rank, DecodeRank):
                rank.node.introduce(peers)
            case RankReload():
                self._reload()
            case _:
                raise RemoteProtocolError("kind", f"{type(message).__name__} is not a message from a leader to a rank")

    def _start_behind(self, local_id: int) -> None:
        if (message := self._behind.pop(local_id, None)) is not None:
            try:
                self._start(message)
            except RemoteProtocolError as error:
                self._failed(local_id, Cause.BREACH, str(error))

    def _start(self, message: RankRoom) -> None:
        self.rank.metrics.rooms.begun.inc()
        try:
            request = request_of(message.begin, message.local_id)
        except ValueError as error:
            raise RemoteProtocolError("RankRoom.begin", str(error)) from None
        if isinstance(self.rank, DecodeRank) and message.begin.room in self.rank.by_id:
            # The leader's engine has dropped another room of this id, and this one has not yet.
            self._failed(message.local_id, Cause.REFUSED, f"room: {message.begin.room:016x} is in use")
        else:
            self.rank.start(message.begin, request)

    # Reports of this rank

    def ready(self, room: DecodeRankRoom, kv_bytes: int, prefix: int) -> None:
        self.rank.journeys.reached(room.room_id, "landing", "READY", byte_count=kv_bytes)
        self._send(RankReady, room.local_id, kv_bytes, prefix)

    def computed(self, room: PrefillRankRoom, aux: bytes | None, first: Token | None) -> None:  # noqa: ARG002
        assert isinstance(self.rank, PrefillRank)
        if aux is not None:
            self._send(RankPicked, room.local_id, aux)
        self.rank.finish(room.local_id, b"")

    def landed(self, room: PrefillRankRoom, kv_bytes: int, copy_us: int, stamp_ns: int) -> None:
        self._ended("done")
        self._send(RankLanded, room.local_id, kv_bytes, copy_us, stamp_ns, clock_digest())

    def drained(self, room: PrefillRankRoom) -> None:
        self._send(RankDrained, room.local_id)

    def failed(self, room: PrefillRankRoom | DecodeRankRoom, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        self._failed(room.local_id, cause, detail, retry_ms)

    def engine_failed(self, room: PrefillRankRoom, cause: Cause, detail: str) -> None:
        if cause is not Cause.REFUSED:  # the leader's engine refuses it as well
            self._send(RankFailed, room.local_id, cause.value, detail[:TEXT_LENGTH_MAX])

    def tokens(self, new_tokens: Iterable[Token]) -> None:
        """The leader's engine generates the same tokens."""

    def closed(self, room: DecodeRankRoom, reason: str, detail: str, finished: Finished | None) -> None:  # noqa: ARG002
        self._ended(reason)

    def _failed(self, local_id: int, cause: Cause, detail: str, retry_ms: int = 0) -> None:
        self._ended(cause.value)
        self._send(RankFailed, local_id, cause.value, detail[:TEXT_LENGTH_MAX], retry_ms)

    def _ended(self, reason: str) -> None:
        self.rank.metrics.rooms.ended.labels(reason).inc()
