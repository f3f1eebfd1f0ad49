"""The clients for asyncio: their events are read on the caller's own loop, and resolve futures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, Protocol, Self, TypeVar

from numpy.typing import ArrayLike

from ..errors import RoomFailedError
from ..handoff.effects import (
    DecodeEvent,
    PrefillEvent,
    RoomAsked,
    RoomDrained,
    RoomFailed,
    RoomLanded,
    RoomLeased,
    RoomReady,
)
from ..transports.device_events import Event
from .clients import DecodeClient, PrefillClient

Said = TypeVar("Said")


class _AsyncClient(Protocol[Said]):
    def fileno(self) -> int: ...
    def poll(self) -> list[Said]: ...
    def close(self) -> None: ...


class _Events(Generic[Said]):
    """Passes a client's events to `take` on the caller's own loop, until the client is closed."""

    def __init__(self, client: _AsyncClient[Said], take: Callable[[Said], None]) -> None:
        self._client, self._take = client, take
        self._loop, self._fd = asyncio.get_running_loop(), client.fileno()
        self._loop.add_reader(self._fd, self._poll)

    async def close(self) -> None:
        """Closes the client and passes on its last events: every room under way has failed."""
        self._loop.remove_reader(self._fd)
        await asyncio.to_thread(self._client.close)
        self._poll()

    def _poll(self) -> None:
        for event in self._client.poll():
            self._take(event)


class DecodeRoomHandle:
    """One room of an AsyncDecode."""

    def __init__(self, client: DecodeClient, room: int) -> None:
        loop = asyncio.get_running_loop()
        self._client, self.room = client, room
        self._ready: asyncio.Future[RoomReady] = loop.create_future()
        self._drained: asyncio.Future[None] = loop.create_future()

    def take(self, event: DecodeEvent) -> None:
        """The room's events end up here."""
        match event:
            case RoomReady():
                _resolve(self._ready, event)
            case RoomFailed():
                _fail(self._ready, event)
            case RoomDrained():
                _resolve(self._drained, None)

    async def ready(self) -> RoomReady:
        """Waits for the room to land, and returns its slots per component, its aux and the bytes that crossed.
        Raises RoomFailedError with the root cause."""
        return await asyncio.shield(self._ready)

    async def drained(self) -> None:
        """Waits until nobody writes the slots any more that the engine chose for this room: it may reuse them. Only
        for a client with `engine_slots`."""
        await asyncio.shield(self._drained)

    def release(self, *, after: Event | None = None) -> None:
        """As DecodeClient.release."""
        self._client.release(self.room, after=after)

    def abort(self) -> None:
        """As DecodeClient.abort."""
        self._client.abort(self.room)


class AsyncDecode:
    """A DecodeClient for asyncio: `async with AsyncDecode(client) as node: hand = node.expect(...)`."""

    def __init__(self, client: DecodeClient) -> None:
        self.client = client
        self._rooms: dict[int, DecodeRoomHandle] = {}

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.client.start)
        self._events = _Events(self.client, self._on_event)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._events.close()

    def expect(
        self,
        room: int,
        *,
        tokens: int,
        sources: Sequence[str],
        growth: int = 0,
        prefix: int = 0,
        prompt: ArrayLike | None = None,
        salt: bytes = b"",
        slots: Mapping[str, ArrayLike] | None = None,
        time_left_s: float = 60.0,
        enable_hisparse: bool = False,
        whole_group: bool = False,
    ) -> DecodeRoomHandle:
        """As DecodeClient.expect."""
        self.client.expect(
            room,
            tokens=tokens,
            sources=sources,
            growth=growth,
            prefix=prefix,
            prompt=prompt,
            salt=salt,
            slots=slots,
            time_left_s=time_left_s,
            enable_hisparse=enable_hisparse,
            whole_group=whole_group,
        )
        hand = self._rooms[room] = DecodeRoomHandle(self.client, room)
        return hand

    def _on_event(self, event: DecodeEvent) -> None:
        hand = self._rooms.get(event.room)
        if hand is None:
            return  # the caller used the client itself for this room
        hand.take(event)
        if isinstance(event, RoomDrained) or not self.client.engine_slots:
            del self._rooms[event.room]


class PrefillRoomHandle:
    """One room of an AsyncPrefill: `landed` and `drained` are its futures."""

    def __init__(self, client: PrefillClient, room: int) -> None:
        loop = asyncio.get_running_loop()
        self._client, self.room = client, room
        self.landed: asyncio.Future[RoomLanded] = loop.create_future()
        self.drained: asyncio.Future[None] = loop.create_future()

    def push(
        self,
        pages: ArrayLike,
        *,
        rows: tuple[int, int],
        layers: tuple[int, int] | None = None,
        component: str = "kv",
        skip: int = 0,
        after: Event | None = None,
    ) -> None:
        """As PrefillClient.push."""
        self._client.push(self.room, pages, rows=rows, layers=layers, component=component, skip=skip, after=after)

    async def finish(self, *, aux: bytes = b"", after: Event | None = None) -> RoomLanded:
        """Returns when the room has landed and its pages may be reused. Raises RoomFailedError, and then too the pages
        may be reused."""
        self._client.finish(self.room, aux=aux, after=after)
        await asyncio.shield(self.drained)
        return self.landed.result()

    async def abort(self) -> None:
        """Gives the room up, and returns when its pages may be reused."""
        self._client.abort(self.room)
        await asyncio.shield(self.drained)


class AsyncPrefill:
    """A PrefillClient for asyncio: `async with AsyncPrefill(client) as node: room = node.open(...)`."""

    def __init__(self, client: PrefillClient) -> None:
        self.client = client
        self._open: dict[int, PrefillRoomHandle] = {}

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.client.start)
        self._events = _Events(self.client, self._on_event)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._events.close()

    def open(
        self,
        room: int,
        *,
        tokens: int | None,
        time_left_s: float = 60.0,
        grants: int | None = 1,
        peers: Collection[str] | None = None,
    ) -> PrefillRoomHandle:
        """As PrefillClient.open."""
        self.client.open(room, tokens=tokens, time_left_s=time_left_s, grants=grants, peers=peers)
        handing = self._open[room] = PrefillRoomHandle(self.client, room)
        return handing

    def _on_event(self, event: PrefillEvent) -> None:
        handing = self._open.get(event.room)
        if handing is None:
            return
        match event:
            case RoomLanded():
                _resolve(handing.landed, event)
            case RoomFailed():
                _fail(handing.landed, event)
            case RoomDrained(room):
                del self._open[room]
                _resolve(handing.drained, None)
            case RoomLeased() | RoomAsked():
                pass


def _resolve(future: asyncio.Future[Said], result: Said) -> None:
    if not future.done():  # its waiter may have been cancelled, and the future with it
        future.set_result(result)


def _fail(future: asyncio.Future[Said], event: RoomFailed) -> None:
    if not future.done():
        future.set_exception(RoomFailedError(event.room, event.cause, event.detail))
        future.exception()  # no warning about a caller that never awaits it
