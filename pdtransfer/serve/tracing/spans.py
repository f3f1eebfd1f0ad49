"""A span: one piece of work of one process. Trace files and exported spans are written from it, and nothing else."""

from __future__ import annotations

from collections import deque

import msgspec

SPANS_MAX = 1 << 18  # the latest spans of a process: some 60 MiB


class TimedSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One piece of work of one process, in seconds of CLOCK_MONOTONIC, comparable between processes of one host."""

    process: str
    lane: str  # a row of the drawing, whose spans follow one another: compute, push, control, admission, step, ...
    name: str
    begin_s: float
    end_s: float
    room: int = 0
    layer: int = -1  # the first layer of the span
    byte_count: int = 0

    @property
    def seconds(self) -> float:
        """The span's duration."""
        return self.end_s - self.begin_s


class Timeline:
    """Collects the spans of one process, from any thread; implements engine_api.Spans."""

    def __init__(self, process: str, *, spans_max: int = SPANS_MAX) -> None:
        self.process = process
        self._spans: deque[TimedSpan] = deque(maxlen=spans_max)

    def __call__(
        self, lane: str, name: str, begin_s: float, end_s: float, *, room: int, layer: int = -1, byte_count: int = 0
    ) -> None:
        """Keeps one span and drops the oldest at the bound."""
        self.add(
            TimedSpan(
                process=self.process, lane=lane, name=name, begin_s=begin_s, end_s=end_s, room=room, layer=layer,
                byte_count=byte_count,
            )
        )  # fmt: skip

    def add(self, span: TimedSpan) -> None:
        """Keeps a span that another sink has as well."""
        self._spans.append(span)

    def take(self) -> list[TimedSpan]:
        """Returns the spans since the last call."""
        taken: list[TimedSpan] = []
        while self._spans:
            taken.append(self._spans.popleft())
        return taken
