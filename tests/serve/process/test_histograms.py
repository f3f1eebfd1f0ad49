"""Histograms with a bounded number of series, whatever peers come and go."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdtransfer.limits import METRICS_LABELS_MAX
from pdtransfer.serve.process.histograms import IDLE_S, OTHER, BoundedHistogram

BOUNDS = (0.1, 1.0)


def _peers(registry: CollectorRegistry) -> dict[str, float]:
    """How many values each peer has."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples if sample.name == "h_count"]
    return {sample.labels["peer"]: sample.value for sample in samples}


def test_as_many_peers_as_there_may_be_have_series_and_all_others_share_one() -> None:
    registry = CollectorRegistry()
    histogram = BoundedHistogram("h", "text", buckets=BOUNDS, registry=registry, labels=("peer", "transport"))
    for number in range(1_000):
        for _ in range(2):
            histogram.observe(0.5, f"p{number}", "shm", now=float(number))
    # The clock goes on by 1,000 s: some of the first have been idle for long enough to make room.
    peers = _peers(registry)
    assert len(peers) == METRICS_LABELS_MAX + 1


def test_peers_beyond_the_bound_share_one_series() -> None:
    registry = CollectorRegistry()
    histogram = BoundedHistogram("h", "text", buckets=BOUNDS, registry=registry, labels=("peer", "transport"))
    for number in range(1_000):
        histogram.observe(0.5, f"p{number}", "shm", now=1.0)
    peers = _peers(registry)
    assert peers.pop(OTHER) == 1_000 - METRICS_LABELS_MAX
    assert set(peers.values()) == {1}
    assert len(peers) == METRICS_LABELS_MAX


def test_a_peer_without_news_makes_room_for_a_new_one() -> None:
    registry = CollectorRegistry()
    histogram = BoundedHistogram("h", "text", buckets=BOUNDS, registry=registry, labels=("peer", "transport"))
    for number in range(METRICS_LABELS_MAX):
        histogram.observe(0.5, f"p{number}", "shm", now=0.0)
    histogram.observe(0.5, "p0", "shm", now=IDLE_S - 1.0)
    histogram.observe(0.5, "late", "shm", now=IDLE_S - 0.5)
    assert _peers(registry)[OTHER] == 1
    histogram.observe(0.5, "late", "shm", now=IDLE_S + 1.0)
    peers = _peers(registry)
    assert (peers["late"], peers["p0"]) == (1, 2)
    assert "p1" not in peers, "the one that was idle the longest"
