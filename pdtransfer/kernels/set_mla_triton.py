"""set_mla_kv_buffer for cards below sm_90, in Triton: a program a row. Imported only where such a card is."""

# Triton reads the annotations of what it compiles, and takes none but its own.
# pyright: basic, reportInvalidTypeForm=false
from __future__ import annotations

import importlib
from math import gcd
from typing import Any

from .set_mla import SetMlaArgument

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")


@triton.jit
def _scatter(
    buffer, loc, nope, rope, slots, skip, buffer_stride, nope_stride, rope_stride, nope_width, width,
    BLOCK: tl.constexpr,  # noqa: N803 (Triton's own manner)
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc + row).to(tl.int64)
    if (slot >= 0) & (slot < slots) & (slot != skip):
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            of_nope, of_rope = at < nope_width, (at >= nope_width) & (at < width)
            target = buffer + slot * buffer_stride + at
            tl.store(target, tl.load(nope + row * nope_stride + at, mask=of_nope), mask=of_nope)
            tl.store(target, tl.load(rope + row * rope_stride + at - nope_width, mask=of_rope), mask=of_rope)


def scatter(argument: SetMlaArgument, buffer: Any, loc: Any, nope: Any, rope: Any) -> None:
    """What `argument` says, on torch's current stream; in the widest integers that all rows are a multiple of."""
    import torch

    parts = argument.nope_units, argument.units, argument.nope_stride, argument.rope_stride, argument.buffer_stride
    unit = gcd(8, *parts, argument.buffer, argument.nope, argument.rope)
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[unit]
    given = [each.flatten(1).view(dtype) for each in (buffer, nope, rope)]
    width = argument.units // unit
    _scatter[(argument.rows,)](
        given[0], loc, given[1], given[2], argument.slots, argument.skip, argument.buffer_stride // unit,
        argument.nope_stride // unit, argument.rope_stride // unit, argument.nope_units // unit, width,
        BLOCK=min(1_024, triton.next_power_of_2(width)),
    )  # fmt: skip
