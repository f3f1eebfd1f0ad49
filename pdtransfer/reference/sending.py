"""From the CPU to where the model computes, without a wait."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device) -> Tensor:
    """It, there. Out of pageable memory it would wait, inside the driver, for all that the stream has to do."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
