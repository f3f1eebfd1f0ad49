"""What a step of hot rooms has the device do, beside the model: each piece is captured in a graph once, and replayed.

Its shapes are the same each time, padded up to as many rows as there are, also where the model's are not. In a capture
of a whole step the pieces are queued one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine_api import Event
from ..kernels.hot_pool import HotPool
from .capture import captured
from .sending import sent

Result = TypeVar("Result")


class Replayed(Generic[Result]):
    """Work that is queued by replaying a graph of it. Where there are no graphs, on the CPU, it is done again."""

    def __init__(self, work: Callable[[], Result], device: torch.device) -> None:
        """Does the work twice, once to compile and load what it takes: it must find nothing to do."""
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                work()
                with captured() as self._graph:
                    self._result = work()
            torch.cuda.current_stream(device).wait_stream(stream)

    def __call__(self) -> Result:
        """The arrays that the work answers with are the same each time."""
        if self._graph is None or torch.cuda.is_current_stream_capturing():
            return self._work()
        self._graph.replay()
        return self._result


class HotStep:
    """The step that is under way: `begin`, then `place` for each group of layers, then `back_up`."""

    def __init__(self, pool: HotPool, device: torch.device, *, rows: int, groups: int, top: int) -> None:
        self._pool, self._row_count = pool, rows
        self._host = torch.zeros(2 * rows + 1, dtype=torch.int32)
        self._host[:rows] = -1
        given = self._given = self._host.to(device)
        own, lengths, real = given[:rows], given[rows:-1], given[-1:]  # what graphs read when they are replayed
        self._asked = torch.full((rows, top), -1, dtype=torch.int32, device=device)
        self._newest = Replayed(lambda: pool.newest(own, lengths, real=real), device)
        self._store = Replayed(lambda: pool.store(own, lengths, real=real), device)
        self._swap_in = [
            Replayed(lambda group=group: pool.swap_in(group, self._asked, lengths, own, real=real), device)
            for group in range(groups)
        ]
        self._requests = 0

    def begin(self, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Of requests in `rows` that have had so many tokens: device slots int32 (requests,) for the newest ones."""
        self._requests = len(rows)
        table = self._host.numpy()
        table[: self._row_count], table[-1] = -1, self._requests
        table[: self._requests] = rows
        table[self._row_count : self._row_count + self._requests] = lengths
        self._given.copy_(sent(self._host, self._given.device))
        return _tensor(self._newest())[: self._requests]

    def place(self, group: int, picks: Tensor) -> Tensor:
        """Device slots int32 (requests, top) of picks of that shape, good until the next call; -1 for -1."""
        self._asked[: self._requests] = picks
        return _tensor(self._swap_in[group]())[: self._requests]

    def back_up(self) -> Event:
        """Sends the newest rows to where the others are; fires when they are there."""
        self._store()
        return self._pool.fence()


def _tensor(array: Tensor | NDArray[np.int32]) -> Tensor:
    """What the pool answers is numpy's on the CPU."""
    return torch.as_tensor(array)
