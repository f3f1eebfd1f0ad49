"""Captures queued work in CUDA graphs while other threads allocate and copy."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch

Kept = TypeVar("Kept")
Result = TypeVar("Result")


@contextmanager
def captured(pool: Any = None) -> Generator[torch.cuda.CUDAGraph]:
    """Captures the work queued within, on a stream that is not torch's default. The graph may be replayed afterwards.

    Graphs that never run at once may share `pool`. Garbage collection is off meanwhile: collecting another graph would
    break the capture. The capture always ends, since a stream that is still capturing accepts no other work.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield graph
        except BaseException:
            with suppress(RuntimeError):  # the first error has the reason
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if collects:
            gc.enable()


class Replayed(Generic[Result]):
    """Work that is queued by replaying its graph. On the CPU, and inside another capture, it is done again."""

    def __init__(self, work: Callable[[], Result], device: torch.device) -> None:
        """Does the work twice, first to compile and load what it uses. It must have nothing to do."""
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                work()
                with captured() as self._graph:
                    self._result = work()
            torch.cuda.current_stream(device).wait_stream(stream)

    def __call__(self) -> Result:
        """Returns the work's arrays, which are the same at each replay."""
        if self._graph is None or torch.cuda.is_current_stream_capturing():
            return self._work()
        self._graph.replay()
        return self._result


class Captures(Generic[Kept]):
    """Captured work by shape: at most the `most` latest, each captured when its shape comes for the `worth`th time.

    The threshold limits repeated captures if there are more shapes than `most`.
    """

    def __init__(self, most: int, worth: int) -> None:
        self._most, self._worth = most, worth
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()  # occurrences of shapes that are not kept
        self._leaving: deque[tuple[torch.cuda.Event, Kept]] = deque()  # may run until the event fires
        self._stream: torch.cuda.Stream | None = None

    def get(self, shape: Hashable) -> Kept | None:
        """The captured work of this shape."""
        if (kept := self._kept.get(shape)) is not None:
            self._kept.move_to_end(shape)
        return kept

    def due(self, shape: Hashable) -> bool:
        """Counts a shape that is not kept. Returns whether to capture it now."""
        self._seen[shape] = self._seen.pop(shape, 0) + 1
        if len(self._seen) > 8 * self._most:
            self._seen.popitem(last=False)
        return self._seen[shape] >= self._worth

    def keep(self, shape: Hashable, kept: Kept) -> None:
        """Keeps captured work. The least recently used leaves once the GPU has passed it; nothing waits for that."""
        del self._seen[shape]
        self._kept[shape] = kept
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()
        if len(self._kept) > self._most:
            event = torch.cuda.Event()
            event.record()
            self._leaving.append((event, self._kept.popitem(last=False)[1]))

    @contextmanager
    def side_stream(self) -> Generator[None]:
        """Runs on a stream of its own, after the current stream's earlier and before its later work.

        Libraries create their state for a stream there, outside of any graph.
        """
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)
