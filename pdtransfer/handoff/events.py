"""Events that an access waits for, and the receiver of timed spans: both come from whoever owns the device."""

from __future__ import annotations

from typing import Protocol


class Event(Protocol):
    """The type of `after=`: torch.cuda.Event, or any object with `query`."""

    def query(self) -> bool:
        """True if all work before the event is done; never waits."""
        ...


class Spans(Protocol):
    """Receives timed spans, from any thread."""

    def __call__(
        self, lane: str, name: str, begin_s: float, end_s: float, *, room: int, layer: int = -1, byte_count: int = 0
    ) -> None:
        """Reports that `lane` did `name` between these times in seconds of CLOCK_MONOTONIC; `layer` is the first layer
        of the span."""
        ...
