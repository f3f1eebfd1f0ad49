"""A KV cache of any layout.

A row's offset in its plane is (slot // page_size) * page_stride + (slot % page_size) * row_stride. With a unit that
divides both strides, every plane is a two-dimensional view, and one index vector serves all planes.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdtransfer.kernels.plane_views import steps_of, view_of
from pdtransfer.kernels.stream import upload
from pdtransfer.layout.layout import Layout

from .architecture import DIGEST_BYTES, Architecture

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DIGEST_ROWS = 1_024  # rows read at once: a digest does not copy a whole request


class Cache:
    """A rank's whole pool or arena, one flat float32 tensor, as rows of the model's dtype. `heads` are its heads."""

    def __init__(self, flat: Tensor, layout: Layout, architecture: Architecture, heads: range) -> None:
        strides = {(plane.page_stride, plane.row_stride) for plane in layout.planes}
        assert len(strides) == 1, strides
        self._page_size = layout.page_size
        self._page_step, self._row_step = steps_of(layout.planes[0])
        self._architecture, self._head_count, self._device = architecture, len(heads), flat.device
        typed = flat.view(_DTYPES[architecture.dtype])
        self._planes: dict[tuple[str, int], list[tuple[slice, Tensor]]] = {}
        for plane in sorted(layout.planes, key=lambda plane: plane.head_start):
            first = plane.head_start - heads.start
            place = slice(first, first + plane.head_count)
            assert _DTYPES[plane.dtype] is typed.dtype, plane.dtype
            self._planes.setdefault((plane.kind, plane.layer), []).append((place, view_of(typed, plane)))

    def index(self, slots: NDArray[np.int64], multiple: int) -> Tensor:
        """Slots int64 (n,) -> cache rows int64 for all planes, padded to a multiple with the first row."""
        pages, rows = np.divmod(np.pad(slots, (0, -len(slots) % multiple), constant_values=slots[0]), self._page_size)
        return upload(torch.as_tensor(pages * self._page_step + rows * self._row_step), self._device)

    def rows(self, slots: Tensor) -> Tensor:
        """Slots of any shape, on the cache's device -> cache rows; -1 becomes row 0."""
        slots = slots.clamp(min=0).to(torch.int64)
        return slots // self._page_size * self._page_step + slots % self._page_size * self._row_step

    def read(self, kind: str, layer: int, index: Tensor) -> Tensor:
        """Cache rows (n,) -> a new tensor (n, heads, dim)."""
        heads, dim = self._head_count, self._architecture.cache_dim
        parts = self._planes[kind, layer]
        if len(parts) == 1:
            return torch.index_select(parts[0][1], 0, index).view(-1, heads, dim)
        rows = parts[0][1].new_empty(len(index), heads, dim)
        for place, view in parts:
            rows[:, place] = torch.index_select(view, 0, index).view(len(index), -1, dim)
        return rows

    def write(self, kind: str, layer: int, index: Tensor, rows: Tensor) -> None:
        """Writes (n, heads, dim) to cache rows (n,)."""
        for place, view in self._planes[kind, layer]:
            view.index_copy_(0, index, rows[:, place].reshape(len(index), -1))

    def digests(self, index: Tensor) -> NDArray[np.uint8]:
        """Digests of the rows' bytes by (layer, kind, position), uint8 (heads, DIGEST_BYTES).

        Equal KV has equal digests in any layout and on any rank.
        """
        digests = [blake2b(digest_size=DIGEST_BYTES) for _ in range(self._head_count)]
        for layer in range(self._architecture.layers):
            for kind in self._architecture.kinds:
                for first in range(0, len(index), _DIGEST_ROWS):
                    rows = self.read(kind, layer, index[first : first + _DIGEST_ROWS]).view(torch.uint8).cpu().numpy()
                    for head, digest in enumerate(digests):
                        digest.update(np.ascontiguousarray(rows[:, head]).data)
        return np.stack([np.frombuffer(digest.digest(), np.uint8) for digest in digests])
