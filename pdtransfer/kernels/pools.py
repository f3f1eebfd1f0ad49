"""What copies take: pools, slots, and the words through which a CPU and a card hear of each other."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..layout.layout import Layout
from .cancel import Cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Memory laid out by `layout`, whose bases are offsets from `address`.

    Without a `card` it is this process's own. With one, `address` is the card's: of its own memory, or, with `host`,
    of registered host memory as the card sees it (never assume that this is the host's own address).
    """

    layout: Layout
    address: int
    card: int | None = None
    host: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Page indices instead of slots: each stands for page_size slots of its pool, one after another."""

    entries: Any


Slots: TypeAlias = "NDArray[np.int64] | NDArray[np.int32] | range | Pages | Any"
"""Rows of one side: integers (n,) of numpy, a range, Pages of either, or the like in a card's memory (anything with
__cuda_array_interface__, int32 or int64), which nobody but the kernel looks at."""


class State(IntEnum):
    """How a launch stands."""

    RUNNING = 0
    COMPLETE = 1
    CANCELLED = 2  # some of it may have been copied


class Progress:
    """What the CPU learns of one launch at a time, without a call into the driver: four words in pinned memory.

    Once `state` is not RUNNING, no store of the launch is pending. Made without a card it serves copies on the CPU.
    """

    __slots__ = ("_ticket", "_words", "address", "held", "tally")

    def __init__(self, ordinal: int | None = None) -> None:
        self._ticket = 0
        if ordinal is None:
            self._words, self.address, self.tally = np.zeros(4, np.uint32), 0, 0
            return
        from .card import card, words

        here = card(ordinal)
        host, self.address = here.pinned(16)
        self._words = words(host, 4)
        self.tally = here.allocate(16)
        here.clear(self.tally, 16)

    def begin(self) -> int:
        """The number of the launch that these words are about from now on: the launcher's to call."""
        self._ticket = (self._ticket + 1) & 0x3FFF_FFFF
        self._words[:2] = 0
        return self._ticket

    def end(self, state: State) -> None:
        """What the kernel does on a card."""
        self._words[0] = self._ticket << 2 | state

    @property
    def state(self) -> State:
        """Read it as often as you like; it costs a load. What it says of an earlier launch counts as RUNNING."""
        word = int(self._words[0])
        return State(word & 3) if word >> 2 == self._ticket else State.RUNNING

    @property
    def refused(self) -> int:
        """Rows that were left out since their slots, which only the card knew, are outside their pools."""
        return int(self._words[1])


class PinnedCancel(Cancel):
    """A cancel word that copies on the CPU and on card `ordinal` look at alike."""

    __slots__ = ("device_address",)

    def __init__(self, ordinal: int) -> None:
        from .card import card

        super().__init__()
        self.address, self.device_address = card(ordinal).pinned(4)
        self._word = ctypes.c_uint32.from_address(self.address)

    def clear(self) -> None:
        """Makes it as new, for the next launch: nobody else may have it any more."""
        self._word.value = 0
