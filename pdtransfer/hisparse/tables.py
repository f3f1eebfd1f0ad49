"""What is where, for the requests that decode at once: a row of every table each, on the device or on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LocalProtocolError
from ..geometry import Int64s
from ..kernels.card import card
from ..kernels.event import Event
from ..kernels.swap import HotBuffers


class Tables:
    """int32, made once. `hot_slots` (rows, hot), `host_slots` (rows, tokens_max) and `own_slots` (rows,) serve every
    group; `held` and `order` (groups, rows, hot) are a group's own. A row that nobody has is -1 throughout.

    Rows are written in the order of the stream, by way of pinned memory of their own: nobody waits, unless a row is
    begun again before its upload of last time has ended.
    """

    def __init__(self, ordinal: int | None, *, groups: int, rows: int, hot: int, tokens_max: int) -> None:
        import torch

        self.where = torch.device("cpu") if ordinal is None else torch.device("cuda", ordinal)
        self.hot, self.tokens_max = hot, tokens_max

        def made(*shape: int) -> Any:
            return torch.full(shape, -1, dtype=torch.int32, device=self.where)

        self.hot_slots, self.host_slots, self.own_slots = made(rows, hot), made(rows, tokens_max), made(rows)
        self.held, self.order = made(groups, rows, hot), made(groups, rows, hot)
        self.refused = torch.zeros(rows, dtype=torch.int32, device=self.where)
        self._places = torch.arange(hot, dtype=torch.int32, device=self.where)
        self.order[:] = self._places
        pinned = ordinal is not None
        self._sent = torch.empty((rows, tokens_max + hot), dtype=torch.int32, pin_memory=pinned)
        self._sending: NDArray[np.int32] = self._sent.numpy()
        self._events = [Event(card(ordinal)) for _ in range(rows)] if ordinal is not None else None
        self._live: set[int] = set()

    @property
    def bytes(self) -> int:
        """Of the device's memory that they take."""
        tables = self.hot_slots, self.host_slots, self.own_slots, self.held, self.order, self.refused, self._places
        return sum(table.numel() * table.element_size() for table in tables)

    @property
    def rows(self) -> int:
        """How many there are."""
        return int(self.own_slots.shape[0])

    def of(self, group: int) -> HotBuffers:
        """One group's, as the kernels take them."""
        shared = seen(self.hot_slots), seen(self.host_slots)
        held, order = seen(self.held[group]), seen(self.order[group])
        return HotBuffers(held=held, order=order, hot_slots=shared[0], host_slots=shared[1])

    def begin(self, row: int, host_slots: Int64s, device_slots: Int64s, *, direct: bool, stream: int) -> None:
        """A request gets `row`; the last of its device slots is its own one. With `direct`, position p is in place p,
        as far as there are places; otherwise nothing is held yet."""
        if row in self._live:
            raise LocalProtocolError(f"row: {row} is in use: it has to be stopped first")
        if self._events is not None:
            self._events[row].wait()
        self._live.add(row)
        sending, places = self._sending[row], len(device_slots) - 1
        sending[: len(host_slots)] = host_slots
        sending[self.tokens_max : self.tokens_max + places] = device_slots[:-1]
        sent = self._sent[row]
        self.host_slots[row, : len(host_slots)].copy_(sent[: len(host_slots)], non_blocking=True)
        self.hot_slots[row, :places].copy_(sent[self.tokens_max : self.tokens_max + places], non_blocking=True)
        if self._events is not None:
            self._events[row].record(stream)
        self.own_slots[row] = int(device_slots[-1])
        self.refused[row] = 0
        self.order[:, row] = self._places
        held = places if direct else 0  # of places without a slot nothing is true
        self.held[:, row, :held] = self._places[:held]
        self.held[:, row, held:] = -1

    def end(self, row: int) -> bool:
        """The row is nobody's: what still asks for it is refused. Returns whether it was somebody's."""
        if row not in self._live:
            return False
        self._live.discard(row)
        self.hot_slots[row] = -1
        self.host_slots[row] = -1
        self.own_slots[row] = -1
        return True


def seen(array: Any) -> Any:
    """A tensor as the kernels take it: itself on a card, numpy's view of the same memory on the CPU."""
    return array if array.is_cuda else array.numpy()
