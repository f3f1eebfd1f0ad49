"""A hot pool that stages: each prompt goes by way of other memory, by a second copy of the pool's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdtransfer.hisparse.hot_pool import HotPool
from pdtransfer.kernels.pools import Pool


def stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants the staging copy, on the CPU, in every hot pool of this process."""
    admit = HotPool._admit

    def staged(self: HotPool, target: Pool, source: Pool, target_slots: Any, source_slots: Any, rows: int) -> None:
        scratch = np.zeros(self.device_pool.layout.end, np.uint8)
        between = Pool(layout=self.device_pool.layout, address=scratch.ctypes.data)
        admit(self, between, source, range(rows), source_slots, rows)
        admit(self, target, between, target_slots, range(rows), rows)

    monkeypatch.setattr(HotPool, "_admit", staged)
