"""Effects of the router's core: accepted or refused requests, tokens, one end each, and their HTTP statuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .....errors import Cause
from .....handoff.send import Send
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


@dataclass(frozen=True, slots=True)
class Finish:
    """The request is complete. `prefill` is None where that worker was lost after it had done its part. Both are None
    where the router ended the answer (`Routing.stop`)."""

    request: int
    room: int
    decode: End | None
    prefill: End | None
    decode_node: str
    prefill_node: str
    enable_hisparse: bool = False  # how it was decoded
    resumptions: int = 0  # rooms that went on with the answer after its first


@dataclass(frozen=True, slots=True)
class Fail:
    """The request failed. `retry_ms` is the time after which a retry may succeed, 0 for unknown. `prefill` and `decode`
    are the Ends that have come."""

    request: int
    cause: Cause
    detail: str
    status: int
    retry_ms: int
    prefill_node: str = ""
    decode_node: str = ""
    prefill: End | None = None
    decode: End | None = None
    enable_hisparse: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    """The request's room failed, and it has another one from now on; fields as in Fail. `resumed`: tokens had been
    delivered, and that room goes on after them."""

    request: int
    cause: Cause
    detail: str
    next_room: int
    next_prompt_tokens: int
    resumed: bool
    prefill_node: str
    decode_node: str
    prefill: End | None
    decode: End | None
    enable_hisparse: bool


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


RoutingEffect: TypeAlias = Send | Emit | Finish | Fail | Retry | WorkerChanged | WorkerLeft


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was accepted; it ends with one Finish or one Fail."""

    request: int
    effects: list[RoutingEffect]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request was refused; fields as in Fail."""

    cause: Cause
    detail: str
    status: int
    retry_ms: int
