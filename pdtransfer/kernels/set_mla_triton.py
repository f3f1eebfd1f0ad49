"""set_mla_kv_buffer for GPUs below sm_90, in Triton: one program for each row. Imported only for such a GPU."""

# Triton reads the annotations of the functions that it compiles and accepts only its own.
# pyright: basic, reportInvalidTypeForm=false
from __future__ import annotations

import importlib
from math import gcd
from typing import Any

from .arguments import SetMlaArgument

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")


@triton.jit
def _scatter(
    buffer, loc, nope, rope, slots, skip, buffer_stride, nope_stride, rope_stride, nope_width, width,
    BLOCK: tl.constexpr,  # noqa: N803 (Triton's convention)
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc + row).to(tl.int64)
    if (slot >= 0) & (slot < slots) & (slot != skip):
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            of_nope, of_rope = column < nope_width, (column >= nope_width) & (column < width)
            target = buffer + slot * buffer_stride + column
            tl.store(target, tl.load(nope + row * nope_stride + column, mask=of_nope), mask=of_nope)
            tl.store(target, tl.load(rope + row * rope_stride + column - nope_width, mask=of_rope), mask=of_rope)


def scatter(argument: SetMlaArgument, buffer: Any, loc: Any, nope: Any, rope: Any) -> None:
    """Executes `argument` on torch's current stream, with the widest integers that divide all rows."""
    import torch

    parts = argument.nope_units, argument.units, argument.nope_stride, argument.rope_stride, argument.buffer_stride
    unit = gcd(8, *parts, argument.buffer, argument.nope, argument.rope)
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[unit]
    tensors = [tensor.flatten(1).view(dtype) for tensor in (buffer, nope, rope)]
    width = argument.units // unit
    _scatter[(argument.rows,)](
        tensors[0], loc, tensors[1], tensors[2], argument.slots, argument.skip, argument.buffer_stride // unit,
        argument.nope_stride // unit, argument.rope_stride // unit, argument.nope_units // unit, width,
        BLOCK=min(1_024, triton.next_power_of_2(width)),
    )  # fmt: skip
