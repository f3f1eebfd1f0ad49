"""A warning where hand-offs fail one after the other: with the latest reason, and what to do about it."""

from __future__ import annotations

import logging

from ...errors import Cause

log = logging.getLogger(__name__)

FAILURES_MAX = 5  # in a row, before they are a warning
WHAT_TO_DO = {
    Cause.DEADLINE: "check that the router sends each request to both engines, and how long prefill's queue is",
    Cause.PEER_LOST: "check that the other engine runs, and that this host reaches the address in its first line",
    Cause.PEER_RESTARTED: "read the other engine's log: it has been started again",
    Cause.BREACH: "install the same version of pdtransfer on both sides",
    Cause.REFUSED: "run `pdtransfer doctor PREFILL_URL DECODE_URL`, and start both engines with equal facts",
    Cause.FULL: "send the engines fewer requests at a time",
    Cause.TRANSFER: "run `pdtransfer doctor` on both hosts, and check `transport` and its ports",
    Cause.ENGINE: "read the other engine's log",
    Cause.SHUTDOWN: "wait until the other engine has been started again",
}


class FailuresInARow:
    """Hand-offs of one engine, by how they ended, that nobody gave up."""

    def __init__(self) -> None:
        self._count = 0

    def landed(self) -> None:
        """One has succeeded."""
        self._count = 0

    def failed(self, cause: Cause, detail: str) -> None:
        """One has failed. The fifth in a row is a warning, and the ones behind it are not, until one has succeeded. An
        aborted one was given up at either end, which tells nothing."""
        if cause is Cause.ABORTED:
            return
        self._count += 1
        if self._count == FAILURES_MAX:
            log.warning(
                "the last %d hand-offs have all failed, the latest one so: %s: %s. What to do: %s",
                FAILURES_MAX, cause.value, detail, WHAT_TO_DO[cause],
            )  # fmt: skip
