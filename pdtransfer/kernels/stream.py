"""Works with a device's stream without blocking other threads: transfers, waits for events, and timed spans.

A call that waits inside the driver may hold its lock, which blocks other threads' event queries and launches until the
stream is idle. So this module polls events and sleeps between polls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..handoff.events import Event, Spans

if TYPE_CHECKING:  # an engine without torch takes its spans here
    import torch
    from torch import Tensor

POLL_S = 0.00005
PENDING_SPANS_MAX = 1_024  # a device that is never idle reports finished spans at this bound

_Mark: TypeAlias = "torch.cuda.Event | float"
_Anchor: TypeAlias = "tuple[_Mark, float]"  # a mark and its time, in seconds of CLOCK_MONOTONIC


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to the device through pinned memory; from pageable memory the driver would wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class Download:
    """A small tensor's copy to the CPU, queued behind the work that computes it."""

    def __init__(self, x: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = x
        if x.is_cuda:
            import torch

            self._tensor = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._tensor.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def ready(self) -> bool:
        """True if `get` returns at once."""
        return self._event is None or self._event.query()

    def get(self) -> Tensor:
        """Waits for the copy and returns it."""
        if self._event is not None:
            wait_event(self._event)
        return self._tensor


def wait_event(event: Event) -> None:
    """Sleeps until the event has fired."""
    while not event.query():
        time.sleep(POLL_S)


def span_of(rooms: Sequence[int]) -> tuple[str, int]:
    """The name of a span of these rooms, and its room, or 0 for several."""
    return (f"{len(rooms)} requests", 0) if len(rooms) > 1 else ("1 request", rooms[0])


class CapturedSpan(NamedTuple):
    """A span in a graph. The device passes its marks at each replay."""

    lane: str
    layer: int
    byte_count: int
    begin: _Mark
    end: _Mark


class DeviceSpans:
    """Times spans with marks in the device's stream, and reports them once the device has passed them.

    Does nothing if `spans` is None. Without a device, and on the CPU, the marks are times of this process.
    """

    def __init__(self, spans: Spans | None, device: torch.device | None) -> None:
        self._report, self._on_gpu = spans, device is not None and device.type == "cuda"
        self._anchor: _Anchor = (0.0, 0.0)
        self._pending: deque[tuple[str, str, int, int, int, _Anchor, _Mark, _Mark]] = deque()
        self._captured: list[CapturedSpan] | None = None  # spans of the graph that is being captured

    @property
    def pending(self) -> bool:
        """True if spans wait to be reported."""
        return bool(self._pending)

    def anchor(self) -> None:
        """Relates the device's clock to this process's. Call it while the device is idle."""
        if self._report is None:
            return
        mark = self._mark()
        if not isinstance(mark, int | float):
            mark.synchronize()
        self._anchor = mark, time.monotonic()

    @contextmanager
    def span(self, lane: str, name: str, *, room: int, layer: int = -1, byte_count: int = 0) -> Generator[None]:
        """Times the work queued within. Spans may be nested."""
        if self._report is None:
            yield
            return
        begin = self._mark()
        yield
        if self._captured is not None:
            self._captured.append(CapturedSpan(lane, layer, byte_count, begin, self._mark()))
            return
        self._pending.append((lane, name, room, layer, byte_count, self._anchor, begin, self._mark()))
        if len(self._pending) > PENDING_SPANS_MAX:
            self.report()

    @contextmanager
    def captured(self) -> Generator[list[CapturedSpan]]:
        """Collects the spans of a graph that is captured within."""
        self._captured = []
        try:
            yield self._captured
        finally:
            self._captured = None

    def replayed(self, spans: Sequence[CapturedSpan], rooms: Sequence[int]) -> None:
        """Adds the spans of a replay for these rooms. They must be reported before the next replay."""
        if spans:
            name, alone = span_of(rooms)
            for lane, layer, byte_count, begin, end in spans:
                self._pending.append((lane, name, alone, layer, byte_count, self._anchor, begin, end))

    def report(self) -> None:
        """Reports all spans that the device has passed."""
        while self._report is not None and self._pending:
            lane, name, room, layer, byte_count, anchor, begin, end = self._pending[0]
            if not isinstance(end, int | float) and not end.query():
                return
            times = _seconds(anchor, begin), _seconds(anchor, end)
            self._report(lane, name, *times, room=room, layer=layer, byte_count=byte_count)
            self._pending.popleft()

    def _mark(self) -> _Mark:
        if not self._on_gpu:
            return time.monotonic()
        import torch

        event = torch.cuda.Event(enable_timing=True, external=self._captured is not None)
        event.record()
        return event


def _seconds(anchor: _Anchor, mark: _Mark) -> float:
    """The time of a passed mark, in seconds of CLOCK_MONOTONIC."""
    if not isinstance(mark, int | float):
        assert not isinstance(anchor[0], int | float)
        return anchor[1] + anchor[0].elapsed_time(mark) / 1e3
    return mark
