"""The HTTP status of an answer that failed, by its cause."""

from __future__ import annotations

from ....errors import Cause

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
}
