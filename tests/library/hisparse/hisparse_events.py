"""Events that fire when a test lets them, and slots of a host pool."""

from __future__ import annotations

import numpy as np

from pdtransfer.hisparse.coordinator import Int64s


class Switch:
    """An event that fires only when it is asked to; once it is `broken` nobody can ask it."""

    def __init__(self) -> None:
        self.fired = self.broken = False

    def query(self) -> bool:
        if self.broken:
            raise OSError("the GPU has fallen off the bus")
        return self.fired


def host(count: int, first: int = 0) -> Int64s:
    """This many slots, the last one first: their order says nothing."""
    return np.arange(first, first + count, dtype=np.int64)[::-1]
