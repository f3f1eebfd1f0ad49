"""The metrics of a router in front of our own daemons; the core's own counters are read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .....bus import Bus
from .....limits import METRICS_LABELS_MAX
from ...front.status import RouterMetrics
from .routing import Routing

TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """What is counted of one model's requests as they go on."""

    name: str  # the label
    prompt_tokens: Counter
    generated_tokens: Counter
    first_token: Histogram
    inter_token: Histogram


class RoutingMetrics(Collector):
    """The figures of the core and the bus."""

    def __init__(self, metrics: RouterMetrics, routing: Routing, bus: Bus) -> None:
        self._metrics, self._routing, self._bus = metrics, routing, bus
        of, labels = metrics.registry, ["model"]
        self._prompt_tokens = Counter("pdtransfer_prompt_tokens", "Tokens of accepted prompts", labels, registry=of)
        self._generated_tokens = Counter("pdtransfer_generated_tokens", "Tokens generated", labels, registry=of)
        self._inter_token = Histogram(
            "pdtransfer_inter_token_seconds", "From one token of an answer to the next, as they came from decode",
            buckets=TOKEN_BUCKETS, labelnames=labels, registry=of,
        )  # fmt: skip
        self._models: dict[str, ModelMetrics] = {}  # by label
        self.breaches = Counter("pdtransfer_breaches", "Protocol breaches of workers", registry=of)
        of.register(self)

    def of(self, model: str) -> ModelMetrics:
        """The metrics of a model."""
        name = self._metrics.label(model, self._routing.workers.models)
        metrics = self._models.get(name)
        if metrics is None:
            metrics = self._models[name] = ModelMetrics(
                name, self._prompt_tokens.labels(name), self._generated_tokens.labels(name),
                self._metrics.first_token.labels(name), self._inter_token.labels(name),
            )  # fmt: skip
        return metrics

    def collect(self) -> Iterator[Metric]:
        """Yields current gauges, and counters of the core and the bus."""
        core, bus = self._routing, self._bus
        yield GaugeMetricFamily("pdtransfer_rooms", "Rooms that have not ended on both workers", len(core.rooms))
        for name, text, count in (
            ("retries", "Requests tried again after a failure", core.retries),
            ("resumptions", "Answers that went on in another room after a failure", core.resumptions),
            ("prefix_placed_tokens", "Prompt tokens placed where they were cached", core.prefix_tokens),
            ("requests_kept", "Requests that decode was to compute: it held earlier turns", core.stayed),
            ("bus_sent", "Messages sent", bus.sent),
            ("bus_received", "Messages received", bus.received),
            ("bus_dropped", "Messages that could not be sent", bus.dropped),
        ):
            yield CounterMetricFamily(f"pdtransfer_{name}", text, count)
        served = GaugeMetricFamily(
            "pdtransfer_model_usable", "1 for each model that a request may name", labels=["model"]
        )
        for model in list(core.workers.models())[:METRICS_LABELS_MAX]:
            served.add_metric([model], 1)
        labels = ["peer", "role"]
        usable = GaugeMetricFamily("pdtransfer_worker_usable", "1 if the worker accepts rooms", labels=labels)
        free = GaugeMetricFamily("pdtransfer_worker_slots_free", "Free slots in the last Load", labels=labels)
        for worker in core.workers.by_peer.values():
            usable.add_metric([worker.peer, worker.role], worker.usable)
            if worker.load is not None:
                free.add_metric([worker.peer, worker.role], worker.load.slots_free)
        yield from (served, usable, free)
