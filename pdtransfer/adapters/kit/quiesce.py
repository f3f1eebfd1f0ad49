"""How long an engine may stand still until nothing reads the pages that it is about to reuse."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ...client.api import PrefillClient

QUIESCE_S = 30.0  # that an engine stands still, for all requests of a step together

log = logging.getLogger(__name__)


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
