"""What a GPU does by itself, beside the driver."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest

from pdtransfer.kernels.gpu import Gpu


class Pinning(Gpu):
    """One that only pins, from address 0 on."""

    def __init__(self) -> None:
        self._lock_words, self._words = threading.Lock(), []
        self.pins: list[int] = []

    def _pinned(self, byte_count: int) -> tuple[int, int]:
        self.pins.append(byte_count)
        at = 1 << 20 << len(self.pins)
        return at, at + 7


def test_words_for_launches_pin_memory_once_in_a_thousand() -> None:
    here = Pinning()
    words = [here.pinned(4 if index % 2 else 16) for index in range(1_024)]
    assert len(here.pins) == 1
    addresses = sorted(address for address, _ in words)
    assert all(later - address >= 64 for address, later in pairwise(addresses))
    assert addresses[-1] - addresses[0] + 64 <= here.pins[0]
    assert all(there == address + 7 for address, there in words)
    here.pinned(4)
    assert len(here.pins) == 2


@pytest.mark.parametrize("byte_count", [65, 1 << 20])
def test_larger_memory_is_pinned_for_itself(byte_count: int) -> None:
    here = Pinning()
    here.pinned(byte_count)
    here.pinned(byte_count)
    assert here.pins == [byte_count, byte_count]
