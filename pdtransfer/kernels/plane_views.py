"""Planes of a pool as torch tensors: two-dimensional views of one flat tensor."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ..layout.layout import Plane
from .pools import GpuArray


def device_tensor(address: int, byte_count: int, device: torch.device) -> Tensor:
    """Memory at a device address as a flat float32 tensor. The caller keeps the memory alive."""
    return torch.as_tensor(GpuArray(address, byte_count // 4, "<f4"), device=device)


def steps_of(plane: Plane) -> tuple[int, int]:
    """Rows of the plane's view between two pages, and between two slots of a page."""
    unit = gcd(plane.page_stride, plane.row_stride)
    return plane.page_stride // unit, plane.row_stride // unit


def view_of(flat: Tensor, plane: Plane) -> Tensor:
    """The plane as (units, row elements). Row i begins i units after the base; rows overlap if a unit is shorter."""
    size, unit = flat.element_size(), gcd(plane.page_stride, plane.row_stride)
    assert not any(number % size for number in (plane.base, unit, plane.row_bytes)), (plane, unit)
    elements, base, step = plane.row_bytes // size, plane.base // size, unit // size
    return flat.as_strided((1 + (flat.numel() - base - elements) // step, elements), (step, 1), base)
