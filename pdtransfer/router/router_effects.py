"""What a router's core says of a request: that it is under way, its tokens, its one end; and what that is in HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..errors import Cause
from ..handoff.effects import Send
from ..wire import End

STATUSES = {
    Cause.ABORTED: 499,
    Cause.DEADLINE: 504,
    Cause.PEER_LOST: 503,
    Cause.PEER_RESTARTED: 503,
    Cause.BREACH: 502,
    Cause.REFUSED: 400,
    Cause.FULL: 429,
    Cause.TRANSFER: 502,
    Cause.ENGINE: 500,
    Cause.SHUTDOWN: 503,
}  # what a client is told, as HTTP says it
FINAL_CAUSES = frozenset({Cause.ABORTED, Cause.DEADLINE})  # nobody waits any more: not tried again
# Who says so speaks of what is between the two: either may be at fault.
MUTUAL_CAUSES = frozenset({Cause.PEER_LOST, Cause.PEER_RESTARTED, Cause.TRANSFER, Cause.BREACH, Cause.REFUSED})


@dataclass(frozen=True, slots=True)
class Emit:
    """The next generated ids of a request, in order, each once."""

    request: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Finish:
    """The request has all its tokens. `prefill` is None where that worker was lost after its part was done."""

    request: int
    room: int
    decode: End
    prefill: End | None
    decode_node: str
    prefill_node: str
    enable_hisparse: bool = False  # how it was decoded


@dataclass(frozen=True, slots=True)
class Fail:
    """The request will get no more tokens; `retry_ms` says when it is worth asking again, 0 that nobody knows."""

    request: int
    cause: Cause
    detail: str
    status: int
    retry_ms: int


@dataclass(frozen=True, slots=True)
class Noticed:
    """A worker is there from now on, or is not, for the reason in `why`; said as often as that changes."""

    peer: str
    why: str


RoutingEffect: TypeAlias = Send | Emit | Finish | Fail | Noticed


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is under way; it ends with one Finish or one Fail."""

    request: int
    effects: list[RoutingEffect]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request was not taken: the same fields as Fail."""

    cause: Cause
    detail: str
    status: int
    retry_ms: int
