"""vLLM's own metrics of this connector: in its log, and among its Prometheus metrics."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from . import figures

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)


@dataclass
class TransferStats(KVConnectorStats):
    """The figures of an interval; `data` is figures.Data."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Counts from zero on."""
        self.data = figures.empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds another rank's, or a later interval's."""
        figures.add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs."""
        return figures.summary(self.data)

    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return figures.is_empty(self.data)


class TransferMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics of all engines of a server, by their index."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels: dict[int, list[Any]] = dict(per_engine_labelvalues)

        def counter(name: str, text: str, *labels: str) -> Any:
            return self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, *labels])

        self._rooms = counter("vllm:pdtransfer_rooms", "Hand-offs on one rank, by how they ended.", "end")
        self._failures = counter("vllm:pdtransfer_failures", "Hand-offs that failed, by their root cause.", "cause")
        self._bytes = counter("vllm:pdtransfer_bytes", "Bytes of KV that were transferred.", "direction")
        self._computed = counter(
            "vllm:pdtransfer_computed", "Requests whose hand-off failed, so that decode computed their prompt itself."
        )
        text = "Hand-offs that failed since the engines do not fit, by what differs."
        self._refusals = counter("vllm:pdtransfer_refusals", text, "fact")
        self._copied = counter("vllm:pdtransfer_copied_up_bytes", "Bytes copied from host memory to the KV cache.")
        self._seconds = self._histogram_cls(
            name="vllm:pdtransfer_transfer_seconds", buckets=_SECONDS, labelnames=labelnames,
            documentation="Decode: from asking for a hand-off until all of its KV has landed.",
        )  # fmt: skip

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the figures of an interval of one engine."""
        labels = self._labels[engine_idx]
        for metric, name in (
            (self._rooms, "rooms"), (self._failures, "causes"), (self._bytes, "bytes"), (self._refusals, "refusals"),
        ):  # fmt: skip
            for label, amount in transfer_stats_data[name].items():
                metric.labels(*labels, label).inc(amount)
        self._computed.labels(*labels).inc(transfer_stats_data["computed"])
        self._copied.labels(*labels).inc(transfer_stats_data["copied_up_bytes"])
        for seconds in transfer_stats_data["seconds"]:
            self._seconds.labels(*labels).observe(seconds)
