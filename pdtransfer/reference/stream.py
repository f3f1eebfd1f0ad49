"""What of a device's stream is over: waiting for it without holding anybody up, and when it did what.

A call that waits inside the driver may keep its lock, and then no thread of the process asks for an event or launches a
copy until the stream is idle. So events are asked, and waited for asleep.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..engine_api import Event, Spans

POLL_S = 0.00005
UNTOLD_MAX = 1_024  # spans: who is never idle tells those that are over as it goes

_Mark: TypeAlias = "torch.cuda.Event | float"
_Anchor: TypeAlias = "tuple[_Mark, float]"  # and its second of CLOCK_MONOTONIC


class Within(NamedTuple):
    """A span of a graph, at each replay of which the device passes its marks."""

    lane: str
    layer: int
    byte_count: int
    begun: _Mark
    ended: _Mark


def passed(event: Event) -> None:
    """Sleeps until the event has fired."""
    while not event.query():
        time.sleep(POLL_S)


def several(rooms: Sequence[int]) -> tuple[str, int]:
    """What a span of these rooms is called, and the room that it is of: none, where they are more than one."""
    return (f"{len(rooms)} requests", 0) if len(rooms) > 1 else ("1 request", rooms[0])


class Fetched:
    """A small tensor on its way to the CPU, behind what computes it."""

    def __init__(self, x: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._held = x
        if x.is_cuda:
            self._held = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._held.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def here(self) -> bool:
        """Whether `get` returns at once."""
        return self._event is None or self._event.query()

    def get(self) -> Tensor:
        """It, on the CPU."""
        if self._event is not None:
            passed(self._event)
        return self._held


class Marks:
    """Marks in the device's own order, told as spans once it has passed them; nothing at all where nobody listens."""

    def __init__(self, spans: Spans | None, device: torch.device) -> None:
        self._spans, self._on_card = spans, device.type == "cuda"
        self._anchor: _Anchor = (0.0, 0.0)
        self._ended: deque[tuple[str, str, int, int, int, _Anchor, _Mark, _Mark]] = deque()
        self._within: list[Within] | None = None  # of the graph that is being captured

    @property
    def pending(self) -> bool:
        """Whether there is something left to tell."""
        return bool(self._ended)

    def anchor(self) -> None:
        """Sets the device's clock by this process's. To be called while the device has nothing to do."""
        if self._spans is None:
            return
        mark = self._mark()
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()
        self._anchor = mark, time.monotonic()

    @contextmanager
    def span(self, lane: str, name: str, *, room: int, layer: int = -1, byte_count: int = 0) -> Generator[None]:
        """What is queued within is of this span. One may lie in another."""
        if self._spans is None:
            yield
            return
        begun = self._mark()
        yield
        if self._within is not None:
            self._within.append(Within(lane, layer, byte_count, begun, self._mark()))
            return
        self._ended.append((lane, name, room, layer, byte_count, self._anchor, begun, self._mark()))
        if len(self._ended) > UNTOLD_MAX:
            self.tell()

    @contextmanager
    def captured(self) -> Generator[list[Within]]:
        """The spans of what is captured within: they happen when it is replayed."""
        self._within = []
        try:
            yield self._within
        finally:
            self._within = None

    def replayed(self, spans: Sequence[Within], rooms: Sequence[int]) -> None:
        """A graph was queued once more, for these rooms. They have to be told before it is the next time."""
        if spans:
            name, alone = several(rooms)
            for lane, layer, byte_count, begun, ended in spans:
                self._ended.append((lane, name, alone, layer, byte_count, self._anchor, begun, ended))

    def tell(self) -> None:
        """Tells of all that the device has passed."""
        while self._spans is not None and self._ended:
            lane, name, room, layer, byte_count, anchor, begun, ended = self._ended[0]
            if isinstance(ended, torch.cuda.Event) and not ended.query():
                return
            times = _seconds(anchor, begun), _seconds(anchor, ended)
            self._spans(lane, name, *times, room=room, layer=layer, byte_count=byte_count)
            self._ended.popleft()

    def _mark(self) -> _Mark:
        if not self._on_card:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True, external=self._within is not None)
        event.record()
        return event


def _seconds(anchor: _Anchor, mark: _Mark) -> float:
    """A mark that was passed, as a second of CLOCK_MONOTONIC."""
    if isinstance(mark, torch.cuda.Event):
        assert isinstance(anchor[0], torch.cuda.Event)
        return anchor[1] + anchor[0].elapsed_time(mark) / 1e3
    return mark
