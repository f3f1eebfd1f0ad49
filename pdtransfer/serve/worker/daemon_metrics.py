"""The daemons' metrics. Figures that the core keeps are read when /metrics is requested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ...bus import Bus
from ...client.decode_node import DecodeNode
from ...client.prefill_node import PrefillNode
from ...handoff.decode.records import PeerRecord
from ...handoff.prefix import PrefixCache
from ...handoff.states import SessionState
from ...limits import METRICS_LABELS_MAX
from ...wire import Identity
from ..engine_api import HotFigures
from ..process.histograms import OTHER

LIFTED = {"index": "Of grants: rows of an index in HBM", "dense": "Of grants: dense requests' rows"}
DIGITS = 16  # of a digest, to tell two apart
COPY_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class RoomMetrics:
    """Counters of both roles."""

    def __init__(self, of: CollectorRegistry) -> None:
        self.begun = Counter("pdtransfer_rooms_begun", "Rooms that were begun; each of them ends once", registry=of)
        self.ended = Counter("pdtransfer_rooms_ended", "Rooms that ended, by reason", ["reason"], registry=of)
        self.kv_bytes = Counter("pdtransfer_kv_bytes", "Bytes of KV written, or landed", registry=of)
        self.computed_tokens = Counter(
            "pdtransfer_computed_tokens", "Prompt tokens that the engine computed; decode: of next turns", registry=of
        )


class PrefillMetrics(Collector):
    """Metrics of a prefill daemon."""

    def __init__(self, node: PrefillNode, registry: CollectorRegistry) -> None:
        self._node, self.rooms = node, RoomMetrics(registry)
        self.copy_seconds = Histogram(
            "pdtransfer_copy_seconds", "Time that one room's writes took", buckets=COPY_BUCKETS, registry=registry
        )
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Current gauges, and counters kept elsewhere."""
        core = self._node.core
        yield _model(core.identity)
        grants = sum(len(session.grants) for session in core.sessions.values())
        yield GaugeMetricFamily("pdtransfer_rooms", "Rooms that are open, or not drained", len(core.rooms))
        yield GaugeMetricFamily("pdtransfer_sessions", "Decode ranks that this one may write to", len(core.sessions))
        yield GaugeMetricFamily("pdtransfer_grants", "Grants whose end is not acknowledged", grants)
        yield _transports(self._node)
        yield from _bus(self._node.bus)


