"""Where the time goes: spans that the parts of a process report while somebody wants them.

Whoever may report a span is given None where nobody asks, and then does nothing for it, not even read a clock.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

from ..engine_api import Spans

SPANS_MAX = 1 << 18  # that a process keeps, the latest: some 60 MiB
ROOMS_MAX = 1 << 16  # whose labels are known: those of the latest


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that one process did; seconds of CLOCK_MONOTONIC, so that those of one host's processes compare."""

    process: str
    lane: str  # what does one thing after another there: compute, push, control, admission, step, ...
    name: str
    begin_s: float
    end_s: float
    room: int = 0
    layer: int = -1  # the first of those that it is about
    byte_count: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


class Timeline:
    """What one process has to tell: an engine.base.Spans, from any thread."""

    def __init__(self, process: str, *, spans_max: int = SPANS_MAX) -> None:
        self.process = process
        self._spans: deque[Span] = deque(maxlen=spans_max)

    def __call__(
        self, lane: str, name: str, begin_s: float, end_s: float, *, room: int, layer: int = -1, byte_count: int = 0
    ) -> None:
        """Keeps one span; the oldest goes where there are too many."""
        self._spans.append(
            Span(
                process=self.process, lane=lane, name=name, begin_s=begin_s, end_s=end_s, room=room, layer=layer,
                byte_count=byte_count,
            )
        )  # fmt: skip

    def take(self) -> list[Span]:
        """What was kept since the last time."""
        taken: list[Span] = []
        while self._spans:
            taken.append(self._spans.popleft())
        return taken


class Journeys:
    """What becomes of a daemon's rooms, as spans from each thing that happens to the next. Nothing where nobody asks.

    The engine knows rooms by serial numbers, peers by labels: its spans are told under the label, like all others.
    """

    def __init__(self, spans: Spans | None = None) -> None:
        self.spans = spans
        self._labels: dict[int, int] = {}  # by serial number
        self._since: dict[int, float] = {}  # by label: when the latest thing happened

    def begin(self, room: int, serial: int) -> None:
        """A room of this label is here."""
        if self.spans is not None:
            self._labels[serial] = room
            self._labels.pop(serial - ROOMS_MAX, None)  # serial numbers count up
            self._since[room] = time.monotonic()

    def reached(self, room: int, lane: str, name: str, *, byte_count: int = 0) -> None:
        """What was under way since the last time is over. Unknown rooms are ignored."""
        if self.spans is not None and (since_s := self._since.get(room)) is not None:
            now = self._since[room] = time.monotonic()
            self.spans(lane, name, since_s, now, room=room, byte_count=byte_count)

    def forget(self, room: int) -> None:
        """Nothing more happens to it."""
        self._since.pop(room, None)

    @property
    def engine(self) -> Spans | None:
        """For the engine."""
        return None if self.spans is None else self._of_engine

    def _of_engine(
        self, lane: str, name: str, begin_s: float, end_s: float, *, room: int, layer: int = -1, byte_count: int = 0
    ) -> None:
        assert self.spans is not None
        label = self._labels.get(room, 0)
        self.spans(lane, name, begin_s, end_s, room=label, layer=layer, byte_count=byte_count)
