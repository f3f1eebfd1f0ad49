"""Histograms with a bounded number of series."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdtransfer.limits import METRICS_LABELS_MAX
from pdtransfer.serve.process.histograms import IDLE_S, OTHER, LoopHistogram

BOUNDS = (0.1, 1.0)


def _samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def _peers(registry: CollectorRegistry) -> dict[str, float]:
    """How many values each peer has."""
    return {key[1]: value for key, value in _samples(registry).items() if key[0] == "h_count"}


def test_values_are_counted_up_to_each_bound_as_prometheus_reads_them() -> None:
    registry = CollectorRegistry()
    histogram = LoopHistogram("h", "text", bounds=BOUNDS, registry=registry)
    for value in (0.1, 0.5, 7.0):
        histogram.observe(value)
    histogram.observe(0.2, 3)
    found = _samples(registry)
    assert found == {
        ("h_bucket", "0.1"): 1, ("h_bucket", "1.0"): 5, ("h_bucket", "+Inf"): 6, ("h_count",): 6,
        ("h_sum",): pytest.approx(8.2),
    }  # fmt: skip


def test_as_many_peers_as_there_may_be_have_series_and_all_others_share_one() -> None:
    registry = CollectorRegistry()
    histogram = LoopHistogram("h", "text", bounds=BOUNDS, registry=registry, labels=("peer", "transport"))
    for number in range(1_000):
        for _ in range(2):
            histogram.of(f"p{number}", "shm", now=float(number)).observe(0.5)
    # The clock goes on by 1,000 s: some of the first have been idle for long enough to make room.
    found = _peers(registry)
    assert len(found) == METRICS_LABELS_MAX + 1
    early = LoopHistogram("e", "text", bounds=BOUNDS, registry=CollectorRegistry(), labels=("peer", "transport"))
    for number in range(1_000):
        early.of(f"p{number}", "shm", now=1.0).observe(0.5)
    assert early.of(OTHER, "shm").count == 1_000 - METRICS_LABELS_MAX


def test_a_peer_without_news_makes_room_for_a_new_one() -> None:
    registry = CollectorRegistry()
    histogram = LoopHistogram("h", "text", bounds=BOUNDS, registry=registry, labels=("peer", "transport"))
    for number in range(METRICS_LABELS_MAX):
        histogram.of(f"p{number}", "shm", now=0.0).observe(0.5)
    histogram.of("p0", "shm", now=IDLE_S - 1.0).observe(0.5)
    histogram.of("late", "shm", now=IDLE_S - 0.5).observe(0.5)
    assert _peers(registry)[OTHER] == 1
    histogram.of("late", "shm", now=IDLE_S + 1.0).observe(0.5)
    found = _peers(registry)
    assert (found["late"], found["p0"]) == (1, 2)
    assert "p1" not in found, "the one that was idle the longest"
