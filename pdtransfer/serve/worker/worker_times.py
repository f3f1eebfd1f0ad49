"""Histograms of a worker: how long the parts of a hand-off take, and how full and how long the arena is held.

Every time is a difference of two readings of this process's clock. Buckets are few, and lie where docs/figures has
times: each series is kept once for every worker of a fleet.
"""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Histogram

from ..process.histograms import BoundedHistogram
from ..tracing.ended_request import EndedRequest

WAIT_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
EXPOSED_BUCKETS = (0.0005, 0.002, 0.005, 0.02, 0.1, 0.5, 2.0)
HANDOFF_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)
TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
HELD_BUCKETS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
USED_BUCKETS = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
QUARANTINE_BUCKETS = (0.05, 0.2, 1.0, 5.0, 20.0, 60.0, 300.0)
PER_PEER = "peer", "transport"


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(seconds)


class PrefillTimes:
    """Histograms of one prefill rank."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._handoff = BoundedHistogram(
            "pdtransfer_handoff_seconds", "From a grant's last byte written to decode's acknowledgement: a round trip",
            buckets=HANDOFF_BUCKETS, labels=PER_PEER, registry=registry,
        )  # fmt: skip
        make = partial(Histogram, registry=registry)
        self._queue = make(
            "pdtransfer_queue_seconds", "From a room's begin to the first step that computes it", buckets=WAIT_BUCKETS
        )
        self._compute = make(
            "pdtransfer_prefill_seconds", "From a room's first step until its prompt is computed", buckets=WAIT_BUCKETS
        )
        self._exposed = BoundedHistogram(
            "pdtransfer_exposed_transfer_seconds", "From a computed prompt to its last byte written",
            buckets=EXPOSED_BUCKETS, labels=PER_PEER, registry=registry,
        )  # fmt: skip

    def ended(self, record: EndedRequest) -> None:
        """A room has ended on this worker; a failed one counts with the parts that it went through."""
        _observe(self._queue, record.queue_s)
        _observe(self._compute, record.prefill_s)
        if record.transfer_s is not None:
            self._exposed.observe(record.transfer_s, record.decode, record.transport)

    def handed_off(self, peer: str, transport: str, seconds: float) -> None:
        """Decode has acknowledged a grant that landed."""
        self._handoff.observe(seconds, peer, transport)


class DecodeTimes:
    """Histograms of one decode rank."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = partial(Histogram, registry=registry)
        self._queue = make("pdtransfer_queue_seconds", "From a room's begin until it has slots", buckets=WAIT_BUCKETS)
        self._admission = make(
            "pdtransfer_admission_seconds", "From READY to the first step that generates", buckets=WAIT_BUCKETS
        )
        self._token = make(
            "pdtransfer_inter_token_seconds", "From one generated token of a room to the next", buckets=TOKEN_BUCKETS
        )
        self._used = make(
            "pdtransfer_arena_used_ratio", "Share of the arena in use whenever a room got slots", buckets=USED_BUCKETS
        )
        self._held = make("pdtransfer_arena_held_seconds", "Time that a room held its slots", buckets=HELD_BUCKETS)
        self._quarantine = BoundedHistogram(
            "pdtransfer_quarantine_seconds", "Time that a grant's slots were in quarantine",
            buckets=QUARANTINE_BUCKETS, labels=PER_PEER, registry=registry,
        )  # fmt: skip

    def ended(self, record: EndedRequest) -> None:
        """A room has ended on this worker; a failed one counts with the parts that it went through."""
        _observe(self._queue, record.queue_s)
        _observe(self._admission, record.admission_s)

    def leased(self, *, free: int, total: int) -> None:
        """A room has got slots: this many are left."""
        if total:
            self._used.observe(1.0 - free / total)

    def held(self, seconds: float) -> None:
        """A room has given its slots back."""
        self._held.observe(seconds)

    def token(self, seconds: float, times: int) -> None:
        """A room has this many more tokens, each this many seconds after the one before."""
        for _ in range(times):
            self._token.observe(seconds)

    def quarantined(self, peer: str, transport: str, seconds: float) -> None:
        """The writer of a quarantined grant was proven quiet."""
        self._quarantine.observe(seconds, peer, transport)
