"""Sends ended requests and rooms as OpenTelemetry spans to a collector, over OTLP and HTTP.

The router's span of a request has the id that its workers got as their parent. Parts of a room's time are spans below
the room's, named as in the timeline. Spans leave in batches from a thread of the SDK; where the collector is away they
are dropped, and the SDK logs that.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any

from ... import __version__
from ...errors import missing_extra
from ..tracing.ended_request import EndedRequest, TraceContext
from ..tracing.spans import TimedSpan
from .request_lines import fields_of

PATH = "/v1/traces"  # of OTLP over HTTP
EXPORT_S = 5  # time limit of one export
CLOSE_S = 2.0  # and of the last one, at the end of the process
PREFIX = "pdtransfer."  # of attributes
_HTTP = {"status": "http.response.status_code", "path": "http.route"}


class SpanExporter:
    """A sink of EndedRequests. Raises ConfigError where OpenTelemetry is not installed."""

    def __init__(self, endpoint: str, *, node: str, role: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise missing_extra(error) or error from None
        url = endpoint.rstrip("/")
        url = url if url.endswith(PATH) else url + PATH
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_S)
        self._processor = BatchSpanProcessor(self._exporter)
        self._resource = Resource.create(
            {"service.name": f"pdtransfer-{role}", "service.instance.id": node, "service.version": __version__}
        )

    def __call__(self, record: EndedRequest) -> None:
        """Queues the spans of a record; one without a trace, or of a trace that is not sampled, has none."""
        trace = record.trace
        if trace is None or not trace.sampled:
            return
        zero_ns = round(1e9 * (record.ended_unix_s - record.total_s - record.began_s))
        context = trace
        parent = record.parent_span
        if record.scope == "room":
            context, parent = TraceContext(trace.trace_id, _span_id()), trace.span_id
        name = "request" if record.scope == "request" else "room" if record.role == "router" else record.role
        end_s = record.began_s + record.total_s
        whole = TimedSpan(process=record.node, lane="", name=name, begin_s=record.began_s, end_s=end_s)
        self._queue(
            whole, zero_ns, context, parent, _attributes(record), failed=record.cause is not None, record=record
        )
        if record.scope == "request" and len(record.rooms) > 0:
            return  # its rooms have the parts
        for span in record.spans:
            self._queue(span, zero_ns, TraceContext(context.trace_id, _span_id()), context.span_id, {}, record=record)

    def close(self) -> None:
        """Sends what is queued, if the collector takes it in CLOSE_S: the SDK itself would try for longer."""
        last = threading.Thread(target=self._processor.shutdown, daemon=True)
        last.start()
        last.join(CLOSE_S)
        if last.is_alive():
            self._exporter.shutdown()  # which ends its wait for another try

    def _queue(
        self,
        span: TimedSpan,
        zero_ns: int,  # of the span's clock
        context: TraceContext,
        parent: str,
        attributes: dict[str, Any],
        *,
        record: EndedRequest,
        failed: bool = False,
    ) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        server = record.scope == "request" and context is record.trace
        exported = ReadableSpan(
            name=f"{span.lane}: {span.name}" if span.lane else span.name,
            context=_context(context.trace_id, context.span_id),
            parent=_context(context.trace_id, parent) if parent else None,
            resource=self._resource,
            attributes=attributes,
            kind=SpanKind.SERVER if server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, record.detail) if failed else Status(),
            start_time=zero_ns + round(1e9 * span.begin_s),
            end_time=zero_ns + round(1e9 * span.end_s),
        )
        self._processor.on_end(exported)


def _context(trace_id: str, span_id: str) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(1))


def _span_id() -> str:
    return f"{secrets.randbits(64) | 1:016x}"


def _attributes(record: EndedRequest) -> dict[str, Any]:
    stated = fields_of(record)
    stated.pop("trace_id", None)
    return {_HTTP.get(name, PREFIX + name): value for name, value in stated.items()}
