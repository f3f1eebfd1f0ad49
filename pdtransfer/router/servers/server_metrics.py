"""Metrics of a router in front of HTTP servers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...process.process_metrics import process_registry
from ..openai_http import OpenRequests
from ..router_metrics import AnswerMetrics
from .server_pool import ServerPool


class ServerMetrics(Collector):
    """The router's metrics in a registry of their own."""

    def __init__(self, pool: ServerPool, open_requests: OpenRequests, *, node: str) -> None:
        self.registry = process_registry(role="router", node=node)
        self._pool, self._open_requests = pool, open_requests
        self.answers = AnswerMetrics(self.registry)
        self.retries = 0
        self.cut_answers = 0
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields current gauges and counters."""
        yield GaugeMetricFamily("pdtransfer_requests_open", "Unfinished requests", self._open_requests.count)
        yield CounterMetricFamily("pdtransfer_retries", "Requests posted again after a failure", self.retries)
        yield CounterMetricFamily(
            "pdtransfer_answers_cut", "Answers that a server did not bring to their end", self.cut_answers
        )
        labels = ["url", "role"]
        usable = GaugeMetricFamily("pdtransfer_server_usable", "1 if the server is healthy", labels=labels)
        unfinished = GaugeMetricFamily("pdtransfer_server_requests", "Requests that it has not answered", labels=labels)
        for server in self._pool.all:
            usable.add_metric([server.url, server.role], server.usable)
            unfinished.add_metric([server.url, server.role], server.unfinished)
        yield usable
        yield unfinished
