"""Arrays that a SwapPlan is written into."""

from __future__ import annotations

import numpy as np

from pdtransfer.hisparse.swap import SwapPlan


def plan_for(requests: int, top: int) -> SwapPlan:
    lists = [np.full(requests * top, -7, np.int32) for _ in range(2)]
    slots, counts = np.full((requests, top), -7, np.int32), np.zeros(5, np.int32)
    return SwapPlan(slots=slots, sources=lists[0], targets=lists[1], counts=counts)
