"""A row of the hot pool's tables becomes a request's, or nobody's: on a card in one launch, or on the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

from .card import card
from .swap import address_of

_BLOCKS, _THREADS = 64, 256


class HotRowArgument(ctypes.Structure):
    """HotRow of kernels/hot_row.h."""

    _fields_ = (
        ("sent", ctypes.c_uint64), ("host_slots", ctypes.c_uint64), ("hot_slots", ctypes.c_uint64),
        ("own_slots", ctypes.c_uint64), ("held", ctypes.c_uint64), ("order", ctypes.c_uint64),
        ("refused", ctypes.c_uint64), ("host_stride", ctypes.c_int64), ("groups", ctypes.c_int32),
        ("rows", ctypes.c_int32), ("hot", ctypes.c_int32), ("row", ctypes.c_int32), ("host_count", ctypes.c_int32),
        ("places", ctypes.c_int32), ("own", ctypes.c_int32), ("direct", ctypes.c_int32),
    )  # fmt: skip


class Rows:
    """Every row's tables, int32, all of numpy or all in a card's memory; what nobody has is -1.

    `host_slots` (rows, tokens), `hot_slots` (rows, hot) and `own_slots` (rows,); `held` and `order` (groups, rows,
    hot); `refused` (rows,). All of them stay where they are.
    """

    def __init__(
        self, *, host_slots: Any, hot_slots: Any, own_slots: Any, held: Any, order: Any, refused: Any
    ) -> None:  # fmt: skip
        self.host_slots, self.hot_slots, self.own_slots = host_slots, hot_slots, own_slots
        self.held, self.order, self.refused = held, order, refused
        self._card = card(held.device.index) if getattr(held, "is_cuda", False) else None
        groups, rows, hot = held.shape
        self.argument = HotRowArgument(
            host_slots=address_of("host_slots", host_slots), hot_slots=address_of("hot_slots", hot_slots),
            own_slots=address_of("own_slots", own_slots), held=address_of("held", held),
            order=address_of("order", order), refused=address_of("refused", refused), host_stride=host_slots.shape[1],
            groups=groups, rows=rows, hot=hot,
        )  # fmt: skip

    def give(
        self, row: int, sent: Any, *, host_count: int, places: int, own: int, direct: bool, stream: int = 0
    ) -> None:
        """Gives `row` to a request, or to nobody where `host_count` is 0.

        `sent` is `host_count` arena slots, then `places` device slots, int32: numpy's, or an address of host memory
        that a card sees, and then it has to stay as it is until the launch that is queued has ended. With `direct`
        position p is in place p, otherwise nothing is held; nobody keeps what is held, and `refused`.
        """
        if self._card is None:
            self._on_cpu(row, sent, host_count, places, own, direct)
            return
        argument = self.argument
        argument.row, argument.sent, argument.host_count, argument.places = row, sent, host_count, places
        argument.own, argument.direct = own, direct
        self._card.launch("hot_row", argument, blocks=_BLOCKS, threads=_THREADS, stream=stream)

    def _on_cpu(self, row: int, sent: Any, host_count: int, places: int, own: int, direct: bool) -> None:
        self.host_slots[row, :host_count] = sent[:host_count]
        self.host_slots[row, host_count:] = -1
        self.hot_slots[row, :places] = sent[host_count : host_count + places]
        self.hot_slots[row, places:] = -1
        self.own_slots[row] = own
        if not host_count:
            return
        self.refused[row] = 0
        self.order[:, row] = range(self.order.shape[2])
        self.held[:, row] = -1
        if direct:
            self.held[:, row, :places] = range(places)
