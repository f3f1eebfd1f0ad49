"""The rooms of one client's request while they generate, and the record of each that has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .....errors import SUCCESSES
from .....wire import End
from ....tracing.ended_request import EndedRequest
from ...front.client_request import ClientRequest, spans_of
from .router_effects import Fail, Finish, Retry


@dataclass(slots=True, eq=False)
class RoomAttempt:
    """The latest room of one choice, as the router sees it; times of its monotonic clock."""

    room: int
    prompt_tokens: int
    began_s: float
    first_s: float | None = None
    tokens: int = 0
    resumptions: int = 0  # of the choice, up to this room


class RoomRecords:
    """The rooms of `client`, by the core's request ids."""

    def __init__(self, client: ClientRequest) -> None:
        self.client = client
        self._attempts: dict[int, RoomAttempt] = {}

    def begun(self, request: int, prompt_tokens: int) -> None:
        """A choice got its first room."""
        self._attempts[request] = RoomAttempt(request, prompt_tokens, time.monotonic())
        self.client.rooms.append(request)

    def emitted(self, request: int, tokens: int) -> None:
        """So many tokens of a choice came."""
        attempt = self._attempts[request]
        attempt.tokens += tokens
        if attempt.first_s is None:
            attempt.first_s = time.monotonic()
            self.client.first_s = self.client.first_s or attempt.first_s

    def ended(self, end: Finish | Fail | Retry) -> EndedRequest:
        """A room has ended, and with Retry the choice has another one now. Returns its record."""
        client, attempt, now = self.client, self._attempts[end.request], time.monotonic()
        prefill, decode = end.prefill, end.decode
        first_s = None if attempt.first_s is None else attempt.first_s - attempt.began_s
        success = isinstance(end, Finish)
        # Without an End of decode the router ended the answer itself, at a stop string.
        reason = (decode.reason if decode is not None else "stop") if success else ""
        record = EndedRequest(
            scope="room",
            role="router",
            node=client.node,
            rooms=(attempt.room,),
            request_id=client.request_id,
            trace=client.trace,
            prefill=end.prefill_node,
            decode=end.decode_node,
            model=client.model,
            path=client.path,
            prompt_tokens=attempt.prompt_tokens,
            tokens=attempt.tokens,
            reason=reason,
            cause=None if isinstance(end, Finish) else end.cause,
            detail="" if isinstance(end, Finish) else end.detail,
            retried=isinstance(end, Retry),
            resumptions=attempt.resumptions,
            stream=client.stream,
            enable_hisparse=end.enable_hisparse,
            ended_unix_s=time.time(),
            total_s=now - attempt.began_s,
            first_token_s=first_s,
            spans=spans_of(attempt.room, first_s, now - attempt.began_s),
            cached_tokens=decode.prefix if decode is not None and decode.reason in SUCCESSES else None,
            kv_bytes=0 if decode is None else decode.kv_bytes,
            queue_s=_seconds(prefill, "queue_us"),
            prefill_s=_seconds(prefill, "compute_us"),
            transfer_s=_seconds(prefill, "transfer_us"),
            admission_s=_seconds(decode, "admission_us"),
            copy_s=_seconds(prefill, "copy_us"),
        )
        client.ended_rooms.append(record)
        if isinstance(end, Retry):
            client.retried = True
            client.rooms.append(end.next_room)
            resumptions = attempt.resumptions + end.resumed
            client.resumptions += end.resumed
            self._attempts[end.request] = RoomAttempt(
                end.next_room, end.next_prompt_tokens, now, resumptions=resumptions
            )
        return record


def _seconds(end: End | None, field: str) -> float | None:
    """What a worker measured, in microseconds; 0 stands for what is not known."""
    return None if end is None else getattr(end, field) / 1e6 or None
