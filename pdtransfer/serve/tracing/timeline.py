"""Spans that the parts of a process report while tracing is on, and the parts of each room's time on a daemon.

Spans go to an optional sink. The few parts of a room's time are kept until it has ended, with or without one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ...handoff.events import Spans
from .spans import TimedSpan, Timeline

ROOMS_MAX = 1 << 16  # the latest rooms whose ids are known


# Parts of a room's time that records of ended rooms name as well: a lane, and the span's name.
QUEUE, COMPUTE, EXPOSED = ("prompt", "queue"), ("prompt", "compute"), ("transfer", "exposed")
SLOTS, LANDING = ("control", "wait for slots"), ("landing", "READY")
ADMISSION, FIRST_TOKEN = ("admission", "READY to first step"), ("first token", "READY to first token")


@dataclass(slots=True, eq=False)
class Journey:
    """One room while it is on this daemon; times in seconds of CLOCK_MONOTONIC."""

    began_s: float
    since_s: float  # the time of the latest event
    parts: dict[tuple[str, str], TimedSpan] = field(default_factory=dict[tuple[str, str], TimedSpan])
    computed_s: float = 0.0  # the end of the latest step that computed it
    peer: str = ""  # on the other side, where it is known
    transport: str = ""

    def seconds(self, part: tuple[str, str]) -> float | None:
        """How long a part took; None unless it has ended."""
        return None if (span := self.parts.get(part)) is None else span.seconds

    @property
    def spans(self) -> tuple[TimedSpan, ...]:
        """The parts by their begin."""
        return tuple(sorted(self.parts.values(), key=lambda span: (span.begin_s, span.end_s)))


class Journeys:
    """Turns the events of a daemon's rooms into the parts of their times, and into spans while tracing is on.

    Engines use local ids and peers use room ids: an engine's spans are stored under the room id.
    """

    def __init__(self, spans: Timeline | None = None) -> None:
        self.spans = spans
        self._process = "" if spans is None else spans.process
        self._labels: dict[int, int] = {}  # by local id
        self._rooms: dict[int, Journey] = {}  # by room id

    def begin(self, room: int, serial: int) -> None:
        """A room with this id has started."""
        now = time.monotonic()
        self._rooms[room] = Journey(now, now)
        if self.spans is not None:
            self._labels[serial] = room
            self._labels.pop(serial - ROOMS_MAX, None)  # local ids count up

    def of(self, room: int) -> Journey | None:
        """The room's journey until it is forgotten."""
        return self._rooms.get(room)

    def reached(self, room: int, lane: str, name: str, *, byte_count: int = 0) -> None:
        """Ends the part since the last event. Unknown rooms are ignored."""
        if (journey := self._rooms.get(room)) is not None:
            since_s, journey.since_s = journey.since_s, time.monotonic()
            self._part(room, journey, (lane, name), since_s, journey.since_s, byte_count)

    def stepped(self, room: int, begin_s: float, end_s: float) -> None:
        """A step of prefill's engine computed some of the room; its first one ends the queue."""
        if (journey := self._rooms.get(room)) is not None:
            if QUEUE not in journey.parts:
                self._part(room, journey, QUEUE, journey.began_s, begin_s)
            journey.computed_s = end_s

    def computed(self, room: int, *, by_step: bool) -> None:
        """Prefill has the whole prompt and its first token; `by_step`: by the latest step that was reported."""
        if (journey := self._rooms.get(room)) is not None and QUEUE in journey.parts:
            if not by_step:
                journey.computed_s = time.monotonic()
            self._part(room, journey, COMPUTE, journey.parts[QUEUE].end_s, journey.computed_s)

    def written(self, room: int) -> None:
        """Prefill has written all bytes of the room, on all ranks."""
        if (journey := self._rooms.get(room)) is not None and COMPUTE in journey.parts:
            self._part(room, journey, EXPOSED, journey.parts[COMPUTE].end_s, time.monotonic())

    def admitted(self, room: int, begin_s: float) -> None:
        """The step of decode's engine that reports the first token has begun then."""
        if (journey := self._rooms.get(room)) is not None and LANDING in journey.parts:
            self._part(room, journey, ADMISSION, journey.parts[LANDING].end_s, begin_s)

    def forget(self, room: int) -> None:
        """The room has ended."""
        self._rooms.pop(room, None)

    @property
    def engine(self) -> Spans | None:
        """The sink for the engine's spans."""
        return None if self.spans is None else self._of_engine

    def _part(
        self, room: int, journey: Journey, part: tuple[str, str], begin_s: float, end_s: float, byte_count: int = 0
    ) -> None:
        span = journey.parts[part] = TimedSpan(
            process=self._process, lane=part[0], name=part[1], begin_s=begin_s, end_s=max(begin_s, end_s), room=room,
            byte_count=byte_count,
        )  # fmt: skip
        if self.spans is not None:
            self.spans.add(span)

    def _of_engine(
        self, lane: str, name: str, begin_s: float, end_s: float, *, room: int, layer: int = -1, byte_count: int = 0
    ) -> None:
        assert self.spans is not None
        label = self._labels.get(room, 0)
        self.spans(lane, name, begin_s, end_s, room=label, layer=layer, byte_count=byte_count)
