"""A client's HTTP request at a router: its ids, and the records of its rooms and of itself once they have ended."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from ...errors import SUCCESSES, Cause
from ...limits import NAME_LENGTH_MAX
from ...wire import End
from ..tracing.ended_request import EndedRequest, TraceContext
from ..tracing.spans import TimedSpan
from .completions import BadRequestError
from .router_effects import Fail, Finish, Retry

REQUEST_ID, TRACEPARENT = "X-Request-Id", "traceparent"  # headers
LEFT = 499  # the status in the record of a request whose client left
_CAUSES = {429: Cause.FULL, 502: Cause.TRANSFER, 503: Cause.PEER_LOST, 504: Cause.DEADLINE}


class _Reported(TypedDict):
    """What workers measured, as their Ends report it."""

    cached_tokens: int | None
    kv_bytes: int
    queue_s: float | None
    prefill_s: float | None
    transfer_s: float | None
    admission_s: float | None
    copy_s: float | None


@dataclass(slots=True, eq=False)
class RoomAttempt:
    """The latest room of one choice, as the router sees it; times of its monotonic clock."""

    room: int
    prompt_tokens: int
    began_s: float
    first_s: float | None = None
    tokens: int = 0
    resumptions: int = 0  # of the choice, up to this room


@dataclass(slots=True, eq=False, kw_only=True)
class ClientRequest:
    """One HTTP request while it is answered."""

    node: str
    path: str
    request_id: str
    trace: TraceContext | None = None  # its own span, or the client's where it has none
    parent_span: str = ""
    continues_trace: bool = False  # the client has sent a valid traceparent
    refused: BadRequestError | None = None  # what is wrong with it already
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
    kv_bytes: int | None = None  # as a server's answer says, where there are no rooms; None: it does not say
    kv_lost: bool = False  # and decode computed the prompt instead
    rooms: list[int] = field(default_factory=list[int])
    _attempts: dict[int, RoomAttempt] = field(default_factory=dict[int, RoomAttempt])  # by the core's request id
    _ended: list[EndedRequest] = field(default_factory=list[EndedRequest])  # rooms

    @classmethod
    def accept(
        cls, node: str, path: str, headers: Mapping[str, str], *, traced: bool = False, key_name: str = ""
    ) -> ClientRequest:
        """Takes a request's ids from its headers, or makes them. `traced`: spans of this router are exported, so it has
        one of its own, and begins a trace where there is none; else workers get the client's. An invalid traceparent is
        none, as its standard asks. A request whose id may not be passed on is `refused`, under an id of ours."""
        request_id, refused = headers.get(REQUEST_ID) or uuid.uuid4().hex, None
        try:
            checked_request_id(request_id)
        except BadRequestError as error:
            request_id, refused = uuid.uuid4().hex, error
        theirs = TraceContext.parse(headers.get(TRACEPARENT, ""))
        own, parent = theirs, ""
        if traced:
            trace_id = theirs.trace_id if theirs is not None else f"{secrets.randbits(128) | 1:032x}"
            own = TraceContext(trace_id, f"{secrets.randbits(64) | 1:016x}", theirs is None or theirs.sampled)
            parent = "" if theirs is None else theirs.span_id
        return cls(
            node=node, path=path, request_id=request_id, trace=own, parent_span=parent, key_name=key_name,
            continues_trace=theirs is not None, refused=refused,
        )  # fmt: skip

    def check(self) -> None:
        """Raises BadRequestError for what `accept` has found."""
        if self.refused is not None:
            raise self.refused

    @property
    def traceparent(self) -> str:
        """What those who work for this request get as theirs; empty for none."""
        return "" if self.trace is None else str(self.trace)

    # Its rooms

    def begun(self, request: int, prompt_tokens: int) -> None:
        """A choice got its first room."""
        self._attempts[request] = RoomAttempt(request, prompt_tokens, time.monotonic())
        self.rooms.append(request)

    def emitted(self, request: int, tokens: int) -> None:
        """So many tokens of a choice came."""
        attempt = self._attempts[request]
        attempt.tokens += tokens
        if attempt.first_s is None:
            attempt.first_s = time.monotonic()
            self.first_s = self.first_s or attempt.first_s

    def ended_room(self, end: Finish | Fail | Retry) -> EndedRequest:
        """A room has ended, and with Retry the choice has another one now. Returns its record."""
        attempt, now = self._attempts[end.request], time.monotonic()
        first_s = None if attempt.first_s is None else attempt.first_s - attempt.began_s
        success = isinstance(end, Finish)
        # Without an End of decode the router ended the answer itself, at a stop string.
        reason = (end.decode.reason if end.decode is not None else "stop") if success else ""
        record = EndedRequest(
            scope="room",
            role="router",
            node=self.node,
            rooms=(attempt.room,),
            request_id=self.request_id,
            trace=self.trace,
            prefill=end.prefill_node,
            decode=end.decode_node,
            model=self.model,
            path=self.path,
            prompt_tokens=attempt.prompt_tokens,
            tokens=attempt.tokens,
            reason=reason,
            cause=None if isinstance(end, Finish) else end.cause,
            detail="" if isinstance(end, Finish) else end.detail,
            retried=isinstance(end, Retry),
            resumptions=attempt.resumptions,
            stream=self.stream,
            enable_hisparse=end.enable_hisparse,
            ended_unix_s=time.time(),
            total_s=now - attempt.began_s,
            first_token_s=first_s,
            spans=_spans(attempt.room, first_s, now - attempt.began_s),
            **_reported(end.prefill, end.decode),
        )
        self._ended.append(record)
        if isinstance(end, Retry):
            self.retried = True
            self.rooms.append(end.next_room)
            resumptions = attempt.resumptions + end.resumed
            self.resumptions += end.resumed
            self._attempts[end.request] = RoomAttempt(
                end.next_room, end.next_prompt_tokens, now, resumptions=resumptions
            )
        return record

    # Its answer

    def answered(self, status: int, cause: Cause | None = None, detail: str = "") -> None:
        """The status of the answer; of a failure also its cause and reason."""
        if cause is None and status >= 400:
            cause = _CAUSES.get(status, Cause.ENGINE if status >= 500 else Cause.REFUSED)
        self.status, self.cause, self.detail = status, cause, detail

    def ended(self) -> EndedRequest:
        """Returns the record of the whole request. Parts of its time are those of the room that ended last."""
        total_s = time.monotonic() - self.began_s
        first_s = None if self.first_s is None else self.first_s - self.began_s
        last = self._ended[-1] if self._ended else None
        # A room that went on with an answer may have found tokens of it cached.
        cached = [None if each.resumptions else each.cached_tokens for each in self._ended if not each.retried]
        return EndedRequest(
            scope="request",
            role="router",
            node=self.node,
            rooms=tuple(self.rooms),
            request_id=self.request_id,
            trace=self.trace,
            parent_span=self.parent_span,
            key_name=self.key_name,
            prefill=self.prefill if last is None else last.prefill,
            decode=self.decode if last is None else last.decode,
            model=self.model,
            path=self.path,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=None if None in cached or not cached else sum(each or 0 for each in cached),
            tokens=sum(each.tokens for each in self._ended),
            kv_bytes=sum(each.kv_bytes or 0 for each in self._ended) if self._ended else self.kv_bytes,
            reason=last.reason if last is not None and self.cause is None else "",
            cause=self.cause,
            status=self.status,
            detail=self.detail or ("decode computed the prompt: its KV was not received" if self.kv_lost else ""),
            retried=self.retried,
            resumptions=self.resumptions,
            stream=self.stream,
            enable_hisparse=self.enable_hisparse,
            ended_unix_s=time.time(),
            total_s=total_s,
            queue_s=None if last is None else last.queue_s,
            prefill_s=None if last is None else last.prefill_s,
            transfer_s=None if last is None else last.transfer_s,
            admission_s=None if last is None else last.admission_s,
            first_token_s=first_s,
            copy_s=None if last is None else last.copy_s,
            spans=_spans(self.rooms[-1] if self.rooms else 0, first_s, total_s),
        )


def checked_request_id(text: str) -> str:
    """Returns it. Raises BadRequestError for one that a server may not take."""
    if not 1 <= len(text) <= NAME_LENGTH_MAX or not text.isascii() or not text.isprintable():
        raise BadRequestError("X-Request-Id", f"must be 1 to {NAME_LENGTH_MAX} printable ASCII characters")
    return text


def _spans(room: int, first_s: float | None, total_s: float) -> tuple[TimedSpan, ...]:
    if first_s is None:
        return ()
    parts = (("to the first token", 0.0, first_s), ("from the first token on", first_s, total_s))
    return tuple(
        TimedSpan(process="", lane="request", name=name, begin_s=begin_s, end_s=end_s, room=room)
        for name, begin_s, end_s in parts
    )


def _reported(prefill: End | None, decode: End | None) -> _Reported:
    return {
        "cached_tokens": decode.prefix if decode is not None and decode.reason in SUCCESSES else None,
        "kv_bytes": 0 if decode is None else decode.kv_bytes,
        "queue_s": _seconds(0 if prefill is None else prefill.queue_us),
        "prefill_s": _seconds(0 if prefill is None else prefill.compute_us),
        "transfer_s": _seconds(0 if prefill is None else prefill.transfer_us),
        "admission_s": _seconds(0 if decode is None else decode.admission_us),
        "copy_s": _seconds(0 if prefill is None else prefill.copy_us),
    }


def _seconds(microseconds: int) -> float | None:
    """0 stands for what is not known."""
    return microseconds / 1e6 or None
