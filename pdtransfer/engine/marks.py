"""What of a device's stream is over: waiting for it without holding anybody up, and when it did what.

A call that waits inside the driver may keep its lock, and then no thread of the process asks for an event or launches a
copy until the stream is idle. So events are asked, and waited for asleep.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TypeAlias

import torch
from torch import Tensor

from .base import Event, Spans

POLL_S = 0.0001
UNTOLD_MAX = 1_024  # spans: who is never idle tells those that are over as it goes

_Mark: TypeAlias = "torch.cuda.Event | float"


def passed(event: Event) -> None:
    """Sleeps until the event has fired."""
    while not event.query():
        time.sleep(POLL_S)


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
        self._anchor: _Mark = 0.0  # and its second
        self._anchored_s = 0.0
        self._begun: _Mark = 0.0
        self._ended: deque[tuple[str, str, int, int, _Mark, _Mark]] = deque()

    @property
    def pending(self) -> bool:
        """Whether there is something left to tell."""
        return bool(self._ended)

    def anchor(self) -> None:
        """Sets the device's clock by this process's. To be called while the device has nothing to do."""
        if self._spans is None:
            return
        self._anchor = self._mark()
        if isinstance(self._anchor, torch.cuda.Event):
            self._anchor.synchronize()
            self._anchored_s = time.monotonic()

    def begin(self) -> None:
        """What is queued from here on is of the next span."""
        if self._spans is not None:
            self._begun = self._mark()

    def end(self, lane: str, name: str, *, room: int, layer: int = -1) -> None:
        """What was queued up to here is of this span."""
        if self._spans is not None:
            self._ended.append((lane, name, room, layer, self._begun, self._mark()))
            if len(self._ended) > UNTOLD_MAX:
                self.tell()

    def tell(self) -> None:
        """Tells of all that the device has passed."""
        while self._spans is not None and self._ended:
            lane, name, room, layer, begun, ended = self._ended[0]
            if isinstance(ended, torch.cuda.Event) and not ended.query():
                return
            self._spans(lane, name, self._seconds(begun), self._seconds(ended), room=room, layer=layer)
            self._ended.popleft()

    def _mark(self) -> _Mark:
        if not self._on_card:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: _Mark) -> float:
        """A mark that was passed, as a second of CLOCK_MONOTONIC."""
        if isinstance(mark, torch.cuda.Event):
            assert isinstance(self._anchor, torch.cuda.Event)
            return self._anchored_s + self._anchor.elapsed_time(mark) / 1e3
        return mark
