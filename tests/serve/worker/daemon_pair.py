"""A prefill daemon, and a decode daemon or a follower of one, on one loop, with the stamp engine and no router.

Prefill's engine runs in its thread; what decode's engine says is the test's, unless the test starts that thread, too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pdtransfer.client.settings import NodeSettings
from pdtransfer.client.thread_queues import ThreadQueues
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.serve.tracing.ended_request import EndedRequest, EndedRequests
from pdtransfer.serve.tracing.timeline import Journeys
from pdtransfer.serve.worker import engine_thread
from pdtransfer.serve.worker.daemon import attach, create_engine
from pdtransfer.serve.worker.decode_daemon import DecodeDaemon
from pdtransfer.serve.worker.decode_rank import DecodeRank
from pdtransfer.serve.worker.engine_thread import Generate, Order, Quit, follower_steps
from pdtransfer.serve.worker.follower import Follower
from pdtransfer.serve.worker.group.leader import GroupLeader
from pdtransfer.serve.worker.prefill_daemon import PrefillDaemon
from pdtransfer.wire import Begin, End, Ended, Hello, Message, Ranks, Sampling, pack_ids
from tests.support.routing_world import identity
from tests.support.waiting import until

OPTIONS = {"slots": 1_024, "listen": "", "engine_option": ("layers=1",)}
TRACEPARENT = f"00-{'a1' * 16}-{'b2' * 8}-01"
ROOM = 7
TOKENS = 130  # two blocks of the prefix cache, and something


class Routers:
    """Routers of a daemon, and what it has sent them."""

    def __init__(self, daemon: PrefillDaemon | DecodeDaemon, *routers: str) -> None:
        self.daemon, self.sent = daemon, list[tuple[str, Message]]()
        daemon.desk._send = lambda peer, message: bool(self.sent.append((peer, message))) or True
        for router in routers:
            daemon.desk.receive(f"node:{router}", Hello(1, 1, identity(router, "router", 1)))

    def send(self, router: str, *messages: Message) -> None:
        for message in messages:
            self.daemon.desk.receive(f"node:{router}", message)

    def ends(self, router: str, room: int) -> list[End]:
        """Without repetitions."""
        ends = [m for to, m in self.sent if to == f"node:{router}" and isinstance(m, End) and m.room == room]
        return list(dict.fromkeys(ends))

    async def over(self, router: str, room: int) -> End:
        """The End of the room, which the router then acknowledges."""
        await until(lambda: self.ends(router, room), f"{room} ends")
        (end,) = self.ends(router, room)
        self.send(router, Ended(room))
        return end


@dataclass
class Leader:
    """Takes the place of a follower's leader, and keeps what it is sent."""

    sent: list[Any] = field(default_factory=list)

    @property
    def bus(self) -> Leader:
        return self

    def send(self, kind: Any, *fields: Any) -> None:
        self.sent.append(kind(len(self.sent) + 1, *fields))


@asynccontextmanager
async def engine_of(daemon: PrefillDaemon | DecodeDaemon) -> AsyncIterator[threading.Thread]:
    """Its engine runs, in its thread."""
    thread = engine_thread.start(daemon.thread, lambda _: None)
    try:
        yield thread
    finally:
        daemon.port.to_engine(Quit())
        await asyncio.to_thread(thread.join, 10)


def orders(daemon: Any, kind: type[Any]) -> list[Any]:
    return [order for order in daemon.port.poll() if isinstance(order, kind)]


async def generates(daemon: Any, room: int = ROOM) -> int:
    """Waits until the engine is to generate; the serial number that it gets."""
    await until(lambda: daemon.rank.by_id[room].ready_ns)
    (order,) = orders(daemon, Generate)
    return order.request.room


