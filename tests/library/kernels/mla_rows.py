"""Rows for set_mla_kv_buffer, and what it has to leave, by plain indexing."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.uint8)
PARTS = ((512, 64), (512, 32), (256, 64), (128, 64), (528, 64), (528, 128), (7, 3), (1, 1))
SLOTS = 1_100  # more than any case has rows


def drawn(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes as rows of a dtype."""
    return _drawn(shape[0], shape[1] * dtype.itemsize, seed).view(dtype).clone()


@lru_cache(maxsize=64)
def _drawn(rows: int, width: int, seed: int) -> torch.Tensor:
    """Kept, since the cases of a grid have many in common."""
    return torch.randint(0, 255, (rows, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def case(rows: int, parts: tuple[int, int], dtype: torch.dtype, loc_dtype: torch.dtype, gap: int = 0) -> list[Any]:
    """Buffer, loc, nope, rope; a gap is elements between rows, which nobody may touch."""
    buffer = drawn((SLOTS, sum(parts) + gap), dtype, 1)[:, : sum(parts)]
    nope, rope = (drawn((rows, part + gap), dtype, 2 + index)[:, :part] for index, part in enumerate(parts))
    loc = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(rows))[:rows].to(loc_dtype)
    return [buffer, loc, nope, rope]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def by_indexing(given: list[Any], skip: int | None = None) -> torch.Tensor:
    buffer, loc, nope, rope = given
    after = as_bytes(buffer).clone()
    kept = torch.tensor([0 <= at < SLOTS and at != skip for at in loc.tolist()], dtype=torch.bool)
    after[loc[kept].long()] = torch.cat([as_bytes(nope), as_bytes(rope)], dim=1)[kept]
    return after
