"""The router's metrics for /metrics; the core's own counters are read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...limits import METRICS_LABELS_MAX
from ..process.process_metrics import process_registry
from ..tracing.ended_request import EndedRequest

if TYPE_CHECKING:
    from ...bus import Bus
    from .routing import Routing

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
NO_MODEL = ""  # of a request that names none that is served


class AnswerMetrics:
    """What every router counts of its answers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("pdtransfer_requests", "Completions answered", ["status", "model"], registry=registry)
        make = partial(Histogram, labelnames=["model"], buckets=SECONDS_BUCKETS, registry=registry)
        self.first_token = make("pdtransfer_first_token_seconds", "From accepting a request to its first token")
        self._request = make("pdtransfer_request_seconds", "From accepting a request to its end")

    def count(self, status: int, seconds: float | None = None, *, model: str = NO_MODEL) -> None:
        """Counts an answer; `seconds` is its time, for requests that were accepted."""
        self._requests.labels(str(status), model).inc()
        if seconds is not None:
            self._request.labels(model).observe(seconds)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """What is counted of one model's requests as they go on."""

    name: str  # the label
    prompt_tokens: Counter
    generated_tokens: Counter
    first_token: Histogram
    inter_token: Histogram


class RouterMetrics(Collector):
    """The router's metrics in a registry of their own."""

    def __init__(self, routing: Routing, bus: Bus, *, node: str) -> None:
        self.registry = process_registry(role="router", node=node)
        self._routing, self._bus = routing, bus
        of, labels = self.registry, ["model"]
        self.answers = AnswerMetrics(of)
        self._prompt_tokens = Counter("pdtransfer_prompt_tokens", "Tokens of accepted prompts", labels, registry=of)
        self._generated_tokens = Counter("pdtransfer_generated_tokens", "Tokens generated", labels, registry=of)
        self._inter_token = Histogram(
            "pdtransfer_inter_token_seconds", "From one token of an answer to the next, as they came from decode",
            buckets=TOKEN_BUCKETS, labelnames=labels, registry=of,
        )  # fmt: skip
        self._models: dict[str, ModelMetrics] = {}
        self.breaches = Counter("pdtransfer_breaches", "Protocol breaches of workers", registry=of)
        self.registry.register(self)

    def of(self, model: str) -> ModelMetrics:
        """The metrics of a model. Those that no worker serves are one: a client may name any."""
        found = self._models.get(model)
        if found is None:
            # One place is that of all other models.
            free = len(self._models.keys() - {NO_MODEL}) < METRICS_LABELS_MAX - 1
            known = free and model in self._routing.workers.models()
            name = model if known else NO_MODEL
            found = self._models.get(name) or ModelMetrics(
                name, self._prompt_tokens.labels(name), self._generated_tokens.labels(name),
                self.answers.first_token.labels(name), self._inter_token.labels(name),
            )  # fmt: skip
            self._models[name] = found
        return found

    def ended(self, record: EndedRequest) -> None:
        """A request was answered, or its client left."""
        if record.scope == "request":
            assert record.status is not None
            self.answers.count(
                record.status, record.total_s if record.rooms else None, model=self.of(record.model).name
            )

    def collect(self) -> Iterator[Metric]:
        """Yields current gauges, and counters of the core and the bus."""
        yield GaugeMetricFamily("pdtransfer_requests_open", "Unfinished requests", self._routing.request_count)
        yield GaugeMetricFamily(
            "pdtransfer_rooms", "Rooms that have not ended on both workers", self._routing.room_count
        )
        yield CounterMetricFamily("pdtransfer_retries", "Rooms prefilled again after a failure", self._routing.retries)
        yield CounterMetricFamily(
            "pdtransfer_resumptions", "Answers that went on in another room after a failure", self._routing.resumptions
        )
        placed = self._routing.prefix_tokens
        yield CounterMetricFamily(
            "pdtransfer_prefix_placed_tokens", "Prompt tokens placed where they were cached", placed
        )
        yield CounterMetricFamily("pdtransfer_bus_sent", "Messages sent", self._bus.sent)
        yield CounterMetricFamily("pdtransfer_bus_received", "Messages received", self._bus.received)
        yield CounterMetricFamily("pdtransfer_bus_dropped", "Messages that could not be sent", self._bus.dropped)
        served = GaugeMetricFamily(
            "pdtransfer_model_usable", "1 for each model that a request may name", labels=["model"]
        )
        for model in list(self._routing.workers.models())[:METRICS_LABELS_MAX]:
            served.add_metric([model], 1)
        yield served
        labels = ["peer", "role"]
        usable = GaugeMetricFamily("pdtransfer_worker_usable", "1 if the worker accepts rooms", labels=labels)
        free = GaugeMetricFamily("pdtransfer_worker_slots_free", "Free slots in the last Load", labels=labels)
        for worker in self._routing.workers.by_peer.values():
            usable.add_metric([worker.peer, worker.role], worker.usable)
            if worker.load is not None:
                free.add_metric([worker.peer, worker.role], worker.load.slots_free)
        yield usable
        yield free
