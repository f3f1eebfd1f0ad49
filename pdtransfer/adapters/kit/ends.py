"""How hand-offs end: a warning where they fail one after the other. And how long an engine stands still until nothing
reads the pages that it is about to reuse."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ...client.api import PrefillClient
from ...errors import Cause

log = logging.getLogger(__name__)

FAILURES_MAX = 5  # in a row, before they are a warning
WHAT_TO_DO = {
    Cause.DEADLINE: "check that the router sends each request to both engines, prefill's queue, and decode's memory",
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
                "the last %d hand-offs have all failed, the latest as %s: %s. What to do: %s; docs/troubleshooting.md",
                FAILURES_MAX, cause.value, detail, WHAT_TO_DO[cause],
            )  # fmt: skip


QUIESCE_S = 30.0  # that an engine stands still, for all requests of a step together


class Quiescence:
    """Gives rooms up and waits until they are drained.

    What waits take is taken from QUIESCE_S, which comes back while the engine runs, second by second. So no step waits
    longer, however many of its requests are given up, one by one or at once.
    """

    def __init__(self, client: PrefillClient, clock: Callable[[], float]) -> None:
        self._client, self._clock = client, clock
        self._left_s, self._since = QUIESCE_S, clock()

    def wait(self, rooms: Iterable[tuple[int, str]]) -> None:
        """Returns when nothing reads the pages of these rooms, each with its request's name, or when the time is used
        up. Whatever is read from then on is of rooms that have failed: nobody uses it."""
        rooms = list(rooms)
        began = self._clock()
        self._left_s = min(QUIESCE_S, self._left_s + began - self._since)
        for room, _ in rooms[1:]:
            self._client.abort(room)  # all at once: each then waits for the longest alone
        for room, name in rooms:
            left_s = max(0.0, self._left_s - (self._clock() - began))
            if not self._client.quiesce(room, left_s):
                log.error("%s: its pages are still read after %s s, and are reused", name, QUIESCE_S)
        self._since = self._clock()
        self._left_s = max(0.0, self._left_s - (self._since - began))
