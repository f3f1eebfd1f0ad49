"""Memory that a GPU sees, filled and read back from here; and what is copied between two of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from pdtransfer.kernels import gpu as gpus
from pdtransfer.kernels.pools import Progress, State
from pdtransfer.memory.arena_memory import ArenaMemory
from tests.support.layout_tensors import mha, mla

ENDED_SECONDS_MAX = 30


class OnCard:
    """The bytes of some memory of this process in the GPU's, or in an arena that is registered with it."""

    def __init__(self, *, host: bool) -> None:
        self.host, self.gpu = host, gpus.gpu_at(0)
        self._arena: ArenaMemory | None = None
        self._tensor = torch.empty(0)

    def put(self, content: np.ndarray[Any, Any]) -> int:
        """Where the GPU sees it."""
        if not self.host:
            self._tensor = torch.from_numpy(content).cuda()
            return self._tensor.data_ptr()
        self._arena = ArenaMemory.create(len(content), huge_pages="never")
        self._arena.gpu = self.gpu
        self._arena.prefault()
        self._arena.mapping.array[: len(content)] = content
        return self._arena.mapping.registered.device_address

    def get(self, count: int) -> np.ndarray[Any, Any]:
        """Its bytes now."""
        self.gpu.synchronise(0)
        return self._arena.mapping.array[:count].copy() if self._arena else self._tensor.cpu().numpy()

    def replace(self, content: np.ndarray[Any, Any]) -> None:
        """Other bytes, at the same place."""
        self.gpu.synchronise(0)
        if self._arena:
            self._arena.mapping.array[: len(content)] = content
        else:
            self._tensor.copy_(torch.from_numpy(content))

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()


LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
GRID = [  # what SGLang's own tests copy: MHA rows of this many elements, MLA of 576
    *((mha(layers=range(4), heads=range(8), head_bytes=row // 4), f"mha{row}") for row in (128, 256, 512, 1024)),
    (mla(layers=range(5)), "mla576"),
    (mla(layers=range(5), head_bytes=656), "mla656"),
]


def ended(progress: Progress) -> State:
    deadline = time.monotonic() + ENDED_SECONDS_MAX
    while progress.state is State.RUNNING:
        assert time.monotonic() < deadline
    return progress.state


def two_memories(way: str) -> Iterator[tuple[OnCard, OnCard]]:
    """Source and target: of the GPU, or of the host where the way is "fetch" or "push"."""
    torch.zeros(1, device="cuda")
    source, target = OnCard(host=way == "fetch"), OnCard(host=way == "push")
    yield source, target
    source.close()
    target.close()
