"""A follower's side of a group: it joins its leader, and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from ....bus.keys import AllowList
from ....client.settings import NodeSettings
from ....errors import Cause, ConfigError, RemoteProtocolError, WorldError
from ....wire import VERSION, Goodbye, Hello, Message, Ping, RankBound, RankJoin, RankMeet, Reject, Welcome
from .link import RankBus


class GroupFollower:
    """The connection to the leader at `endpoint`. `take` gets its orders, and raises RemoteProtocolError for invalid
    ones."""

    def __init__(
        self, settings: NodeSettings, role: Literal["prefill", "decode"], endpoint: str, join: RankJoin
    ) -> None:
        self.endpoint, self._join = endpoint, join
        self.bus = RankBus(settings, role, self._take, self._lose)
        self.take: Callable[[Message], None] = _unexpected
        self.over = asyncio.Event()  # the leader ended the group
        self.lost = asyncio.Event()  # the leader cannot be reached
        self.why = ""  # why the leader is lost
        self._meet: asyncio.Future[RankMeet] = asyncio.get_running_loop().create_future()

    async def join(self) -> RankMeet:
        """Joins once the leader and all other ranks are there; returns where they connect to each other.

        Raises ConfigError when the leader refuses this rank, WorldError when the leader is lost.
        """
        self.bus.bus.dial(self.endpoint, self.bus.identity.role)
        self.bus.bus.send(self.endpoint, Hello(VERSION, VERSION, self.bus.identity))
        return await self._meet

    def bound(self, endpoint: str, http: str) -> None:
        """This rank is ready: from now on each side watches the other for silence."""
        self.bus.watch()
        self.bus.post(RankBound(endpoint, http))

    def ask(self) -> None:
        """This process was asked to end, which ends the whole group."""
        self.bus.post(Goodbye(self.bus.identity.incarnation, Cause.SHUTDOWN.value))

    def allow(self, allowed: AllowList) -> None:
        """Replaces the allow-list."""
        self.bus.allow(allowed)

    async def close(self) -> None:
        """Closes the connection once the last messages have left."""
        if self._meet.done() and not self._meet.cancelled():
            self._meet.exception()  # retrieve the exception, which nobody may have waited for
        await self.bus.close()

    def _take(self, peer: str, message: Message) -> None:
        match message:
            case Welcome():
                self.bus.link(peer)
                self.bus.post(self._join)
            case Reject(_, reason, fields) if not self._meet.done():
                self._meet.set_exception(ConfigError(f"the leader refuses this rank: {'; '.join(fields) or reason}"))
            case Reject(_, reason, fields):
                self.bus.lose(peer, f"it refuses ({reason}): {'; '.join(fields)}")
            case RankMeet(tensors=others) if not self._meet.done():
                if len(others) != (size := self._join.ranks.tp_size * self._join.ranks.pp_size) - 1:
                    raise RemoteProtocolError("RankMeet.tensors", f"{len(others)} of {size} ranks")
                self._meet.set_result(message)
            case Goodbye():
                self.bus.part(peer)
                self.over.set()
            case Ping(peers=()):
                pass
            case _:
                self.take(message)

    def _lose(self, peer: str, why: str) -> None:  # noqa: ARG002
        if not self._meet.done():
            self._meet.set_exception(WorldError(f"the leader at {self.endpoint}: {why}"))
        self.why = self.why or why
        self.lost.set()


def _unexpected(message: Message) -> None:
    raise RemoteProtocolError("kind", f"{type(message).__name__}, before this rank is ready")
