"""The leader's side of a group: its followers join, and from then on hear the same orders in the same order.

A worker that is one process leads nobody: every call is made all the same, and costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...config.ranks import label, place_of
from ...errors import Cause, WorldError
from ...limits import TEXT_LENGTH_MAX
from ...wire import Begin, Member, Ranks
from ..engine_thread import Cancel, Compute, Free, Generate, Order
from .frames import Abort, Asked, Bound, Frame, Introduce, Join, Joined, Op, Quit, Refuse, Reload, Report, Start, Turn
from .link import Link, LinkLostError

log = logging.getLogger(__name__)

JOIN_S = 5.0  # a connection that does not say who it is by then is nobody


@dataclass(slots=True, eq=False)
class Follower:
    """A rank that has joined."""

    ranks: Ranks
    node: str
    link: Link
    bound: Bound | None = None

    @property
    def name(self) -> str:
        """For a person."""
        return f"rank {label(self.ranks)} ({self.node})"


class Lead:
    """The followers of this process. `heard` gets what they report, `asked` is called when one was told to end."""

    def __init__(self, ranks: Ranks | None = None, common: Mapping[str, str] | None = None) -> None:
        self.ranks, self._common = ranks or Ranks(), dict(common or {})
        self.size = self.ranks.tp_size * self.ranks.pp_size
        self.followers: dict[int, Follower] = {}
        self.heard: Callable[[Follower, Report], None] = _nobody
        self.asked: Callable[[], None] = lambda: None
        self.lost = asyncio.Event()  # the group cannot go on
        self.why = ""  # it was lost, or nobody can join
        self._news = asyncio.Event()
        self._quitting = False
        self._server: asyncio.Server | None = None
        self._listening: list[asyncio.Task[None]] = []

    # They meet

    async def open(self, host: str, port: int) -> str:
        """Lets followers join; returns host:port as bound. Raises WorldError."""
        try:
            self._server = await asyncio.start_server(self._joins, host, port)
        except OSError as error:
            raise WorldError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def joined(self) -> None:
        """Waits for every rank to be here. Raises WorldError for one that has gone again."""
        await self._until(lambda: len(self.followers) == self.size - 1)
        assert self._server is not None
        self._server.close()

    def meet(self, port: int) -> None:
        """Tells where the collectives meet."""
        self._say(Joined(port))

    async def members(self, own: str) -> tuple[Member, ...]:
        """Waits for every follower to be bound: all ranks, this node first. Raises WorldError as `joined`."""
        await self._until(lambda: all(each.bound for each in self.followers.values()))
        self._listening += [asyncio.create_task(self._listen(each)) for each in self.followers.values()]
        return (Member(own, ""), *(Member(each.node, each.bound.endpoint) for each in self._sorted() if each.bound))

    def described(self) -> list[dict[str, str]]:
        """Every follower, for whoever has started this process."""
        bound = [(each.node, each.bound) for each in self._sorted() if each.bound]
        return [{"node": node, "endpoint": each.endpoint, "http": each.http} for node, each in bound]

    @property
    def nobody(self) -> bool:
        """Whether this process is a worker of its own."""
        return self.size == 1

    # They follow

    def start(self, serial: int, begin: Begin) -> None:
        """Before the room can get an order."""
        self._say(Start(serial, begin))

    def turn(self, orders: Sequence[Order]) -> None:
        """What the leader's own engine is about to do."""
        if self.nobody:
            return
        said: list[tuple[Op, int, bytes]] = []
        for order in orders:
            match order:
                case Compute(request):
                    said.append(("compute", request.room, b""))
                case Generate(request, _, aux):
                    said.append(("generate", request.room, aux))
                case Cancel(room):
                    said.append(("cancel", room, b""))
                case Free(room):
                    said.append(("free", room, b""))
                case _:
                    return  # the engine ends, and so do theirs, by Quit
        self._say(Turn(said))

    def abort(self, serial: int, cause: Cause, detail: str) -> None:
        """The room has failed before it generates."""
        self._say(Abort(serial, cause.value, detail[:TEXT_LENGTH_MAX]))

    def introduce(self, peers: tuple[str, ...]) -> None:
        """Rooms may name these prefill ranks, and every rank has sessions of its own."""
        self._say(Introduce(peers))

    def reload(self) -> None:
        """This rank was told to read its allow-list anew."""
        self._say(Reload())

    def fail(self, why: str) -> None:
        """The group cannot go on; the first reason counts."""
        if not self._quitting:
            self.why = self.why or why
            self.lost.set()
            self._news.set()

    async def quit(self, timeout_s: float) -> None:
        """Sends all home, and waits for them to go."""
        self._quitting = True
        self._say(Quit())
        if self._listening:
            await asyncio.wait(self._listening, timeout=timeout_s)
        await self.close()

    async def close(self) -> None:
        """Lets all links go: followers that were not told to quit know that something is wrong."""
        self._quitting = True
        if self._server is not None:
            self._server.close()
        for each in self.followers.values():
            await each.link.close()
        for task in self._listening:
            task.cancel()

    # The links

    def _sorted(self) -> list[Follower]:
        return [self.followers[place] for place in sorted(self.followers)]

    def _say(self, frame: Frame) -> None:
        for each in self.followers.values():
            each.link.send(frame)

    async def _until(self, there: Callable[[], bool]) -> None:
        while not there():
            self._news.clear()
            if self.why:
                raise WorldError(self.why)
            await self._news.wait()

    async def _joins(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it is bound; then `_listen` reads it."""
        link, follower = Link(reader, writer), None
        try:
            join = await link.read(JOIN_S)
            refusal = self._refusal(join)
            if refusal:
                link.send(Refuse(refusal[:TEXT_LENGTH_MAX]))
                log.warning("a rank cannot join: %s", refusal)
                await link.close()
                return
            assert isinstance(join, Join)
            follower = self.followers[place_of(join.ranks)] = Follower(join.ranks, join.node, link)
            self._news.set()
            bound = await link.read(timeout_s=1e6)  # its engine may have to load a model first
            if not isinstance(bound, Bound):
                raise LinkLostError(f"says {type(bound).__name__} where it should be bound")
            follower.bound = bound
        except LinkLostError as lost:
            await link.close()
            if follower is not None:
                self.fail(f"{follower.name}: {lost}")
        self._news.set()

    def _refusal(self, join: Frame) -> str:
        if not isinstance(join, Join):
            return f"{type(join).__name__} where a rank should join"
        if (join.ranks.tp_size, join.ranks.pp_size) != (self.ranks.tp_size, self.ranks.pp_size):
            ours, theirs = self.ranks, join.ranks
            return f"tp_size, pp_size: {theirs.tp_size}, {theirs.pp_size} there, {ours.tp_size}, {ours.pp_size} here"
        place = place_of(join.ranks)
        if not 0 < place < self.size or place in self.followers:
            return f"rank {label(join.ranks)} is here already"
        for name in sorted(self._common.keys() | join.common.keys()):
            here, there = self._common.get(name, ""), join.common.get(name, "")
            if here != there:
                return f"{name}: {there!r} on rank {label(join.ranks)}, {here!r} on its leader"
        return ""

    async def _listen(self, follower: Follower) -> None:
        why = await follower.link.listen(lambda frame: self._of(follower, frame))
        self.fail(f"{follower.name} of this worker is lost: {why}")

    def _of(self, follower: Follower, frame: Frame) -> None:
        if isinstance(frame, Asked):
            self.asked()
        elif isinstance(frame, Report):
            self.heard(follower, frame)
        else:
            log.error("%s says %s", follower.name, type(frame).__name__)


def _nobody(follower: Follower, report: Report) -> None:
    raise AssertionError((follower, report))
