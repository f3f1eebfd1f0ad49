"""Pools and arenas as tensors of the device that computes on them."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ....handoff.events import Event
from ....kernels.plane_views import device_tensor
from ....kernels.stream import wait_event
from ....layout.engine_pools import GpuMemory, SharedMemory
from ....memory.shared_pool import shared_memory
from ...engine_api import EngineDescription

AHEAD_MAX = 8  # cells that are queued on a GPU: a full launch queue would block other threads' launches


class TensorPool:
    """A prefill pool of zeroes, of a GPU or shared, and `bytes`, its tensor uint8."""

    def __init__(self, byte_count: int, device: torch.device) -> None:
        if device.type == "cuda":
            self.bytes = torch.zeros(byte_count, dtype=torch.uint8, device=device)
            torch.cuda.current_stream(device).synchronize()  # other streams read it
            self.memory: SharedMemory | GpuMemory = GpuMemory(
                device=self.bytes.get_device(), address=self.bytes.data_ptr(), byte_count=byte_count
            )
        else:  # torch.zeros would touch every page of the pool
            self.memory = shared_memory(byte_count, self)
            self.bytes = torch.frombuffer(self.memory.view, dtype=torch.uint8, count=byte_count)
        self._ahead: deque[Event] = deque()  # of cells that the GPU may still compute

    def event(self) -> Event | None:
        """Fires when everything computed so far is in the pool. None where it is now."""
        if not self.bytes.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        self._ahead.append(event)
        if len(self._ahead) > AHEAD_MAX:
            wait_event(self._ahead.popleft())
        return event


def arena_tensors(
    description: EngineDescription, device: torch.device, arena: memoryview, *, device_address: int,
    hbm: memoryview | GpuMemory | None,
) -> dict[str, Tensor]:  # fmt: skip
    """What DecodeEngine.attach gets, by memory: uint8, of the device. Raises ValueError for memory of another device.

    A memory in which nothing lies is left out.
    """
    tensors: dict[str, Tensor] = {}
    if description.memory_bytes and device.type == "cuda":
        if not device_address:
            raise ValueError(f"arena: it was not registered with {device}")
        tensors["dram"] = device_tensor(device_address, description.memory_bytes, device).view(torch.uint8)
    elif description.memory_bytes:
        tensors["dram"] = torch.frombuffer(arena, dtype=torch.uint8, count=description.memory_bytes)
    if not description.hbm_bytes:
        return tensors
    if hbm is None or isinstance(hbm, GpuMemory) != (device.type == "cuda"):
        raise ValueError(f"hbm: {type(hbm).__name__}, the engine computes on {device}")
    if isinstance(hbm, GpuMemory):
        tensors["hbm"] = device_tensor(hbm.address, description.hbm_bytes, device).view(torch.uint8)
    else:
        tensors["hbm"] = torch.frombuffer(hbm, dtype=torch.uint8, count=description.hbm_bytes)
    return tensors
