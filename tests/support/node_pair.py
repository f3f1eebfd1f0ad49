"""A prefill and a decode node on one loop, rooms between them, and what they report."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pdtransfer.client.decode_node import DecodeNode
from pdtransfer.client.prefill_node import PrefillNode
from pdtransfer.handoff.decode.room_request import RoomRequest
from pdtransfer.handoff.effects import RoomDrained, RoomFailed, RoomLanded, RoomLeased, RoomReady
from pdtransfer.handoff.prefill.cells import Cell
from pdtransfer.layout.layout import Component
from pdtransfer.limits import Limits
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.options import ArenaOptions, WriterOptions
from tests.support.client_pair import LIMITS, component, settings
from tests.support.layout_tensors import CANARY, Pool, mla
from tests.support.waiting import until

SOURCE = Pool(name="layer_first", model=mla(layers=range(2)), page_size=16, slots=128)
TARGET = Pool(name="page_first", model=mla(layers=range(2)), page_size=1, slots=64)


@dataclass
class NodePair:
    """Both nodes; rooms of `send` have the first rows of SOURCE."""

    prefill: PrefillNode
    decode: DecodeNode
    endpoint: str
    arena: ArenaMemory
    events_p: list[RoomLeased | RoomLanded | RoomFailed | RoomDrained]
    events_d: list[RoomReady | RoomFailed]

    def expect(self, room: int, tokens: int = 10, **more: Any) -> None:
        request = {"tokens": tokens, "sources": [self.endpoint], "time_left_s": 60, **more}
        self.decode.expect(RoomRequest(room=room, **request))

    def send(self, room: int, tokens: int = 10) -> None:
        self.prefill.open(room, tokens=tokens, time_left_s=60)
        self.push(room, tokens)

    def push(self, room: int, tokens: int) -> None:
        """All of a room that is open."""
        self.prefill.push(room, Cell("kv", 0, (0, 2), np.arange(tokens)))
        self.prefill.finish(room, aux=b"")

    async def ended(self, room: int) -> RoomReady | RoomFailed:
        """On decode's side."""
        await until(lambda: any(event.room == room for event in self.events_d))
        (event,) = (event for event in self.events_d if event.room == room)
        return event

    async def ready(self, room: int) -> RoomReady:
        event = await self.ended(room)
        assert isinstance(event, RoomReady), event
        return event

    async def moved(self, room: int, tokens: int = 10) -> None:
        """A whole room, from expect to ready."""
        self.expect(room, tokens)
        self.send(room, tokens)
        await self.ready(room)


@asynccontextmanager
async def node_pair(
    *,
    source: Sequence[Component] = (component(SOURCE),),
    target: Sequence[Component] = (component(TARGET),),
    arena_bytes: int = TARGET.layout.end,
    limits: Limits = LIMITS,
    writer: WriterOptions | None = None,
    options: ArenaOptions | None = None,
    **decode: Any,
) -> AsyncIterator[NodePair]:
    """`decode` is DecodeNode's. Without `writer` the pool that prefill sends is SOURCE's; the arena holds canaries."""
    if writer is None or not writer.pool_address:
        SOURCE.fill(np.arange(SOURCE.slots))
        writer = replace(writer or WriterOptions(), pool_address=SOURCE.memory.ctypes.data)
    arena = ArenaMemory.create(arena_bytes, huge_pages="never")
    arena.mapping.array[:] = CANARY
    events_p: list[RoomLeased | RoomLanded | RoomFailed | RoomDrained] = []
    events_d: list[RoomReady | RoomFailed] = []
    prefill_node = PrefillNode(settings("p", limits), source, events_p.append, writer=writer)
    decode_node = DecodeNode(
        settings("d", limits), target, arena, events_d.append, options=options or ArenaOptions(), **decode
    )
    endpoint = await prefill_node.bus.bind("tcp://127.0.0.1:0")
    try:
        yield NodePair(prefill_node, decode_node, endpoint, arena, events_p, events_d)
    finally:
        await decode_node.close()
        await prefill_node.close()
        arena.close()
