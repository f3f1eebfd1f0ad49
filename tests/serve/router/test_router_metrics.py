"""The router's metrics: models that requests name have series of their own, as many as there are places."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import generate_latest

from pdtransfer.limits import METRICS_LABELS_MAX
from pdtransfer.serve.router.backends.daemons.routing_metrics import ModelMetrics, RoutingMetrics
from pdtransfer.serve.router.front.status import NO_MODEL, RouterMetrics


def test_no_series_of_a_model_loses_its_place_to_another() -> None:
    served = {f"m{number}": 1 for number in range(METRICS_LABELS_MAX + 5)}
    of_router = RouterMetrics(node="r")
    routing = SimpleNamespace(workers=SimpleNamespace(models=lambda: served))
    routing_metrics = RoutingMetrics(of_router, routing, SimpleNamespace())
    metrics: list[ModelMetrics] = [routing_metrics.of(name) for name in [*served, "nobody's"]]
    assert metrics[-1].name == NO_MODEL
    assert len({metric.name for metric in metrics} - {NO_MODEL}) == METRICS_LABELS_MAX - 1
    for metric in metrics:
        metric.inter_token.observe(0.01)
    of_router.registry.unregister(routing_metrics)  # what the routing counts is not of interest here
    lines = generate_latest(of_router.registry).decode().splitlines()
    counts = [
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("pdtransfer_inter_token_seconds_count")
    ]
    assert sum(counts) == len(metrics)
