"""The router's metrics for /metrics; the core's own counters are read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..bus import Bus
from ..process.process_metrics import process_registry
from .routing import Routing

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class AnswerMetrics:
    """What every router counts of its answers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("pdtransfer_requests", "Completions answered", ["status"], registry=registry)
        seconds = "pdtransfer_first_token_seconds", "Time from accepting a request to its first token"
        self.first_token_seconds = Histogram(*seconds, buckets=SECONDS_BUCKETS, registry=registry)
        seconds = "pdtransfer_request_seconds", "Time from accepting a request to its end"
        self._request_seconds = Histogram(*seconds, buckets=SECONDS_BUCKETS, registry=registry)

    def count(self, status: int, seconds: float | None = None) -> None:
        """Counts an answer; `seconds` is its time, for requests that were accepted."""
        self._requests.labels(str(status)).inc()
        if seconds is not None:
            self._request_seconds.observe(seconds)


class RouterMetrics(Collector):
    """The router's metrics in a registry of their own."""

    def __init__(self, routing: Routing, bus: Bus, *, node: str) -> None:
        self.registry = process_registry(role="router", node=node)
        self._routing, self._bus = routing, bus
        of = self.registry
        self.answers = AnswerMetrics(of)
        self.prompt_tokens = Counter("pdtransfer_prompt_tokens", "Tokens of accepted prompts", registry=of)
        self.generated_tokens = Counter("pdtransfer_generated_tokens", "Tokens generated", registry=of)
        self.breaches = Counter("pdtransfer_breaches", "Protocol breaches of workers", registry=of)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields current gauges, and counters of the core and the bus."""
        yield GaugeMetricFamily("pdtransfer_requests_open", "Unfinished requests", self._routing.request_count)
        yield GaugeMetricFamily(
            "pdtransfer_rooms", "Rooms that have not ended on both workers", self._routing.room_count
        )
        yield CounterMetricFamily("pdtransfer_retries", "Rooms prefilled again after a failure", self._routing.retries)
        placed = self._routing.prefix_tokens
        yield CounterMetricFamily(
            "pdtransfer_prefix_placed_tokens", "Prompt tokens placed where they were cached", placed
        )
        yield CounterMetricFamily("pdtransfer_bus_sent", "Messages sent", self._bus.sent)
        yield CounterMetricFamily("pdtransfer_bus_received", "Messages received", self._bus.received)
        yield CounterMetricFamily("pdtransfer_bus_dropped", "Messages that could not be sent", self._bus.dropped)
        labels = ["peer", "role"]
        usable = GaugeMetricFamily("pdtransfer_worker_usable", "1 if the worker accepts rooms", labels=labels)
        free = GaugeMetricFamily("pdtransfer_worker_slots_free", "Free slots in the last Load", labels=labels)
        for worker in self._routing.workers.by_peer.values():
            usable.add_metric([worker.peer, worker.role], worker.usable)
            if worker.load is not None:
                free.add_metric([worker.peer, worker.role], worker.load.slots_free)
        yield usable
        yield free
