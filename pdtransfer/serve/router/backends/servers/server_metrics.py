"""The metrics of a router in front of HTTP servers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...front.status import NO_MODEL, RouterMetrics
from .server_pool import ServerPool

COUNTS = {  # of pdtransfer_NAME_total
    "retries": "Requests tried again after a failure",
    "answers_cut": "Answers that a server did not bring to their end",
    "requests_without_prefill": "Requests that decode was given without a prefill server",
    "requests_kept": "Requests that decode was to compute: it held earlier turns, or has both roles",
    "prompts_computed": "Whole answers whose prompt decode computed, since its KV was not received",
    "first_tokens_early": "Streams that began with prefill's first token",
    "first_tokens_wrong": "Those that decode went on with in another way, so that they failed",
}


class ServerMetrics(Collector):
    """The figures of the servers, and of what they were asked: each of COUNTS is an attribute."""

    def __init__(self, metrics: RouterMetrics, pool: ServerPool) -> None:
        self._pool = pool
        self.first_token = metrics.first_token.labels(NO_MODEL)
        self.retries = self.answers_cut = self.requests_without_prefill = self.requests_kept = 0
        self.prompts_computed = self.first_tokens_early = self.first_tokens_wrong = 0
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields current gauges and counters."""
        for name, text in COUNTS.items():
            yield CounterMetricFamily(f"pdtransfer_{name}", text, getattr(self, name))
        yield GaugeMetricFamily(
            "pdtransfer_without_prefill", "1 while decode computes prompts for want of a prefill server",
            self._pool.serves_alone,
        )  # fmt: skip
        received, computed, kv_bytes = (
            CounterMetricFamily(f"pdtransfer_server_{name}", text, labels=["url"])
            for name, text in (
                ("hand_offs_received", "Hand-offs that a decode server has received, by its own count"),
                ("hand_offs_computed", "Those whose prompt it computed instead"),
                ("kv_bytes", "Bytes of KV that it has received"),
            )
        )
        waiting = GaugeMetricFamily(
            "pdtransfer_server_waiting_requests", "Requests that a decode server has no memory for, by its own count",
            labels=["url"],
        )  # fmt: skip
        for server in self._pool.decode:
            if (hand_offs := server.hand_offs) is not None:
                received.add_metric([server.url], hand_offs.received)
                computed.add_metric([server.url], hand_offs.computed)
                kv_bytes.add_metric([server.url], hand_offs.kv_bytes)
            if server.waiting is not None:
                waiting.add_metric([server.url], server.waiting.requests)
        labels = ["url", "role"]
        usable = GaugeMetricFamily("pdtransfer_server_usable", "1 if the server is healthy", labels=labels)
        unfinished = GaugeMetricFamily("pdtransfer_server_requests", "Requests that it has not answered", labels=labels)
        for server, *others in self._pool.sites:
            usable.add_metric([server.url, server.role], server.usable)
            requests = server.unfinished + sum(rank.unfinished for rank in others)
            unfinished.add_metric([server.url, server.role], requests)
        yield from (received, computed, kv_bytes, waiting, usable, unfinished)
