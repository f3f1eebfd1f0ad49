"""What is where, for the requests that decode at once: a row of every table each, on the device or on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LocalProtocolError
from ..layout.geometry import Int64s
from .card import card, words
from .event import Event
from .hot_row import Rows
from .swap import HotBuffers


class Tables:
    """int32, made once. `hot_slots` (rows, hot), `host_slots` (rows, tokens_max) and `own_slots` (rows,) serve every
    group; `held` and `order` (groups, rows, hot) are a group's own. A row that nobody has is -1 throughout.

    Rows are written in the order of the stream, from pinned memory of their own: nobody waits, unless a row is begun
    again before its launch of last time has ended.
    """

    def __init__(self, ordinal: int | None, *, groups: int, rows: int, hot: int, tokens_max: int) -> None:
        import torch

        self.where = torch.device("cpu") if ordinal is None else torch.device("cuda", ordinal)
        self.tokens_max = tokens_max

        def made(*shape: int) -> Any:
            return torch.full(shape, -1, dtype=torch.int32, device=self.where)

        self.hot_slots, self.host_slots, self.own_slots = made(rows, hot), made(rows, tokens_max), made(rows)
        self.held, self.order = made(groups, rows, hot), made(groups, rows, hot)
        self.refused = torch.zeros(rows, dtype=torch.int32, device=self.where)
        self._rows = Rows(
            host_slots=seen(self.host_slots), hot_slots=seen(self.hot_slots), own_slots=seen(self.own_slots),
            held=seen(self.held), order=seen(self.order), refused=seen(self.refused),
        )  # fmt: skip
        width = tokens_max + hot
        self._events: list[Event] = []
        self._seen = 0  # where the card sees what is sent
        if ordinal is None:
            self._sent: NDArray[np.int32] = np.empty((rows, width), np.int32)
        else:
            here = card(ordinal)
            here.load("hot_row", "hot_row")  # may compile, and the first request is not to wait for that
            address, self._seen = here.pinned(4 * rows * width)
            self._sent = words(address, rows * width).view(np.int32).reshape(rows, width)
            self._events = [Event(here) for _ in range(rows)]
        self._live: set[int] = set()

    @property
    def bytes(self) -> int:
        """Of the device's memory that they take."""
        tables = self.hot_slots, self.host_slots, self.own_slots, self.held, self.order, self.refused
        return sum(table.numel() * table.element_size() for table in tables)

    @property
    def rows(self) -> int:
        """How many there are."""
        return int(self.own_slots.shape[0])

    def of(self, group: int) -> HotBuffers:
        """One group's, as the kernels take them."""
        rows = self._rows
        return HotBuffers(
            held=rows.held[group], order=rows.order[group], hot_slots=rows.hot_slots, host_slots=rows.host_slots
        )

    def check_free(self, row: int) -> None:
        """LocalProtocolError for a row that there is not, or that somebody has."""
        if not 0 <= row < self.rows:
            raise LocalProtocolError(f"row: {row} is outside 0..{self.rows - 1}")
        if row in self._live:
            raise LocalProtocolError(f"row: {row} is in use: it has to be stopped first")

    def begin(self, row: int, host_slots: Int64s, device_slots: Int64s, *, direct: bool, stream: int) -> None:
        """A request gets `row`, which is free; the last of its device slots is its own one. With `direct`, position p
        is in place p, as far as there are places; otherwise nothing is held yet."""
        if self._events:
            self._events[row].wait()
        count, places = len(host_slots), len(device_slots) - 1
        sent = self._sent[row]
        sent[:count] = host_slots
        sent[count : count + places] = device_slots[:-1]
        self._live.add(row)
        at: Any = sent if not self._seen else self._seen + row * sent.nbytes
        own = int(device_slots[-1])
        self._rows.give(row, at, host_count=count, places=places, own=own, direct=direct, stream=stream)
        if self._events:
            self._events[row].record(stream)

    def end(self, row: int, stream: int) -> None:
        """The row is nobody's: what still asks for it is refused."""
        if row in self._live:
            self._live.discard(row)
            at: Any = self._seen or self._sent[row]
            self._rows.give(row, at, host_count=0, places=0, own=-1, direct=False, stream=stream)


def seen(array: Any) -> Any:
    """A tensor as the kernels take it: itself on a card, numpy's view of the same memory on the CPU."""
    return array if array.is_cuda else array.numpy()