class DecodeMetrics(Collector):
    """Metrics of a decode daemon."""

    def __init__(
        self, node: DecodeNode, registry: CollectorRegistry, figures: Callable[[], HotFigures] | None = None
    ) -> None:
        """`figures` returns the HiSparse figures; None if the daemon takes no HiSparse requests."""
        self._node, self.rooms, self._figures = node, RoomMetrics(registry), figures
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Current gauges, and counters kept elsewhere."""
        core = self._node.core
        yield _model(core.prefill_peers.identity)
        sessions = core.prefill_peers.sessions.values()
        yield GaugeMetricFamily("pdtransfer_rooms", "Rooms that have not ended", len(core.rooms))
        yield GaugeMetricFamily("pdtransfer_rooms_queued", "Rooms that wait for slots", len(core.admission))
        leases = sum(len(session.leases) for session in sessions)
        yield GaugeMetricFamily("pdtransfer_leases", "Grants that nobody has proven ended", leases)
        states = GaugeMetricFamily("pdtransfer_sessions", "Sessions with prefill ranks", labels=["state"])
        for state in SessionState:
            if state is not SessionState.CLOSED:
                states.add_metric([state.value], sum(session.state is state for session in sessions))
        yield states
        slots = GaugeMetricFamily(
            "pdtransfer_slots", "Slots of the arena that are backed with memory", labels=["component", "memory"]
        )
        free = GaugeMetricFamily("pdtransfer_slots_free", "Slots that may be leased", labels=["component", "memory"])
        fragmentation = GaugeMetricFamily(
            "pdtransfer_fragmentation_ratio", "1 - longest free run / free slots", labels=["component", "memory"]
        )
        # Blocks that the prefix cache would give up count as free; only claimed slots do not.
        pools = zip(core.arena.components, core.arena.free, core.cache.free_slots, strict=True)
        for component, extents, free_slots in pools:
            which = [component.name, component.memory]
            slots.add_metric(which, extents.ready)
            free.add_metric(which, free_slots)
            fragmentation.add_metric(which, extents.fragmentation)
        yield slots
        yield free
        yield fragmentation
        quarantined = core.leases.quarantined_bytes
        yield GaugeMetricFamily("pdtransfer_quarantined_bytes", "Leased to writers not proven quiet", quarantined)
        yield _quarantined(core.prefill_peers.peers.values())
        landed = core.post_landing
        yield CounterMetricFamily(
            "pdtransfer_grants_verified", "Grants read back that hold what was sent", landed.matched
        )
        yield CounterMetricFamily(
            "pdtransfer_grants_mismatched", "Grants with another checksum, or none", landed.mismatched
        )
        for of, content in LIFTED.items():
            yield CounterMetricFamily(
                f"pdtransfer_{of}_copies", f"{content} that landed in DRAM first", landed.copies[of]
            )
            yield CounterMetricFamily(
                f"pdtransfer_{of}_copied_bytes", f"{content} copied up from DRAM", landed.copied_bytes[of]
            )
        inflight = core.admission.inflight_bytes
        yield GaugeMetricFamily("pdtransfer_inflight_bytes", "Granted and not yet landed", inflight)
        yield _transports(self._node)
        yield from _prefix(core.cache)
        hot = self._figures() if self._figures is not None else None
        if hot is not None:
            yield from _hot(hot)
        moved = self._node.lifted_bytes + (hot.admission_bytes if hot is not None else 0)
        text = "Bytes copied to the device between landing and the first step: HiSparse's preload, and rows from DRAM"
        yield CounterMetricFamily("pdtransfer_admission_bytes", text, moved)
        yield from _bus(self._node.bus)


def _model(identity: Identity) -> Metric:
    of = InfoMetricFamily("pdtransfer_model", "The model that is served, always 1")
    of.add_metric([], {"model": identity.model, "weights": identity.weights.hex()[:DIGITS]})
    return of


def _quarantined(peers: Iterable[PeerRecord]) -> Metric:
    """The peers with most of it; all others together."""
    of = GaugeMetricFamily(
        "pdtransfer_peer_quarantined_bytes", "Leased to a writer not proven quiet; 0 is left out", labels=["peer"]
    )
    most = sorted((peer for peer in peers if peer.quarantined_bytes), key=lambda peer: -peer.quarantined_bytes)
    for peer in most[:METRICS_LABELS_MAX]:
        of.add_metric([peer.identity.node if peer.identity is not None else ""], peer.quarantined_bytes)
    if others := most[METRICS_LABELS_MAX:]:
        of.add_metric([OTHER], sum(peer.quarantined_bytes for peer in others))
    return of


def _transports(node: PrefillNode | DecodeNode) -> Metric:
    of = GaugeMetricFamily("pdtransfer_transport_sessions", "Sessions by the way that KV takes", labels=["transport"])
    for name, count in node.transport.counts.items():
        of.add_metric([name], count)
    return of


def _hot(of: HotFigures) -> Iterator[Metric]:
    yield GaugeMetricFamily("pdtransfer_hisparse_running", "HiSparse requests that the device has", of.running)
    yield GaugeMetricFamily("pdtransfer_hisparse_waiting", "Those that have landed and wait for it", of.waiting)
    yield CounterMetricFamily("pdtransfer_hot_hits", "Tokens that steps read and the device had", of.hits)
    yield CounterMetricFamily("pdtransfer_hot_misses", "Those that it had not", of.misses)
    yield CounterMetricFamily("pdtransfer_swapped_bytes", "Brought to the device for misses", of.swapped_bytes)
    yield CounterMetricFamily("pdtransfer_preloaded_bytes", "Of requests placed there whole", of.preloaded_bytes)
    yield CounterMetricFamily("pdtransfer_retracts", "Times that one request made room for others", of.retracts)


def _prefix(cache: PrefixCache) -> Iterator[Metric]:
    tokens = cache.block_tokens
    yield GaugeMetricFamily("pdtransfer_prefix_tokens", "Tokens of prompts that are kept", len(cache) * tokens)
    yield GaugeMetricFamily("pdtransfer_prefix_used_tokens", "Those that rooms hold now", cache.claimed * tokens)
    queried, hit, evicted = cache.queried_tokens, cache.hit_tokens, cache.evicted_blocks * tokens
    yield CounterMetricFamily("pdtransfer_prefix_queried_tokens", "Tokens of admitted prompts, looked for", queried)
    yield CounterMetricFamily("pdtransfer_prefix_hit_tokens", "Tokens of these prompts that decode had already", hit)
    yield CounterMetricFamily("pdtransfer_prefix_evicted_tokens", "Tokens that made room for others", evicted)


def _bus(bus: Bus) -> Iterator[Metric]:
    yield CounterMetricFamily("pdtransfer_bus_sent", "Messages sent", bus.sent)
    yield CounterMetricFamily("pdtransfer_bus_received", "Messages received", bus.received)
    yield CounterMetricFamily("pdtransfer_bus_refused", "Breaches, and messages out of turn", bus.refused)
    yield CounterMetricFamily("pdtransfer_bus_dropped", "Messages that could not be sent", bus.dropped)
    yield CounterMetricFamily("pdtransfer_bus_strangers", "Handshakes refused", bus.strangers)
