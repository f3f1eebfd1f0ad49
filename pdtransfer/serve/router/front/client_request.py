"""A client's HTTP request at a router: its ids, its outcome, and its record once it has ended."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ....errors import Cause
from ....limits import NAME_LENGTH_MAX
from ...tracing.ended_request import EndedRequest, TraceContext
from ...tracing.spans import TimedSpan
from .json_bodies import RefusedRequestError

REQUEST_ID, TRACEPARENT = "X-Request-Id", "traceparent"  # headers
LEFT = 499  # the status in the record of a request whose client left
_CAUSES = {429: Cause.FULL, 502: Cause.TRANSFER, 503: Cause.PEER_LOST, 504: Cause.DEADLINE}


@dataclass(slots=True, eq=False, kw_only=True)
class ClientRequest:
    """One HTTP request while it is answered."""

    node: str
    path: str
    request_id: str
    trace: TraceContext | None = None  # its own span, or the client's where it has none
    client_trace: TraceContext | None = None
    refused: RefusedRequestError | None = None  # what is wrong with it already
    key_name: str = ""  # of its API key
    began_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None  # when the first token came
    status: int = LEFT  # until it is answered
    cause: Cause | None = Cause.ABORTED
    detail: str = "the client disconnected"
    model: str = ""
    prompt_tokens: int | None = None
    stream: bool = False
    enable_hisparse: bool = False
    retried: bool = False
    resumptions: int = 0
    prefill: str = ""
    decode: str = ""
    kv_bytes: int | None = None  # as a server's answer reports, where there are no rooms; None: it does not
    kv_lost: bool = False  # and decode computed the prompt instead
    authorization: str = ""  # these two: the client's headers, for servers that it is passed on to
    tracestate: str = ""
    rooms: list[int] = field(default_factory=list[int])  # on daemons
    ended_rooms: list[EndedRequest] = field(default_factory=list[EndedRequest])

    @classmethod
    def accept(cls, node: str, path: str, headers: Mapping[str, str], *, traced: bool = False) -> ClientRequest:
        """Takes a request's ids from its headers, or makes them. `traced`: spans of this router are exported, so it has
        one of its own, and begins a trace where there is none; else workers get the client's. An invalid traceparent is
        ignored, as its standard asks. A request whose id may not be passed on is `refused`, under an id that this
        router makes."""
        request_id, refused = headers.get(REQUEST_ID) or uuid.uuid4().hex, None
        if len(request_id) > NAME_LENGTH_MAX or not request_id.isascii() or not request_id.isprintable():
            refused = RefusedRequestError(REQUEST_ID, f"must be 1 to {NAME_LENGTH_MAX} printable ASCII characters")
            request_id = uuid.uuid4().hex
        trace = theirs = TraceContext.parse(headers.get(TRACEPARENT, ""))
        if traced:
            trace_id = theirs.trace_id if theirs is not None else f"{secrets.randbits(128) | 1:032x}"
            trace = TraceContext(trace_id, f"{secrets.randbits(64) | 1:016x}", theirs is None or theirs.sampled)
        return cls(node=node, path=path, request_id=request_id, trace=trace, client_trace=theirs, refused=refused)

    @property
    def traceparent(self) -> str:
        """What those who work for this request get as theirs; empty for none."""
        return "" if self.trace is None else str(self.trace)

    def answered(self, status: int, cause: Cause | None = None, detail: str = "") -> None:
        """The status of the answer; of a failure also its cause and reason."""
        if cause is None and status >= 400:
            cause = _CAUSES.get(status, Cause.ENGINE if status >= 500 else Cause.REFUSED)
        self.status, self.cause, self.detail = status, cause, detail

    def record(self, **more: Any) -> EndedRequest:
        """The record of one of its rooms: what a room has of its request, and `more`."""
        return EndedRequest(
            scope="room",
            role="router",
            node=self.node,
            request_id=self.request_id,
            trace=self.trace,
            model=self.model,
            path=self.path,
            stream=self.stream,
            ended_unix_s=time.time(),
            **more,
        )

    def ended(self) -> EndedRequest:
        """Returns the record of the whole request. Parts of its time are those of the room that ended last."""
        total_s = time.monotonic() - self.began_s
        first_s = None if self.first_s is None else self.first_s - self.began_s
        rooms, above = self.ended_rooms, self.client_trace
        tokens = None if not rooms and self.decode else sum(room.tokens or 0 for room in rooms)
        kv_bytes = sum(room.kv_bytes or 0 for room in rooms) if rooms else self.kv_bytes
        # A room that went on with an answer may have found tokens of it cached.
        cached = [None if room.resumptions else room.cached_tokens for room in rooms if not room.retried]
        return replace(
            rooms[-1] if rooms else self.record(prefill=self.prefill, decode=self.decode),
            scope="request",
            rooms=tuple(self.rooms),
            parent_span="" if above is None or above is self.trace else above.span_id,
            key_name=self.key_name,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=None if None in cached or not cached else sum(filter(None, cached)),
            tokens=tokens,
            kv_bytes=kv_bytes,
            reason=rooms[-1].reason if rooms and self.cause is None else "",
            cause=self.cause,
            status=self.status,
            detail=self.detail or ("decode computed the prompt: its KV was not received" if self.kv_lost else ""),
            retried=self.retried,
            resumptions=self.resumptions,
            enable_hisparse=self.enable_hisparse,
            ended_unix_s=time.time(),
            total_s=total_s,
            first_token_s=first_s,
            spans=spans_of(self.rooms[-1] if self.rooms else 0, first_s, total_s),
        )


def spans_of(room: int, first_s: float | None, total_s: float) -> tuple[TimedSpan, ...]:
    """The parts of a request's time, or of one room's."""
    if first_s is None:
        return ()
    parts = (("to the first token", 0.0, first_s), ("from the first token on", first_s, total_s))
    return tuple(
        TimedSpan(process="", lane="request", name=name, begin_s=begin_s, end_s=end_s, room=room)
        for name, begin_s, end_s in parts
    )
