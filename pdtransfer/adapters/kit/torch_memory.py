"""Tensors of an engine inside memory of ours: the engine allocates its KV cache as usual, and it lies where peers
write.

Shared by the adapters of all engines that allocate their cache with torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...memory.arena_memory import ArenaMemory

_TABLES = torch.int32, torch.int64
_ALIGNMENT = 4096  # bytes; what any kernel or transport asks of a buffer


class PooledTensors(TorchFunctionMode):
    """While entered, what torch.zeros and torch.empty make on the device of `backing` lies in `backing`, but for tables
    of integers.

    `backing` is uint8 (byte_count,), all zero. `wanted` is asked with the size of each tensor in bytes. A tensor that
    it does not want, or that does not fit any more, is allocated as without the mode. `backing` must live as long as
    the tensors do. Nothing of it is used twice. An empty one measures: `sizes` are those that were asked for.
    """

    def __init__(self, backing: torch.Tensor, wanted: Callable[[int], bool]) -> None:
        super().__init__()
        assert backing.dtype is torch.uint8
        assert backing.ndim == 1
        self.backing, self._wanted, self._used = backing, wanted, 0
        self.sizes: list[int] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for each of its functions."""
        options = kwargs or {}
        if func not in (torch.zeros, torch.empty) or not _is_on(self.backing.device, options.get("device")):
            return func(*args, **options)
        like: torch.Tensor = func(*args, **{**options, "device": "meta", "pin_memory": False})
        byte_count = like.numel() * like.element_size()
        if like.dtype in _TABLES or not self._wanted(byte_count):
            return func(*args, **options)
        self.sizes.append(byte_count)
        first = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if not 0 < byte_count <= len(self.backing) - first:
            return func(*args, **options)
        self._used = first + byte_count
        return self.backing[first : self._used].view(like.dtype).view(like.shape)


def _is_on(device: torch.device, named: Any) -> bool:
    """True if what an engine names, or torch's default if that is None, is this device."""
    meant = torch.get_default_device() if named is None else torch.device(named)
    return meant.type == device.type and meant.index in (None, device.index)


def arena_tensor(arena: ArenaMemory) -> torch.Tensor:
    """All bytes of an arena, uint8 (byte_count,). The arena cannot be closed while it, or a tensor in it, lives."""
    return torch.frombuffer(arena.mapping.view, dtype=torch.uint8)


def pooled_bytes(sizes: list[int]) -> int:
    """The size of a backing that holds tensors of these sizes, in bytes."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
