"""A room as its router keeps it: one leg on each of two workers, with a table each; the request behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import Cause
from ..handoff.states import Word
from ..wire import Begin, End, Sampling
from .worker_pool import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client wants. `prompt` holds the wire's u32 token ids; `model` None takes whatever is served."""

    prompt: bytes
    sampling: Sampling
    model: str | None = None
    enable_hisparse: bool = False
    salt: bytes = b""


def dense(request: Request) -> Request:
    """The same without HiSparse."""
    return replace(request, enable_hisparse=False)


class Leg(Word):
    """A room on one of its two workers."""

    BEGINNING = "beginning"  # Begin repeats
    RUNNING = "running"
    CANCELLING = "cancelling"  # Cancel repeats
    ENDED = "ended"  # its End has arrived, with all tokens that it counts, or its worker is lost


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
    held: End | None = None  # a success that waits for its tokens
    end: End | None = None
    repeat_ms: int = 0


@dataclass(slots=True, eq=False)
class RoutedRoom:
    """One attempt at a request."""

    id: int
    label: int  # the request's: its first room's id
    request: Request
    prefill: RoomLeg
    decode: RoomLeg
    deadline: float
    retried: bool
    state: RouterRoom = RouterRoom.OPEN
    received: int = 0
    cause: Cause = Cause.ABORTED  # of its failure

    @property
    def legs(self) -> tuple[RoomLeg, RoomLeg]:
        """Prefill, then decode."""
        return self.prefill, self.decode

    @property
    def landed(self) -> bool:
        """Whether decode has what prefill had to give: from then on prefill's fate does not matter."""
        return self.received > 0 or self.decode.state is Leg.ENDED
