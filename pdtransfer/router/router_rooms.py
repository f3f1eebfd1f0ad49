"""The router's view of a room: one leg on each of two workers, a state table for each, and the request."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import Cause
from ..handoff.states import Word
from ..wire import Begin, End, Sampling
from .pool_worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A client's request. `prompt` holds u32 token ids as on the wire; a `model` of None accepts any."""

    prompt: bytes
    sampling: Sampling
    model: str | None = None
    enable_hisparse: bool = False
    salt: bytes = b""
    request_id: str = ""  # this and the next: as in Begin
    traceparent: str = ""


def dense(request: CompletionRequest) -> CompletionRequest:
    """Returns the same request without HiSparse."""
    return replace(request, enable_hisparse=False)


class Leg(Word):
    """A room on one of its two workers."""

    BEGINNING = "beginning"  # Begin repeats
    RUNNING = "running"
    CANCELLING = "cancelling"  # Cancel repeats
    ENDED = "ended"  # its End and all tokens that it counts have arrived, or its worker is lost


class LegEvent(Word):
    """What happens to a room on one worker."""

    BEGUN = "begun"
    CANCEL = "cancel"
    END = "end"
    LOSE = "lose"


_L, _LE = Leg, LegEvent

LEG: dict[tuple[Leg, LegEvent], Leg] = {
    (_L.BEGINNING, _LE.BEGUN): _L.RUNNING,
    (_L.BEGINNING, _LE.CANCEL): _L.CANCELLING,
    (_L.BEGINNING, _LE.END): _L.ENDED,
    (_L.BEGINNING, _LE.LOSE): _L.ENDED,
    (_L.RUNNING, _LE.BEGUN): _L.RUNNING,
    (_L.RUNNING, _LE.CANCEL): _L.CANCELLING,
    (_L.RUNNING, _LE.END): _L.ENDED,
    (_L.RUNNING, _LE.LOSE): _L.ENDED,
    (_L.CANCELLING, _LE.BEGUN): _L.CANCELLING,
    (_L.CANCELLING, _LE.END): _L.ENDED,
    (_L.CANCELLING, _LE.LOSE): _L.ENDED,
    (_L.ENDED, _LE.BEGUN): _L.ENDED,
}


class RouterRoom(Word):
    """A room as its client sees it. One that is FINISHED or FAILED stays until both legs have ended."""

    OPEN = "open"
    FINISHED = "finished"
    FAILED = "failed"


class RouterEvent(Word):
    """What happens to a room at its router."""

    FINISH = "finish"
    FAIL = "fail"


ROUTER_ROOM: dict[tuple[RouterRoom, RouterEvent], RouterRoom] = {
    (RouterRoom.OPEN, RouterEvent.FINISH): RouterRoom.FINISHED,
    (RouterRoom.OPEN, RouterEvent.FAIL): RouterRoom.FAILED,
}


@dataclass(slots=True, eq=False)
class RoomLeg:
    """A room on one worker."""

    worker: Worker
    begin: Begin
    node: str
    state: Leg = Leg.BEGINNING
    pending_end: End | None = None  # a success that waits for missing tokens
    end: End | None = None
    repeat_ms: int = 0


@dataclass(slots=True, eq=False)
class RoutedRoom:
    """One attempt at a request."""

    id: int
    request_id: int  # the id of the request's first room
    request: CompletionRequest
    prefill: RoomLeg
    decode: RoomLeg
    deadline: float
    retried: bool
    state: RouterRoom = RouterRoom.OPEN
    received: int = 0
    cause: Cause = Cause.ABORTED  # why it failed

    @property
    def legs(self) -> tuple[RoomLeg, RoomLeg]:
        """Prefill, then decode."""
        return self.prefill, self.decode

    @property
    def landed(self) -> bool:
        """Whether decode has the prompt's KV, so that the prefill worker no longer matters."""
        return self.received > 0 or self.decode.state is Leg.ENDED
