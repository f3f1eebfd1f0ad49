"""What every router shows of itself: its metrics, the requests that ended lately, and the document on /status."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path

import msgspec
import prometheus_client as prometheus
from aiohttp import web
from msgspec.structs import replace

from ....limits import METRICS_LABELS_MAX
from ...process.process_metrics import process_registry
from ...tracing.ended_request import EndedRequest
from ..fleet.status import FailureStatus, FleetStatus

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
NO_MODEL = ""  # of a request that names none that is served


class RouterMetrics:
    """The router's metrics in a registry of their own."""

    def __init__(self, *, node: str) -> None:
        self.registry = process_registry(role="router", node=node)
        self._answers = prometheus.Counter(
            "pdtransfer_requests", "Completions answered", ["status", "model"], registry=self.registry
        )
        make = partial(prometheus.Histogram, labelnames=["model"], buckets=SECONDS_BUCKETS, registry=self.registry)
        self.first_token = make("pdtransfer_first_token_seconds", "From accepting a request to its first token")
        self._request = make("pdtransfer_request_seconds", "From accepting a request to its end")
        self._labels: set[str] = set()

    def label(self, model: str, served: Callable[[], Container[str]] = tuple) -> str:
        """The label of a model. Those that were never `served` have one together, as a client may name any."""
        # One place is that of all other models.
        if model not in self._labels and len(self._labels) < METRICS_LABELS_MAX - 1 and model in served():
            self._labels.add(model)
        return model if model in self._labels else NO_MODEL

    def count(self, status: int) -> None:
        """Counts an answer to a request that was not accepted."""
        self._answers.labels(str(status), NO_MODEL).inc()

    def ended(self, record: EndedRequest) -> None:
        """A request was answered, or its client left. Its time counts if some worker had it."""
        if record.scope == "request":
            model = self.label(record.model)
            self._answers.labels(str(record.status), model).inc()
            if record.decode:
                self._request.labels(model).observe(record.total_s)


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


SHARED_S = 0.2  # a document is made this often at most, however many people watch
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class StatusPages:
    """The two paths; `make` returns the document as it is now."""

    def __init__(self, make: Callable[[], FleetStatus]) -> None:
        self._make = make
        self._document, self._made_s = b"", float("-inf")
        self._page = Path(__file__).with_name("status_page.html").read_bytes()
        self._headers = {
            "Content-Security-Policy": content_security_policy(self._page.decode()),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }

    @property
    def routes(self) -> list[web.RouteDef]:
        """The routes of an application."""
        return [web.get("/status", self._on_status), web.get("/", self._on_page)]

    async def _on_status(self, _: web.Request) -> web.Response:
        now = time.monotonic()
        if now - self._made_s >= SHARED_S:
            self._document, self._made_s = msgspec.json.encode(self._make()), now
        headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        return web.Response(body=self._document, headers=headers, content_type="application/json")

    async def _on_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._page, headers=self._headers, content_type="text/html", charset="utf-8")


def content_security_policy(page: str) -> str:
    """Allows the page's own script and style, by their digests, and requests to the router itself; nothing else."""
    sources: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources[kind].append(f"'sha256-{digest}'")
    assert all(sources.values()), "the page has a script and a style"
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(sources['script'])}",
            f"style-src {' '.join(sources['style'])}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    )
