"""The log line of each ended request: what its record states, by name."""

from __future__ import annotations

import logging
from typing import Any

from ...errors import Cause
from ..tracing.ended_request import EndedRequest
from .logs import BURST_OF, FIELDS, PERIOD_S

log = logging.getLogger("pdtransfer.requests")

LINES_A_SECOND = 1_000  # of requests alike: an operator follows each, and a flood does not fill the disk
_TIMES = ("queue_s", "prefill_s", "transfer_s", "admission_s", "first_token_s", "total_s")
# The client's own doing, or its leaving, is nothing that an operator has to look at.
_CLIENTS = frozenset({400, 404, 405, 408, 413, 499})


def level_of(record: EndedRequest) -> int:
    """WARNING: the fleet failed a request, or had no place for it. DEBUG: what another line of this process states."""
    if record.role == "router" and record.scope == "room" and not record.retried:
        return logging.DEBUG
    unwanted = record.cause is Cause.ABORTED or record.status in _CLIENTS
    return logging.INFO if record.cause is None or unwanted else logging.WARNING


def fields_of(record: EndedRequest) -> dict[str, Any]:
    """What the line states, in order. Times are in milliseconds; what is not known is left out."""
    rooms = [f"{room:016x}" for room in record.rooms]
    stated: dict[str, Any] = {
        "request_id": record.request_id, "key_name": record.key_name,
        "room" if len(rooms) < 2 else "rooms": rooms[0] if len(rooms) == 1 else rooms,
        "trace_id": record.trace.trace_id if record.trace is not None else "",
        "state": record.state, "status": record.status,
        "cause": record.cause.value if record.cause is not None else "", "reason": record.reason,
        "retried": record.retried or None, "resumptions": record.resumptions or None,
        "path": record.path if record.scope == "request" else "",
        "model": record.model, "prefill": record.prefill, "decode": record.decode, "transport": record.transport,
        "prompt_tokens": record.prompt_tokens, "cached_tokens": record.cached_tokens, "tokens": record.tokens,
        "kv_bytes": record.kv_bytes, "hisparse": record.enable_hisparse or None,
    }  # fmt: skip
    times = {f"{name[:-2]}_ms": getattr(record, name) for name in _TIMES}
    stated |= {name: round(1e3 * seconds, 3) for name, seconds in times.items() if seconds is not None}
    stated["detail"] = record.detail
    return {name: value for name, value in stated.items() if value not in (None, "", [])}


def log_ended(record: EndedRequest) -> None:
    """Logs the record; a sink of EndedRequests. Lines of each state and cause are a kind of their own."""
    level = level_of(record)
    if log.isEnabledFor(level):
        kind = f"{record.scope} {record.state}" + (f": {record.cause.value}" if record.cause is not None else "")
        log.log(level, kind, extra={FIELDS: fields_of(record), BURST_OF: int(LINES_A_SECOND * PERIOD_S)})
