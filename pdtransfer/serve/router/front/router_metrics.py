"""What every router counts of its answers, for /metrics; a backend registers its own beside it."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial

from prometheus_client import Counter, Histogram

from ....limits import METRICS_LABELS_MAX
from ...process.process_metrics import process_registry
from ...tracing.ended_request import EndedRequest

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
NO_MODEL = ""  # of a request that names none that is served


class RouterMetrics:
    """The router's metrics in a registry of their own."""

    def __init__(self, *, node: str) -> None:
        self.registry = process_registry(role="router", node=node)
        self._answers = Counter(
            "pdtransfer_requests", "Completions answered", ["status", "model"], registry=self.registry
        )
        make = partial(Histogram, labelnames=["model"], buckets=SECONDS_BUCKETS, registry=self.registry)
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
