"""What one process knows of a request or of one of its rooms, once it has ended there: the one record of it.

The router makes one for each HTTP request and one for each room, a worker one for each room. The log line, metrics, the
list of failures and exported spans are all made of these records. A time is the difference of two readings of this
process's clock, or was measured so by a worker and reported in its End. A difference of two processes' clocks is in
none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...errors import Cause
from ...limits import TRACEPARENT_LENGTH
from .spans import TimedSpan

log = logging.getLogger(__name__)

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a distributed trace, as W3C Trace Context defines it: the trace, and the span that is the parent of
    whatever comes next."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    sampled: bool = True

    @classmethod
    def parse(cls, text: str) -> TraceContext | None:
        """Reads a traceparent of version 00; None for any other text, as the specification asks."""
        match = _TRACEPARENT.fullmatch(text) if len(text) == TRACEPARENT_LENGTH else None
        if match is None or not int(match[1], 16) or not int(match[2], 16):
            return None
        return cls(match[1], match[2], bool(int(match[3], 16) & 1))

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """A request or a room that has ended in this process. None stands for what is not known here, or never was.

    `scope`: "request" for a client's HTTP request, at a router; "room" for one attempt at one choice of it.
    """

    scope: Literal["request", "room"]
    role: Literal["prefill", "decode", "router"]
    node: str  # this process
    rooms: tuple[int, ...] = ()  # scope "room": the one; "request": all that were begun for it, in order
    request_id: str = ""  # X-Request-Id: the client's, or the router's own
    trace: TraceContext | None = None  # scope "request": its own span; "room": the span above it
    parent_span: str = ""  # scope "request": the client's span
    key_name: str = ""  # scope "request": the name of the client's API key
    prefill: str = ""  # nodes, of the last attempt; an endpoint or a key where the node is not known
    decode: str = ""
    transport: str = ""  # how KV was transferred
    model: str = ""
    path: str = ""  # of the HTTP request
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of these: they were not transferred
    tokens: int | None = 0  # generated; None where a server of another engine counts them
    kv_bytes: int | None = 0  # prefill: written; decode: landed; router: as decode reports
    reason: str = ""  # of a success: "stop", "length", or "done" at prefill
    cause: Cause | None = None  # of a failure
    status: int | None = None  # scope "request": of the answer; 499 for a client that left
    detail: str = ""  # for people
    retried: bool = False  # scope "room": another attempt follows; "request": there was one
    resumptions: int = 0  # attempts that went on after tokens had been delivered, this one included
    stream: bool = False
    enable_hisparse: bool = False
    ended_unix_s: float = 0.0  # wall clock: to place it, not to compute with
    began_s: float = 0.0  # by the clock of `spans`
    total_s: float = 0.0  # prefill: until landed or failed; its pages may be read for longer
    # Parts. A router has them from its workers' reports, each measured by one of them.
    queue_s: float | None = None  # prefill: until the first step that computes it; decode: until it has slots
    prefill_s: float | None = None  # from there until the prompt is computed
    transfer_s: float | None = None  # from there until the last byte is written: what computing did not hide
    admission_s: float | None = None  # from READY until the first step that generates
    first_token_s: float | None = None  # from the begin to the first token
    copy_s: float | None = None  # time of prefill's copies, hidden or not
    spans: tuple[TimedSpan, ...] = ()

    @property
    def room(self) -> int:
        """The latest of the rooms; 0 for a request that was refused before it had one."""
        return self.rooms[-1] if self.rooms else 0

    @property
    def state(self) -> Literal["finished", "cancelled", "failed"]:
        """ "cancelled": nobody wanted it any more."""
        if self.cause is None:
            return "finished"
        return "cancelled" if self.cause is Cause.ABORTED else "failed"

    @property
    def token_s(self) -> float | None:
        """The mean time between two generated tokens."""
        if self.first_token_s is None or self.tokens is None or self.tokens < 2:
            return None
        return (self.total_s - self.first_token_s) / (self.tokens - 1)


EndedRequestSink = Callable[[EndedRequest], None]


class EndedRequests:
    """The one place of a process where records are made known. Sinks are called on the loop, in order, and must not
    wait; they handle what the world does to them."""

    def __init__(self) -> None:
        self._sinks: list[EndedRequestSink] = []

    def subscribe(self, sink: EndedRequestSink) -> None:
        """From now on the sink gets each record."""
        self._sinks.append(sink)

    def __call__(self, record: EndedRequest) -> None:
        for sink in self._sinks:
            sink(record)
