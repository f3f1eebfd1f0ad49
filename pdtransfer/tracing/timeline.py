"""Spans that the parts of a process report while tracing is on.

Each part takes an optional sink. Without one it reports nothing and reads no clock.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

from ..engine_api import Spans

SPANS_MAX = 1 << 18  # the latest spans of a process: some 60 MiB
ROOMS_MAX = 1 << 16  # the latest rooms whose ids are known


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
        self._spans.append(
            TimedSpan(
                process=self.process, lane=lane, name=name, begin_s=begin_s, end_s=end_s, room=room, layer=layer,
                byte_count=byte_count,
            )
        )  # fmt: skip

    def take(self) -> list[TimedSpan]:
        """Returns the spans since the last call."""
        taken: list[TimedSpan] = []
        while self._spans:
            taken.append(self._spans.popleft())
        return taken


class Journeys:
    """Turns the events of a daemon's rooms into spans, each from the event before. Does nothing while tracing is off.

    Engines use local ids and peers use room ids: an engine's spans are stored under the room id.
    """

    def __init__(self, spans: Spans | None = None) -> None:
        self.spans = spans
        self._labels: dict[int, int] = {}  # by local id
        self._since: dict[int, float] = {}  # by room id: the time of the latest event

    def begin(self, room: int, serial: int) -> None:
        """A room with this id has started."""
        if self.spans is not None:
            self._labels[serial] = room
            self._labels.pop(serial - ROOMS_MAX, None)  # local ids count up
            self._since[room] = time.monotonic()

    def reached(self, room: int, lane: str, name: str, *, byte_count: int = 0) -> None:
        """Ends the span since the last event. Unknown rooms are ignored."""
        if self.spans is not None and (since_s := self._since.get(room)) is not None:
            now = self._since[room] = time.monotonic()
            self.spans(lane, name, since_s, now, room=room, byte_count=byte_count)

    def forget(self, room: int) -> None:
        """The room has ended."""
        self._since.pop(room, None)

    @property
    def engine(self) -> Spans | None:
        """The sink for the engine's spans."""
        return None if self.spans is None else self._of_engine

    def _of_engine(
        self, lane: str, name: str, begin_s: float, end_s: float, *, room: int, layer: int = -1, byte_count: int = 0
    ) -> None:
        assert self.spans is not None
        label = self._labels.get(room, 0)
        self.spans(lane, name, begin_s, end_s, room=label, layer=layer, byte_count=byte_count)
