"""The metrics of a router in front of HTTP servers."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...front.status import NO_MODEL, RouterMetrics
from .server_pool import ServerPool


class ServerMetrics(Collector):
    """The figures of the servers, and of what they were asked."""

    def __init__(self, metrics: RouterMetrics, pool: ServerPool) -> None:
        self._pool = pool
        self.first_token = metrics.first_token.labels(NO_MODEL)
        self.retries = 0
        self.cut_answers = 0
        self.served_alone = self.kept = 0
        self.computed = 0
        self.early = self.early_wrong = 0
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields current gauges and counters."""
        yield CounterMetricFamily("pdtransfer_retries", "Requests tried again after a failure", self.retries)
        yield CounterMetricFamily(
            "pdtransfer_answers_cut", "Answers that a server did not bring to their end", self.cut_answers
        )
        yield GaugeMetricFamily(
            "pdtransfer_without_prefill", "1 while decode computes prompts for want of a prefill server",
            self._pool.serves_alone,
        )  # fmt: skip
        yield CounterMetricFamily(
            "pdtransfer_requests_without_prefill", "Requests that decode was given without a prefill server",
            self.served_alone,
        )  # fmt: skip
        yield CounterMetricFamily(
            "pdtransfer_requests_kept", "Requests that decode was to compute: it held earlier turns, or has both roles",
            self.kept,
        )  # fmt: skip
        yield CounterMetricFamily(
            "pdtransfer_prompts_computed", "Whole answers whose prompt decode computed, since its KV was not received",
            self.computed,
        )  # fmt: skip
        yield CounterMetricFamily(
            "pdtransfer_first_tokens_early", "Streams that began with prefill's first token", self.early
        )
        yield CounterMetricFamily(
            "pdtransfer_first_tokens_wrong", "Those that decode went on with in another way, so that they failed",
            self.early_wrong,
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
        yield from (received, computed, kv_bytes, waiting)
        labels = ["url", "role"]
        usable = GaugeMetricFamily("pdtransfer_server_usable", "1 if the server is healthy", labels=labels)
        unfinished = GaugeMetricFamily("pdtransfer_server_requests", "Requests that it has not answered", labels=labels)
        for server, *others in self._pool.sites:
            usable.add_metric([server.url, server.role], server.usable)
            requests = server.unfinished + sum(rank.unfinished for rank in others)
            unfinished.add_metric([server.url, server.role], requests)
        yield usable
        yield unfinished
