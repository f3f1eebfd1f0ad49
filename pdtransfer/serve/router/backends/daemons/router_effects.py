"""Effects of the router's core: accepted or refused requests, tokens, and one end each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .....errors import Cause
from .....handoff.peers import Send
from .....wire import End

FINAL_CAUSES = frozenset({Cause.ABORTED, Cause.DEADLINE})  # no client waits any more: no retry
# The reporting worker means the link between the two, so either may be at fault.
MUTUAL_CAUSES = frozenset({Cause.PEER_LOST, Cause.PEER_RESTARTED, Cause.TRANSFER, Cause.BREACH, Cause.REFUSED})


@dataclass(frozen=True, slots=True)
class Emit:
    """The next generated ids of a request, in order, each sent once, with their packed logprobs."""

    request: int
    ids: list[int]
    logprobs: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomEnded:
    """A room of a request has ended. Without a cause the request is complete. Else it has failed, but with a next room
    it goes on there. `prefill` and `decode` are the Ends that have come. There is none where the router ended the
    answer (`Routing.stop`), and none of a prefill worker that was lost after it had done its part."""

    request: int
    id: int  # of the room
    prefill_node: str
    decode_node: str
    prefill: End | None = None
    decode: End | None = None
    prompt_tokens: int = 0
    enable_hisparse: bool = False  # how it was decoded
    resumptions: int = 0  # rooms that went on with the answer after its first, this one included
    cause: Cause | None = None
    detail: str = ""
    retry_ms: int = 0  # after which a retry may succeed, 0 for unknown
    next_room: int | None = None
    resumed: bool = False  # tokens had been delivered, and the next room goes on after them


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """A worker was connected (empty `why`) or lost, for the reason `why`. Reported at every change. `orderly`: it sent
    Goodbye."""

    peer: str
    why: str
    orderly: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker that was removed has no room any more: its connection may be closed."""

    peer: str


RoutingEffect: TypeAlias = Send | Emit | RoomEnded | WorkerChanged | WorkerLeft
