"""The clients for asyncio: their events, read on the caller's own loop, resolve futures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Self, TypeVar

from numpy.typing import ArrayLike

from .client import DecodeClient, DecodeEvent, PrefillClient, PrefillEvent
from .effects import Drained, Landed, Leased, Ready, RoomFailed
from .errors import Cause, LocalProtocolError, RoomFailedError
from .node import Event

Said = TypeVar("Said")


class _Rooms(Generic[Said]):
    """Futures by room, filled from a client's events on the caller's own loop."""

    def __init__(self, fileno: int, poll: Callable[[], Sequence[Said]], take: Callable[[Said], None]) -> None:
        self._loop, self._fd = asyncio.get_running_loop(), fileno
        self._loop.add_reader(fileno, lambda: [take(said) for said in poll()])

    def close(self) -> None:
        self._loop.remove_reader(self._fd)


class DecodeHand:
    """One room on the decode side, for asyncio."""

    def __init__(self, client: DecodeClient, room: int, ready: asyncio.Future[Ready]) -> None:
        self._client, self.room, self._ready = client, room, ready

    async def ready(self) -> Ready:
        """The landing: slots per component, aux, bytes. Raises RoomFailedError with the root cause."""
        return await asyncio.shield(self._ready)

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
        self._ready: dict[int, asyncio.Future[Ready]] = {}

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.client.start)
        self._rooms = _Rooms(self.client.fileno(), self.client.poll, self._heard)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._rooms.close()
        await asyncio.to_thread(self.client.close)
        for future in self._ready.values():
            _fail(future, RoomFailed(0, Cause.SHUTDOWN, "this node is closed"))

    def expect(
        self,
        room: int,
        *,
        tokens: int,
        sources: Sequence[str],
        growth: int = 0,
        time_left_s: float = 60.0,
        enable_hisparse: bool = False,
    ) -> DecodeHand:
        """As DecodeClient.expect."""
        if room in self._ready:
            raise LocalProtocolError(f"room: {room:#x} is expected already")
        future = self._ready[room] = asyncio.get_running_loop().create_future()
        self.client.expect(
            room,
            tokens=tokens,
            sources=sources,
            growth=growth,
            time_left_s=time_left_s,
            enable_hisparse=enable_hisparse,
        )
        return DecodeHand(self.client, room, future)

    def _heard(self, event: DecodeEvent) -> None:
        future = self._ready.pop(event.room, None)
        if future is None:
            return
        if isinstance(event, Ready):
            if not future.cancelled():
                future.set_result(event)
        else:
            _fail(future, event)


class PrefillHand:
    """One room on the prefill side, for asyncio."""

    def __init__(self, client: PrefillClient, room: int) -> None:
        loop = asyncio.get_running_loop()
        self._client, self.room = client, room
        self.landed: asyncio.Future[Landed] = loop.create_future()
        self.drained: asyncio.Future[None] = loop.create_future()

    def push(
        self,
        pages: ArrayLike,
        *,
        rows: tuple[int, int],
        layers: tuple[int, int] | None = None,
        component: str = "kv",
        after: Event | None = None,
    ) -> None:
        """As PrefillClient.push."""
        self._client.push(self.room, pages, rows=rows, layers=layers, component=component, after=after)

    async def finish(self, *, aux: bytes = b"", after: Event | None = None) -> Landed:
        """Returns when the room has landed and the pages may be reused. Raises RoomFailedError, drained as well."""
        self._client.finish(self.room, aux=aux, after=after)
        await asyncio.shield(self.drained)
        return self.landed.result()

    async def abort(self) -> None:
        """Returns when the pages may be reused."""
        self._client.abort(self.room)
        await asyncio.shield(self.drained)


class AsyncPrefill:
    """A PrefillClient for asyncio: `async with AsyncPrefill(client) as node: room = node.open(...)`."""

    def __init__(self, client: PrefillClient) -> None:
        self.client = client
        self._open: dict[int, PrefillHand] = {}

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.client.start)
        self._rooms = _Rooms(self.client.fileno(), self.client.poll, self._heard)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.client.close)
        self._rooms.close()

    def open(self, room: int, *, tokens: int, time_left_s: float = 60.0, grants: int = 1) -> PrefillHand:
        """As PrefillClient.open."""
        if room in self._open:
            raise LocalProtocolError(f"room: {room:#x} is open already")
        handing = self._open[room] = PrefillHand(self.client, room)
        self.client.open(room, tokens=tokens, time_left_s=time_left_s, grants=grants)
        return handing

    def _heard(self, event: PrefillEvent) -> None:
        handing = self._open.get(event.room)
        if handing is None:
            return
        match event:
            case Landed():
                handing.landed.set_result(event)
            case RoomFailed():
                _fail(handing.landed, event)
            case Drained(room):
                del self._open[room]
                handing.drained.set_result(None)
            case Leased():
                pass


def _fail(future: asyncio.Future[Said], event: RoomFailed) -> None:
    if not future.done():
        future.set_exception(RoomFailedError(event.room, event.cause, event.detail))
        future.exception()  # whoever never asks is not scolded for it
