"""A worker's side of the record of an ended room: from its Begin, its End and its journey."""

from __future__ import annotations

import time

from msgspec.structs import replace

from ...errors import SUCCESSES, Cause
from ...wire import Begin, End, Identity
from ..tracing.ended_request import EndedRequest, TraceContext
from ..tracing.timeline import ADMISSION, COMPUTE, EXPOSED, FIRST_TOKEN, QUEUE, SLOTS, Journey


def timed(end: End, journey: Journey | None) -> End:
    """The End with the times of its room's parts, for the router."""
    if journey is None:
        return end
    return replace(
        end,
        queue_us=_us(journey.seconds(QUEUE) or journey.seconds(SLOTS)),
        compute_us=_us(journey.seconds(COMPUTE)),
        transfer_us=_us(journey.seconds(EXPOSED)),
        admission_us=_us(journey.seconds(ADMISSION)),
    )


def _us(seconds: float | None) -> int:
    """0 stands for what is not known."""
    return 0 if seconds is None else max(1, round(1e6 * seconds))


def ended_room(
    worker: Identity, begin: Begin, end: End, journey: Journey | None, *, tokens: int = 0, cached: int | None = None
) -> EndedRequest:
    """The record. A room that was refused at once has no journey."""
    journey = journey or Journey(now := time.monotonic(), now)
    peer = journey.peer or ("" if begin.rest_max else begin.peers[0])
    first = journey.parts.get(FIRST_TOKEN)
    success = end.reason in SUCCESSES
    queue_s = journey.seconds(QUEUE)
    return EndedRequest(
        scope="room",
        role=worker.role,
        node=worker.node,
        rooms=(begin.room,),
        request_id=begin.request_id,
        trace=TraceContext.parse(begin.traceparent),
        prefill=worker.node if worker.role == "prefill" else peer,
        decode=worker.node if worker.role == "decode" else peer,
        transport=journey.transport,
        model=worker.model,
        prompt_tokens=len(begin.prompt) // 4,
        cached_tokens=cached,
        tokens=tokens,
        kv_bytes=end.kv_bytes,
        reason=end.reason if success else "",
        cause=None if success else Cause.of(end.reason, Cause.ENGINE),
        detail=end.detail,
        enable_hisparse=begin.enable_hisparse,
        ended_unix_s=time.time(),
        began_s=journey.began_s,
        total_s=time.monotonic() - journey.began_s,
        queue_s=journey.seconds(SLOTS) if queue_s is None else queue_s,
        prefill_s=journey.seconds(COMPUTE),
        transfer_s=journey.seconds(EXPOSED),
        admission_s=journey.seconds(ADMISSION),
        first_token_s=None if first is None else first.end_s - journey.began_s,
        copy_s=end.copy_us / 1e6 if end.copy_us else None,
        spans=journey.spans,
    )