class Prefill:
    """A prefill daemon whose engine runs."""

    thread: threading.Thread

    def __init__(self, ranks: Ranks | None = None) -> None:
        config = PrefillConfig(**OPTIONS)
        engine = create_engine(config.factory, config.engine_config)
        self.ended = list[EndedRequest]()
        (ended := EndedRequests()).subscribe(self.ended.append)
        self.daemon = PrefillDaemon(
            config, _settings("p0", engine), engine, port := ThreadQueues[Order](), CollectorRegistry(),
            GroupLeader(ranks), ended=ended,
        )  # fmt: skip
        port.attach(asyncio.get_running_loop())
        self.routers, self.endpoint = Routers(self.daemon, "a", "b"), ""

    def begin(self, router: str, room: int, node: str, **more: Any) -> Begin:
        """Has the room computed for this decode node; returns the other Begin of it, decode's."""
        prompt = pack_ids([97 + index % 26 for index in range(TOKENS)])
        ids = {"request_id": f"r{room}", "traceparent": TRACEPARENT}
        self.routers.send(router, Begin(room, prompt, Sampling(4), (node,), 30_000, **ids, **more))
        return Begin(room, prompt, Sampling(4), (self.endpoint,), 30_000, **ids)

    async def drained(self) -> None:
        """Nothing reads a page of any room."""
        await until(lambda: not self.daemon.rank.rooms)

    async def close(self) -> None:
        self.daemon.desk.ticker.stop()
        await self.daemon.node.close()
        self.daemon.port.close()


def _settings(node: str, engine: Any, ranks: Ranks = Ranks()) -> NodeSettings:  # noqa: B008
    return NodeSettings(node=node, model=engine.description.model, weights=engine.description.weights, ranks=ranks)


@asynccontextmanager
async def prefill() -> AsyncIterator[Prefill]:
    made = Prefill()
    made.endpoint = await made.daemon.node.bus.bind("tcp://127.0.0.1:0")
    try:
        async with engine_of(made.daemon) as made.thread:
            yield made
    finally:
        await made.close()


@asynccontextmanager
async def decode(
    sockets: Path, *, ranks: Ranks | None = None, wrap: Any = lambda engine: engine, **more: Any
) -> AsyncIterator[Any]:
    """A daemon with `routers` and `ended`; its orders stay in its port until somebody runs its thread."""
    config = DecodeConfig(**OPTIONS | more, socket_directory=sockets)
    engine = wrap(create_engine(config.factory, config.engine_config))
    arena, port = ArenaMemory.create(engine.description.arena_bytes, huge_pages="never"), ThreadQueues[Order]()
    attach(engine, arena)
    ended, records = EndedRequests(), list[EndedRequest]()
    ended.subscribe(records.append)
    daemon = DecodeDaemon(
        config, _settings("d0", engine), engine, arena, port, CollectorRegistry(), GroupLeader(ranks or Ranks()),
        ended=ended,
    )  # fmt: skip
    daemon.ended = records
    daemon.routers = Routers(daemon, "a", "b")
    port.attach(asyncio.get_running_loop())
    try:
        yield daemon
    finally:
        daemon.desk.ticker.stop()
        await daemon.node.close()
        port.close()
        with suppress(BufferError):  # its engine looks at it
            arena.close()


@asynccontextmanager
async def follower(sockets: Path) -> AsyncIterator[tuple[Follower, Leader]]:
    config = DecodeConfig(**OPTIONS, socket_directory=sockets)
    engine, leader = create_engine(config.factory, config.engine_config), Leader()
    arena, port = ArenaMemory.create(engine.description.memory_bytes, huge_pages="never"), ThreadQueues[Any]()
    made = Follower(leader, port, lambda: None)  # type: ignore[arg-type]
    made.rank = DecodeRank(
        config, _settings("d0-tp1", engine, Ranks(1, 2)), engine, arena, port, follower_steps(port), made,
        CollectorRegistry(), Journeys(),
    )  # fmt: skip
    port.attach(asyncio.get_running_loop())
    try:
        yield made, leader
    finally:
        await made.rank.node.close()
        port.close()
        arena.close()
