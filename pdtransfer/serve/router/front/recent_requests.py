"""What a router remembers of the requests that ended lately: failures with their cause, rates and times."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable

from msgspec.structs import replace

from ...tracing.ended_request import EndedRequest
from ..fleet.status import FailureStatus

FAILURES_MAX = 50
LATEST_MAX = 1_000  # requests that quantiles are taken of
LATEST_S = 60.0  # and how long ago they may have ended
RATE_S = 10.0


class RecentRequests:
    """A sink of the router's records of ended requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self.failures: deque[FailureStatus] = deque(maxlen=FAILURES_MAX)
        self.answers: Counter[str] = Counter()  # by HTTP status
        self._latest: deque[tuple[float, float | None]] = deque(maxlen=LATEST_MAX)  # end, seconds to the first token

    def __call__(self, record: EndedRequest) -> None:
        """Takes one record. A room's own is one attempt at a request: only those that were retried are kept, since the
        request's record has the last one's cause."""
        whole = record.scope == "request"
        if whole:
            self.answers[str(record.status)] += 1
            self._latest.append((self._clock(), record.first_token_s))
        if record.state == "failed" and (whole or record.retried):
            assert record.cause is not None
            self._failed(
                FailureStatus(
                    time=record.ended_unix_s,
                    room=f"{record.room:016x}" if record.room else None,
                    request_id=record.request_id or None,
                    cause=record.cause.value,
                    detail=record.detail,
                    status=record.status if whole else None,
                    prefill=record.prefill or None,
                    decode=record.decode or None,
                    retried=record.retried and not whole,
                )
            )

    def _failed(self, failure: FailureStatus) -> None:
        """Keeps a failure. One like the latest is counted there, so that a flood of them hides no other."""
        if self.failures:
            latest = self.failures[0]
            if replace(latest, count=1, time=failure.time, room=failure.room, request_id=failure.request_id) == failure:
                self.failures[0] = replace(failure, count=latest.count + 1)
                return
        self.failures.appendleft(failure)

    @property
    def uptime_s(self) -> float:
        """Seconds since the router began."""
        return self._clock() - self._began_s

    @property
    def requests_s(self) -> float:
        """Requests answered in a second, over the last RATE_S. A full memory covers less time than that."""
        now = self._clock()
        since = max(now - RATE_S, self._began_s)
        if len(self._latest) == LATEST_MAX:
            since = max(since, self._latest[0][0])
        return sum(end >= since for end, _ in self._latest) / max(now - since, 1.0)

    def first_token_ms(self) -> dict[str, float] | None:
        """Returns p50 and p99 of the time to the first token, over requests of the last LATEST_S; None without any."""
        since = self._clock() - LATEST_S
        times = sorted(ms for end, ms in self._latest if ms is not None and end >= since)
        if not times:
            return None
        return {f"p{of}": times[math.ceil(len(times) * of / 100) - 1] * 1e3 for of in (50, 99)}
