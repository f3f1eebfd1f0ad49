"""What is queued on a card, captured in graphs while other threads allocate and copy."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Generator, Hashable
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch

Kept = TypeVar("Kept")


@contextmanager
def captured(pool: Any = None) -> Generator[torch.cuda.CUDAGraph]:
    """What is queued within, on a stream that is not torch's default; the graph may be replayed afterwards.

    `pool` is shared with graphs that never run at once. A stream whose capture nobody ends takes no other work. No
    garbage is collected meanwhile: a graph that went with it would break the capture.
    """
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield graph
        except BaseException:
            with suppress(RuntimeError):  # what was raised first says why
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if collects:
            gc.enable()


class Captures(Generic[Kept]):
    """Graphs, and what they read and write, by shape of the work: the latest `most`, each captured when its shape comes
    for the `worth`th time. Where there are more shapes than that, in turn, few are captured again and again."""

    def __init__(self, most: int, worth: int) -> None:
        self._most, self._worth = most, worth
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()  # how often, of those that are not kept
        self._leaving: deque[tuple[torch.cuda.Event, Kept]] = deque()  # what may be running until the event fires
        self._stream: torch.cuda.Stream | None = None

    def get(self, shape: Hashable) -> Kept | None:
        """What is to be replayed."""
        if (kept := self._kept.get(shape)) is not None:
            self._kept.move_to_end(shape)
        return kept

    def due(self, shape: Hashable) -> bool:
        """Of a shape that is not kept, and comes once more: whether it is to be captured now."""
        self._seen[shape] = self._seen.pop(shape, 0) + 1
        if len(self._seen) > 8 * self._most:
            self._seen.popitem(last=False)
        return self._seen[shape] >= self._worth

    def keep(self, shape: Hashable, kept: Kept) -> None:
        """The one that was not used for longest leaves, once the card has passed it; nobody waits for that."""
        del self._seen[shape]
        self._kept[shape] = kept
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()
        if len(self._kept) > self._most:
            event = torch.cuda.Event()
            event.record()
            self._leaving.append((event, self._kept.popitem(last=False)[1]))

    @contextmanager
    def aside(self) -> Generator[None]:
        """In their own stream, behind what the current one has to do and before what comes next: what libraries keep
        for a stream is to be made there outside of any graph."""
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)
