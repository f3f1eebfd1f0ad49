"""Arguments of copies: pools, slots, and the words in memory that report progress and cancel a copy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..layout.layout import Layout
from .cancel import CancelWord


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Memory laid out by `layout`, whose bases are offsets from `address`.

    Without `device` it is memory of this process. With `device`, the index of a GPU, `address` is that GPU's: of its
    memory, or, with `host`, of registered host memory, which may differ from its host address.
    """

    layout: Layout
    address: int
    device: int | None = None
    host: bool = False

    def layers(self, first: int, end: int) -> Pool:
        """The planes of layers [first, end)."""
        return replace(self, layout=self.layout.layers(first, end))


@dataclass(frozen=True, slots=True, eq=False)
class PageSlots:
    """Page indices instead of slots; each stands for the page_size consecutive slots of a page."""

    entries: Any


Slots: TypeAlias = "NDArray[np.int64] | NDArray[np.int32] | range | PageSlots | Any"
"""Slots of one side: a numpy array (n,) of int32 or int64, a range, an array in a GPU's memory (anything with
__cuda_array_interface__) that only the kernel reads, or PageSlots of one of these."""


class GpuArray:
    """Memory at an address of a GPU, or one that a GPU sees there, as torch and the kernels take it: elements of
    `typestr`, as numpy spells it. The caller keeps the memory."""

    def __init__(self, address: int, count: int, typestr: str = "<i8") -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (count,), "typestr": typestr, "strides": None, "version": 3,
        }  # fmt: skip


class State(IntEnum):
    """The state of a launch."""

    RUNNING = 0
    COMPLETE = 1
    CANCELLED = 2  # some rows may have been copied


class Progress:
    """Reports one launch at a time through four words in pinned memory, without a call into the driver.

    Once `state` is not RUNNING, no store of the launch is pending. Without a GPU it serves copies on the CPU.
    """

    __slots__ = ("_ticket", "_words", "address", "held", "tally")

    def __init__(self, ordinal: int | None = None) -> None:
        self._ticket = 0
        if ordinal is None:
            self._words, self.address, self.tally = np.zeros(4, np.uint32), 0, 0
            return
        from .gpu import gpu_at, words

        gpu = gpu_at(ordinal)
        host, self.address = gpu.pinned(16)
        self._words = words(host, 4)
        self.tally = gpu.allocate(16)
        gpu.clear(self.tally, 16)

    def begin(self) -> int:
        """Starts a new launch and returns its ticket. Only the launcher calls this."""
        self._ticket = (self._ticket + 1) & 0x3FFF_FFFF
        self._words[:2] = 0
        return self._ticket

    def end(self, state: State) -> None:
        """Writes the final state, as the kernel does on a GPU."""
        self._words[0] = self._ticket << 2 | state

    @property
    def state(self) -> State:
        """The launch's state; costs one load. The state of an earlier launch counts as RUNNING."""
        word = int(self._words[0])
        return State(word & 3) if word >> 2 == self._ticket else State.RUNNING

    @property
    def refused(self) -> int:
        """The number of rows that the kernel skipped because their slots are outside their pools."""
        return int(self._words[1])


class PinnedCancel(CancelWord):
    """A cancel word that copies on the CPU and on GPU `ordinal` read."""

    __slots__ = ("device_address",)

    def __init__(self, ordinal: int) -> None:
        from .gpu import gpu_at

        super().__init__()
        self.address, self.device_address = gpu_at(ordinal).pinned(4)
        self._word = ctypes.c_uint32.from_address(self.address)

    def clear(self) -> None:
        """Resets the word for the next launch. No other copy may use it any more."""
        self._word.value = 0
