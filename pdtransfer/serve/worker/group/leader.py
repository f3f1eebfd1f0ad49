"""The leader's side of a group: its followers join, and then get the same orders in the same order.

A worker with one process has no followers and no sockets for them; it builds no message for followers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ....bus.keys import Address, AllowList
from ....client.settings import NodeSettings
from ....errors import Cause, ConfigError, RemoteProtocolError, WorldError
from ....limits import TEXT_LENGTH_MAX
from ....wire import (
    VERSION,
    Begin,
    Goodbye,
    Hello,
    Member,
    Message,
    Ping,
    RankBound,
    RankDrained,
    RankFailed,
    RankJoin,
    RankLanded,
    RankMeet,
    RankPicked,
    RankReady,
    RankReload,
    RankRoom,
    Ranks,
    Reject,
    Setting,
    StepOrder,
    StepOrders,
    Welcome,
    negotiate,
)
from ....wire.ranks import label, rank_index
from ..engine_thread import Compute, Drop, Free, Generate, GenerateFrom, Order
from .link import RankBus

log = logging.getLogger(__name__)

RankReport: TypeAlias = RankReady | RankLanded | RankDrained | RankFailed | RankPicked


@dataclass(slots=True, eq=False)
class JoinedRank:
    """A rank that has joined."""

    ranks: Ranks
    node: str
    tensors: str = ""  # where it takes the connections of other ranks
    bound: RankBound | None = None

    @property
    def index(self) -> int:
        """Its number in the group; 0 is the leader."""
        return rank_index(self.ranks)

    @property
    def name(self) -> str:
        """Its name for people."""
        return f"rank {label(self.ranks)} ({self.node})"


class GroupLeader:
    """The followers of this process. `reported` takes reports about rooms, and raises RemoteProtocolError for invalid
    ones. `asked` is called when a follower was asked to end."""

    def __init__(self, ranks: Ranks | None = None, asked: Callable[[], None] = lambda: None) -> None:
        self.ranks = ranks or Ranks()
        self.size = self.ranks.tp_size * self.ranks.pp_size
        self.followers: dict[str, JoinedRank] = {}  # by the bus's peer name
        self.reported: Callable[[JoinedRank, RankReport], None] = _unexpected
        self._asked = asked
        self.lost = asyncio.Event()  # set when the group cannot go on
        self.why = ""
        self._settings: tuple[Setting, ...] = ()
        self._bus: RankBus | None = None
        self._changed = asyncio.Event()
        self._ending = False

    # Meeting

    def open(
        self,
        settings: NodeSettings,
        role: Literal["prefill", "decode"],
        must_equal: tuple[Setting, ...],
        listener: socket.socket,
    ) -> str:
        """Takes in followers at a socket that `reserve` returned; returns its endpoint."""
        self._settings = must_equal
        self._bus = RankBus(settings, role, self._take, self._lose)
        return self._bus.bus.listen(listener)

    async def joined(self) -> None:
        """Waits until every rank has joined. Raises WorldError for one that has left again."""
        await self._until(lambda: len(self.followers) == self.size - 1)

    def meet(self, endpoint: str, secret: bytes) -> list[str]:
        """Announces where ranks connect to each other for tensors, this one at `endpoint`; returns that of each."""
        assert self._bus is not None
        endpoints = tuple(rank.tensors for rank in self._sorted())
        self._bus.post(RankMeet(Address.parse(endpoint).port_first, endpoints, secret))
        return [endpoint, *endpoints]

    async def members(self, node: str) -> tuple[Member, ...]:
        """Waits until every follower is bound; returns all ranks, this node first, or none for a single process. Raises
        as `joined`."""
        if self._bus is None:
            return ()
        await self._until(lambda: all(follower.bound for follower in self.followers.values()))
        self._bus.watch()
        return (
            Member(node, ""),
            *(Member(follower.node, follower.bound.endpoint) for follower in self._sorted() if follower.bound),
        )

    def described(self) -> list[dict[str, str]]:
        """Describes every follower, for the process that started this one."""
        bound = [(follower.node, follower.bound) for follower in self._sorted() if follower.bound]
        return [{"node": node, "endpoint": rank.endpoint, "http": rank.http} for node, rank in bound]

    # Following

    def room(self, local_id: int, begin: Begin) -> None:
        """Announces a room, before any order for it."""
        if self._bus is not None:
            self._bus.send(RankRoom, local_id, begin)

    def step(self, orders: Sequence[Order]) -> None:
        """Announces the orders of the leader's next step."""
        if self._bus is None:
            return
        step_orders: list[StepOrder] = []
        for order in orders:
            match order:
                case Compute(request):
                    step_orders.append(StepOrder("compute", request.room))
                case Generate(request, _, aux):
                    step_orders.append(StepOrder("generate", request.room, aux))
                case GenerateFrom(request):
                    step_orders.append(StepOrder("generate", request.room))
                case Drop(room):
                    step_orders.append(StepOrder("drop", room))
                case Free(room):
                    step_orders.append(StepOrder("free", room))
                case _:
                    return  # the engine ends, and the followers' engines end by Goodbye
        self._bus.send(StepOrders, tuple(step_orders))

    def abort(self, local_id: int, cause: Cause, detail: str) -> None:
        """Announces that the room failed before it generated."""
        if self._bus is not None:
            self._bus.send(RankFailed, local_id, cause.value, detail[:TEXT_LENGTH_MAX])

    def introduce(self, peers: tuple[str, ...]) -> None:
        """Announces prefill ranks that rooms may name; every rank opens sessions of its own."""
        if self._bus is not None:
            self._bus.post(Ping(self._bus.identity.incarnation, peers))

    def allow(self, allowed: AllowList) -> None:
        """Replaces the allow-list, here and on all followers."""
        if self._bus is not None:
            self._bus.allow(allowed)
            self._bus.send(RankReload)

    def fail(self, why: str) -> None:
        """The group cannot go on; the first reason counts."""
        if not self._ending:
            self.why = self.why or why
            self.lost.set()
            self._changed.set()

    async def close(self) -> None:
        """Ends the group."""
        self._ending = True
        if self._bus is not None:
            self._bus.post(Goodbye(self._bus.identity.incarnation, Cause.SHUTDOWN.value))
            await self._bus.close()

    # Messages of followers

    def _sorted(self) -> list[JoinedRank]:
        return sorted(self.followers.values(), key=lambda follower: follower.index)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            if self.why:
                raise WorldError(self.why)
            await self._changed.wait()

    def _lose(self, peer: str, why: str) -> None:
        self.fail(f"{self.followers[peer].name} of this worker is lost: {why}")

    def _take(self, peer: str, message: Message) -> None:
        follower = self.followers.get(peer)
        match message:
            case Hello():
                self._greet(peer, message)
            case RankJoin():
                self._join(peer, message)
            case Ping():
                pass
            case RankBound() if follower is not None:
                follower.bound = message
                self._changed.set()
            case Goodbye() if follower is not None:
                self._asked()
            case RankReady() | RankLanded() | RankDrained() | RankFailed() | RankPicked() if follower is not None:
                self.reported(follower, message)
            case _:
                raise RemoteProtocolError(
                    "kind", f"{type(message).__name__} is not a message from a rank to its leader"
                )

    def _greet(self, peer: str, message: Hello) -> None:
        assert self._bus is not None
        try:
            version = negotiate(ours=(VERSION, VERSION), theirs=(message.version_min, message.version_max))
            if (role := message.identity.role) != self._bus.identity.role:
                raise RemoteProtocolError("role", f"{role!r} there, {self._bus.identity.role!r} here")
        except RemoteProtocolError as error:
            self._refuse(peer, str(error))
            self._bus.bus.hang_up(peer)  # no further message of it is taken before another Hello
            return
        self._bus.bus.send(peer, Welcome(version, self._bus.identity))

    def _join(self, peer: str, message: RankJoin) -> None:
        refusal = self._refusal(message)
        if refusal:
            self._refuse(peer, refusal)
            return
        assert self._bus is not None
        self.followers[peer] = JoinedRank(message.ranks, message.node, message.tensors)
        self._bus.link(peer)
        self._changed.set()

    def _refuse(self, peer: str, text: str) -> None:
        assert self._bus is not None
        log.warning("a rank cannot join: %s", text)
        self._bus.bus.send(peer, Reject(0, Cause.REFUSED.value, (text[:TEXT_LENGTH_MAX],)))

    def _refusal(self, join: RankJoin) -> str:
        ours, theirs, index = self.ranks, join.ranks, rank_index(join.ranks)
        for axis in ("tp", "pp", "dp"):
            if (rank_value := getattr(theirs, f"{axis}_size")) != (leader_value := getattr(ours, f"{axis}_size")):
                return f"{axis}_size: {rank_value} on rank {label(theirs)}, {leader_value} on its leader"
            if (rank := getattr(theirs, f"{axis}_rank")) >= rank_value:
                return f"{axis}_rank: {rank}, {axis}_size is {rank_value}"
        if index == 0 or any(follower.index == index for follower in self.followers.values()):
            return f"rank {label(theirs)} is here already"
        try:
            Address.parse(join.tensors)
        except ConfigError as error:
            return f"tensors: {error}"
        there_, here_ = (
            {setting.name: setting.value for setting in settings} for settings in (join.settings, self._settings)
        )
        for name in sorted(there_.keys() | here_.keys()):
            if (rank_value := there_.get(name, "")) != (leader_value := here_.get(name, "")):
                return f"{name}: {rank_value!r} on rank {label(theirs)}, {leader_value!r} on its leader"
        return ""


def _unexpected(rank: JoinedRank, report: RankReport) -> None:
    raise RemoteProtocolError("kind", f"{type(report).__name__} of {rank.name}, before any room")
