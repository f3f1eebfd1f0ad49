"""The steps of hot rooms with torch: the pieces of a step are captured in graphs, which are replayed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..handoff.events import Event
from ..kernels.stream import upload
from .capture import Replayed
from .hot_pool import HotPool


class HotStep:
    """The HotRowStep of tensors. Each piece is captured in a graph once and replayed. Its shapes are constant, padded
    to the number of rows. In a capture of the whole step the pieces are queued one by one."""

    def __init__(self, pool: HotPool, device: torch.device, *, rows: int, groups: int, top: int) -> None:
        self._pool, self._row_count = pool, rows
        self._host = torch.zeros(3 * rows + 1, dtype=torch.int32)
        self._host[:rows] = -1
        inputs = self._inputs = self._host.to(device)
        # Replayed graphs read these. `like` has the request that each one of a filled up pass repeats.
        requests, lengths, real = inputs[:rows], inputs[rows : 2 * rows], inputs[-1:]
        self._like = inputs[2 * rows : -1]
        self._newest_filled = torch.zeros(rows, dtype=torch.int32, device=device)
        self._picks = torch.full((rows, top), -1, dtype=torch.int32, device=device)
        self._newest = Replayed(lambda: pool.newest(requests, lengths, real=real), device)
        self._store = Replayed(lambda: pool.store(requests, lengths, real=real), device)
        self._swap_in = [
            Replayed(lambda group=group: pool.swap_in(group, self._picks, lengths, requests, real=real), device)
            for group in range(groups)
        ]
        self._requests, self._filled = 0, False

    def begin(self, rows: Sequence[int], lengths: Sequence[int], count: int = 0) -> Tensor:
        """Device slots int32 (requests,) of the newest tokens, for requests in `rows` with `lengths` tokens, filled up
        to `count` requests with the first one."""
        self._requests, self._filled = max(count, len(rows)), bool(count)
        table, most, real = self._host.numpy(), self._row_count, len(rows)
        table[:most], table[most:-1], table[-1] = -1, 0, real
        table[:real], table[most : most + real] = rows, lengths
        table[2 * most : 2 * most + real] = range(real)
        self._inputs.copy_(upload(self._host, self._inputs.device))
        newest = _tensor(self._newest())
        if self._filled:
            newest = torch.index_select(newest, 0, self._like, out=self._newest_filled)
        return newest[: self._requests]

    def place(self, group: int, picks: Tensor) -> Tensor:
        """Device slots int32 of the picks (requests, at most top), with -1 for -1. Valid until the next call."""
        width = picks.shape[1]
        self._picks[: self._requests, :width] = picks
        self._picks[: self._requests, width:] = -1
        slots = _tensor(self._swap_in[group]())
        if self._filled:
            slots = torch.index_select(slots, 0, self._like)
        return slots[: self._requests, :width]

    def back_up(self) -> Event:
        """Copies the newest rows to the host pool. Returns the event of its end."""
        self._store()
        return self._pool.fence()


def _tensor(array: Tensor | NDArray[np.int32]) -> Tensor:
    """The pool returns numpy arrays on the CPU."""
    return torch.as_tensor(array)
