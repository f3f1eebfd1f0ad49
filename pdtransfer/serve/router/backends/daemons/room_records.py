"""The record of a room that has ended, as its router saw it."""

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
    """The latest room of one choice while it generates; times of the router's monotonic clock."""

    began_s: float
    first_s: float | None = None
    tokens: int = 0


def room_record(client: ClientRequest, attempt: RoomAttempt, end: Finish | Fail | Retry, now: float) -> EndedRequest:
    """The record of a room of `client`."""
    room, failure = end.room, None if isinstance(end, Finish) else end
    prefill, decode = room.prefill, room.decode
    first_s = None if attempt.first_s is None else attempt.first_s - attempt.began_s
    # Without an End of decode the router ended the answer itself, at a stop string.
    success = "stop" if decode is None else decode.reason
    return EndedRequest(
        scope="room",
        role="router",
        node=client.node,
        rooms=(room.id,),
        request_id=client.request_id,
        trace=client.trace,
        prefill=room.prefill_node,
        decode=room.decode_node,
        model=client.model,
        path=client.path,
        prompt_tokens=room.prompt_tokens,
        tokens=attempt.tokens,
        reason=success if failure is None else "",
        cause=None if failure is None else failure.cause,
        detail="" if failure is None else failure.detail,
        retried=isinstance(end, Retry),
        resumptions=room.resumptions,
        stream=client.stream,
        enable_hisparse=room.enable_hisparse,
        ended_unix_s=time.time(),
        total_s=now - attempt.began_s,
        first_token_s=first_s,
        spans=spans_of(room.id, first_s, now - attempt.began_s),
        cached_tokens=decode.prefix if decode is not None and decode.reason in SUCCESSES else None,
        kv_bytes=0 if decode is None else decode.kv_bytes,
        queue_s=_seconds(prefill, "queue_us"),
        prefill_s=_seconds(prefill, "compute_us"),
        transfer_s=_seconds(prefill, "transfer_us"),
        admission_s=_seconds(decode, "admission_us"),
        copy_s=_seconds(prefill, "copy_us"),
    )


def _seconds(end: End | None, field: str) -> float | None:
    """What a worker measured, in microseconds; 0 stands for what is not known."""
    return None if end is None else getattr(end, field) / 1e6 or None
