"""The clients for asyncio: events are read on the caller's own loop, and resolve what the room's handle waits for.

Each method has the parameters of the client's method of the same name, from which it is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from ..bounds import label
from ..errors import LocalProtocolError, RoomFailedError
from ..handoff.effects import DecodeEvent, PrefillEvent, RoomDrained, RoomFailed, RoomLanded, RoomReady
from ..transports.device_events import Event
from .clients import DecodeClient, PrefillClient

Arguments = ParamSpec("Arguments")
Client = TypeVar("Client", DecodeClient, PrefillClient)
Handle = TypeVar("Handle", bound="_Handle[Any]")


class _Handle(Generic[Client]):
    """One room of a client."""

    def __init__(self, client: Client, room: int) -> None:
        loop = asyncio.get_running_loop()
        self.client, self.room = client, room
        self._landed: asyncio.Future[Any] = loop.create_future()
        self._drained: asyncio.Future[None] = loop.create_future()

    def take(self, event: DecodeEvent | PrefillEvent) -> None:
        """The room's events end up here."""
        match event:
            case RoomReady() | RoomLanded():
                self._landed.set_result(event)
            case RoomFailed(room, cause, detail):
                self._landed.set_exception(RoomFailedError(room, cause, detail))
                self._landed.exception()  # no warning about a caller that never awaits it
            case RoomDrained():
                self._drained.set_result(None)
            case _:
                pass

    async def drained(self) -> None:
        """Waits until the room's memory may be reused: prefill's pages, or the slots that decode's engine chose. Only
        for a client of decode with `engine_slots`."""
        await asyncio.shield(self._drained)


def _of_room(
    call: Callable[Concatenate[Client, int, Arguments], None],
) -> Callable[Concatenate[_Handle[Client], Arguments], None]:
    """The client's method for a room, as one of the room's handle."""

    @wraps(call)
    def of_room(self: _Handle[Client], *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        call(self.client, self.room, *args, **kwargs)

    return of_room


class DecodeRoomHandle(_Handle[DecodeClient]):
    """One room of an AsyncDecode."""

    release, abort = _of_room(DecodeClient.release), _of_room(DecodeClient.abort)

    async def ready(self) -> RoomReady:
        """Waits for the room to land, and returns its slots per component, its aux and the bytes transferred.
        Raises RoomFailedError with the root cause."""
        return await asyncio.shield(self._landed)


class PrefillRoomHandle(_Handle[PrefillClient]):
    """One room of an AsyncPrefill."""

    push = _of_room(PrefillClient.push)

    async def landed(self) -> RoomLanded:
        """Waits for the room to land. Raises RoomFailedError with the root cause."""
        return await asyncio.shield(self._landed)

    async def finish(self, *, aux: bytes = b"", after: Event | None = None) -> RoomLanded:
        """Returns once the room has landed, or raises RoomFailedError; its pages may be reused then."""
        self.client.finish(self.room, aux=aux, after=after)
        await self.drained()
        return self._landed.result()

    async def abort(self, detail: str = "") -> None:
        """Gives the room up, and returns when its pages may be reused."""
        self.client.abort(self.room, detail)
        await self.drained()


class _AsyncClient(Generic[Client, Handle]):
    """A client whose events go to the handles of its rooms, until it is closed. A room that the caller began by the
    client itself has none."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.rooms: dict[int, Handle] = {}  # not ended

    async def __aenter__(self) -> Self:
        try:
            await asyncio.to_thread(self.client.start)
            self._fd = self.client.fileno()
            asyncio.get_running_loop().add_reader(self._fd, self._poll)
        except LocalProtocolError:  # a client that another has begun is left alone
            raise
        except BaseException:  # also while `start` runs on: it is waited for
            await asyncio.to_thread(self.client.close)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the client and passes on its last events: every room under way has failed."""
        asyncio.get_running_loop().remove_reader(self._fd)
        await asyncio.to_thread(self.client.close)
        self._poll()

    def _poll(self) -> None:
        for event in self.client.poll():
            if (handle := self.rooms.get(event.room)) is not None:
                handle.take(event)
                if isinstance(event, RoomDrained) or not self.client.drains:
                    del self.rooms[event.room]


def _begins(
    call: Callable[Concatenate[Client, int, Arguments], None], handle: Callable[[Client, int], Handle]
) -> Callable[Concatenate[_AsyncClient[Client, Handle], int, Arguments], Handle]:
    """The client's method that begins a room, as one that returns the room's handle."""

    @wraps(call)
    def begins(
        self: _AsyncClient[Client, Handle], room: int, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Handle:
        room = label(room)
        call(self.client, room, *args, **kwargs)
        begun = self.rooms[room] = handle(self.client, room)
        return begun

    return begins


class AsyncDecode(_AsyncClient[DecodeClient, DecodeRoomHandle]):
    """A DecodeClient for asyncio: `async with AsyncDecode(client) as node: hand = node.expect(...)`."""

    expect = _begins(DecodeClient.expect, DecodeRoomHandle)


class AsyncPrefill(_AsyncClient[PrefillClient, PrefillRoomHandle]):
    """A PrefillClient for asyncio: `async with AsyncPrefill(client) as node: room = node.open(...)`."""

    open = _begins(PrefillClient.open, PrefillRoomHandle)
