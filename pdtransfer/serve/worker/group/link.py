"""The ranks of one worker on a bus of their own: numbered messages, pings, and one verdict for a rank: lost.

The bus may drop messages, but no order to an engine may be lost. Over one connection ZMQ keeps the order and loses
nothing that it accepted. So a refused send, a wrong number, and a second greeting, which means a new connection, each
end the link. Nothing is acknowledged or repeated, and a step waits for no answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, Literal, ParamSpec

from ....bus import Bus, BusLimits
from ....bus.gone import Gone
from ....bus.keys import REVOKED, AllowList
from ....client.core_driver import LoopClock, Ticker
from ....client.settings import NodeSettings
from ....errors import RemoteProtocolError
from ....handoff.liveness import Liveness
from ....wire import (
    Hello,
    Message,
    Ping,
    Pong,
    RankDrained,
    RankFailed,
    RankLanded,
    RankPicked,
    RankReady,
    RankReload,
    RankRoom,
    StepOrders,
    Welcome,
)

LIMITS = BusLimits(send_queue=1 << 14)  # enough for every room of a worker to begin or end in one turn of the loop

log = logging.getLogger(__name__)

Numbered = RankDrained | RankFailed | RankLanded | RankPicked | RankReady | RankReload | RankRoom | StepOrders
Fields = ParamSpec("Fields")


@dataclass(slots=True)
class RankLink:
    """The stream of messages from one rank."""

    liveness: Liveness
    taken: int = 0  # number of the latest message


class RankBus:
    """This rank's sockets to the others. `take` gets their messages; `lost` gets a lost rank once, with the reason."""

    def __init__(
        self,
        settings: NodeSettings,
        role: Literal["prefill", "decode"],
        take: Callable[[str, Message], None],
        lost: Callable[[str, str], None],
    ) -> None:
        self.identity = settings.identity(role)
        self._take, self._lost = take, lost
        self._links: dict[str, RankLink] = {}
        self._sent = 0  # number of the latest message; numbered messages go to all ranks
        self._watched = False
        self._ping_s = settings.limits.ping_ms / 1e3
        self._limits = settings.limits
        self._clock = LoopClock.among_peers(settings.limits.ping_ms)
        self._due = self._clock.now() + self._ping_s
        self._ticker = Ticker(lambda: self._due, self._tick, self._clock)
        self._ticker.arm()
        self.bus = Bus(
            node=settings.node, keys=settings.keys, allowed=settings.allowed, insecure=settings.insecure,
            receive=self._receive, refused=self._refused, limits=LIMITS, supersede=False, gone=self._report_gone,
        )  # fmt: skip

    def link(self, peer: str) -> None:
        """Accepts the peer as a rank of this worker."""
        self._links[peer] = RankLink(Liveness(self._limits, self._clock.now()))

    def watch(self) -> None:
        """Starts to watch for silence: every rank can answer now."""
        self._watched = True
        for link in self._links.values():
            link.liveness.seen(self._clock.now())

    def send(
        self, kind: Callable[Concatenate[int, Fields], Message], *args: Fields.args, **more: Fields.kwargs
    ) -> None:
        """Sends a numbered message to every linked rank."""
        self._sent += 1
        self.post(kind(self._sent, *args, **more))

    def post(self, message: Message) -> None:
        """Sends a message without a number to every linked rank."""
        for peer in list(self._links):
            self._post(peer, message)

    def allow(self, allowed: AllowList) -> None:
        """Replaces the allow-list."""
        for peer in self.bus.allow(allowed):
            self.lose(peer, REVOKED)

    def lose(self, peer: str, why: str) -> None:
        """Gives the link up. Idempotent."""
        if self._links.pop(peer, None) is not None:
            self._lost(peer, why)

    def part(self, peer: str) -> None:
        """The peer has sent Goodbye: that its connection ends is no loss."""
        self._links.pop(peer, None)

    async def close(self) -> None:
        """Closes all connections once the last messages have left."""
        self._ticker.stop()
        await self.bus.close()

    def _report_gone(self, peer: str, gone: Gone | None) -> None:
        if (link := self._links.get(peer)) is not None:
            link.liveness.report("" if gone is None else gone.text, self._clock.now())

    def _post(self, peer: str, message: Message) -> None:
        if not self.bus.send(peer, message):
            self.lose(peer, "gone")

    def _receive(self, peer: str, message: Message) -> None:
        link = self._links.get(peer)
        if link is not None and isinstance(message, Hello | Welcome):
            self.lose(peer, "its connection was lost")
            return
        try:
            if link is not None:
                self._count(peer, link, message)
            if link is None or not isinstance(message, Pong):
                self._take(peer, message)
        except RemoteProtocolError as error:
            self._refused(peer, error)

    def _count(self, peer: str, link: RankLink, message: Message) -> None:
        link.liveness.seen(self._clock.now())
        if isinstance(message, Ping):
            self._post(peer, Pong(self.identity.incarnation))
        elif isinstance(message, Numbered):
            link.taken += 1
            if message.number != link.taken:
                text = f"{message.number}, expected {link.taken}: messages are missing"
                raise RemoteProtocolError(f"{type(message).__name__}.number", text)

    def _refused(self, peer: str, error: RemoteProtocolError) -> None:
        if peer in self._links:
            self.lose(peer, f"it broke the protocol: {error}")
        else:
            log.warning("%s: %s", peer, error)

    def _tick(self) -> None:
        now = self._clock.now()
        self._due = now + self._ping_s
        for peer, link in list(self._links.items()):
            if self._watched and link.liveness.silent(now):
                self.lose(peer, link.liveness.why("it", now))
            else:
                self._post(peer, Ping(self.identity.incarnation))
