"""Where vLLM's KV cache lies, and how writers get there.

On the CPU vLLM's cache is allocated inside a memfd arena. On a card decode names vLLM's own allocation to the writers
of its host. Where neither is possible, rows land in host memory and are copied once more, to vLLM's cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from ...engine_api import CardMemory
from ...errors import ConfigError, WorldError
from ...kernels.card import card as card_of
from ...memory import cuda_ipc
from ...memory.arena_memory import ArenaMemory
from ...memory.hbm import Hbm
from ..torch_memory import PooledTensors, arena_tensor, pooled_bytes

log = logging.getLogger(__name__)

GAP_BYTES_MAX = 1 << 30  # between allocations that are taken for one range
COPIED_UP = "what lands is copied once more, from host memory to vLLM's KV cache"


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [first, end) that vLLM's KV cache lies in, on a card or in this process's memory."""

    first: int
    end: int
    card: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Decode: an arena, and the memory of it that the components are in. Their bases count from `base`."""

    arena: ArenaMemory
    base: int
    memory: Literal["dram", "hbm"]
    copied_up: bool


class CacheMemory:
    """The memory of one worker's KV cache, of which vLLM allocates tensors of `sizes` bytes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._arena: ArenaMemory | None = None
        self._target: Target | None = None

    def pooled(self) -> PooledTensors:
        """A context in which vLLM allocates its cache on the CPU: inside the arena. Raises WorldError where the host
        cannot back it."""
        arena = self._arena = ArenaMemory.create(pooled_bytes(self._sizes), name="vllm-kv-cache")
        arena.prefault()
        return PooledTensors(arena_tensor(arena), self._sizes.__contains__)

    def pooled_on(self, device: torch.device) -> PooledTensors:
        """A context in which vLLM allocates its cache on a card: in one allocation, whatever the number of tensors."""
        backing = torch.zeros(pooled_bytes(self._sizes), dtype=torch.uint8, device=device)
        return PooledTensors(backing, self._sizes.__contains__)

    def pool_fd(self, extent: Extent) -> int:
        """The memfd that the cache lies in, by which writers on other hosts read it; -1 if there is none."""
        return self._arena.fd if self._arena is not None and self._holds(self._arena, extent) else -1

    def base(self, extent: Extent) -> int:
        """The address from which the planes of a pool count: where the memfd is mapped, or where the cache begins."""
        if self._arena is not None and self._holds(self._arena, extent):
            return self._arena.mapping.address
        return extent.first

    def target(self, extent: Extent) -> Target:
        """What decode offers to writers. Raises ConfigError for a cache in too many places, WorldError for memory that
        the host does not have."""
        if self._arena is not None and self._holds(self._arena, extent):
            self._target = Target(self._arena, self._arena.mapping.address, "dram", copied_up=False)
            return self._target
        byte_count = extent.end - extent.first
        if byte_count > 2 * sum(self._sizes) + GAP_BYTES_MAX:
            raise ConfigError(f"KV cache: {sum(self._sizes)} bytes are spread over a range of {byte_count}")
        handle = b"" if extent.card is None else exported(extent, extent.card)
        if not handle:
            where = "vLLM allocated its KV cache elsewhere" if extent.card is None else "no peer can write this card"
            log.warning("%s: %s", where, COPIED_UP)
        arena = ArenaMemory.create(byte_count, name="vllm-landing")
        if extent.card is not None:
            arena.card = card_of(extent.card)
        arena.prefault()
        arena.hbm = Hbm(
            base=0, byte_count=byte_count, address=extent.first, card=extent.card, handle=handle, free=lambda: None
        )
        self._target = Target(arena, extent.first, "hbm", copied_up=not handle)
        return self._target

    def close(self) -> None:
        """Unmaps what is ours, unless vLLM's tensors still lie there: then it ends with the process."""
        for arena in {id(each): each for each in (self._arena, self._target and self._target.arena) if each}.values():
            with suppress(BufferError):
                arena.close()

    @staticmethod
    def _holds(arena: ArenaMemory, extent: Extent) -> bool:
        start = arena.mapping.address
        return extent.card is None and start <= extent.first and extent.end <= start + arena.byte_count


def exported(extent: Extent, card: int) -> bytes:
    """The handle by which processes of this host write a card's memory; empty, with the reason in the log, where they
    cannot."""
    here, byte_count = card_of(card), extent.end - extent.first
    try:
        base, whole = here.range_of(extent.first)
        if extent.first - base + byte_count > whole:
            log.warning("KV cache on card %d: it lies in several allocations, the first has %d bytes", card, whole)
            return b""
        return cuda_ipc.export(CardMemory(card=card, address=extent.first, byte_count=byte_count)).packed
    except WorldError as error:
        log.warning(
            "KV cache on card %d: no other process can write it: %s. Memory of torch's expandable segments cannot be "
            "shared: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, and leave vLLM's sleep mode off",
            card, error,
        )  # fmt: skip
        return b""
