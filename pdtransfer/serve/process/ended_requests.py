"""Subscribes what every process makes of its ended requests: log lines, and spans for a collector."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ..settings.node import NodeConfig
from ..tracing.ended_request import EndedRequests
from .request_lines import log_ended


@contextmanager
def recorded_ends(config: NodeConfig) -> Generator[EndedRequests]:
    """Gives the one place of this process to which records go. Raises ConfigError where a library is missing."""
    ended = EndedRequests()
    ended.subscribe(log_ended)
    if not config.otlp:
        yield ended
        return
    from .span_export import SpanExporter

    exporter = SpanExporter(config.otlp, node=config.node, role=config.role)
    ended.subscribe(exporter)
    try:
        yield ended
    finally:
        exporter.close()
