"""Writes a step's new MLA rows into a paged buffer: on a card by registers or by bulk copies, and on the CPU."""

from __future__ import annotations

import ctypes
from math import gcd, prod
from typing import Any, NamedTuple

from ..errors import LocalProtocolError
from .card import Card, card

_HELD = (1_024, 1), (4_096, 2), (1 << 31, 4)  # up to so many rows, a thread has so many in flight
_THREADS = 144  # about: two rows of 72 units side by side
_BULK_ROWS = (64, 1, "bulk"), (1_024, 2, "bulk"), (4_096, 3, "early"), (1 << 31, 4, "bulk")
_BULK_CAPABILITY = 9, 0
_KERNEL = "set_mla"


class SetMlaArgument(ctypes.Structure):
    """SetMla of kernels/set_mla.h."""

    _fields_ = (
        ("buffer", ctypes.c_uint64), ("nope", ctypes.c_uint64), ("rope", ctypes.c_uint64), ("loc", ctypes.c_uint64),
        ("buffer_stride", ctypes.c_int64), ("nope_stride", ctypes.c_int64), ("rope_stride", ctypes.c_int64),
        ("slots", ctypes.c_int64), ("skip", ctypes.c_int64), ("rows", ctypes.c_int32), ("nope_units", ctypes.c_int32),
        ("units", ctypes.c_int32), ("wide", ctypes.c_int32),
    )  # fmt: skip


class Shape(NamedTuple):
    """How a launch is laid out: the function, its blocks, threads across and down, and dynamic shared memory."""

    function: str
    blocks: int
    columns: int
    together: int
    shared_bytes: int


def set_mla_kv_buffer(
    buffer: Any, loc: Any, nope: Any, rope: Any, *, skip_index: int | None = None, stream: int | None = None
) -> None:
    """buffer[loc[i]] = nope[i] and rope[i] side by side, for each i, whatever the dtypes' width.

    Torch tensors of one device: `buffer` (slots, ..., row), `nope` and `rope` (n, ..., part), rows contiguous and of
    equal dtype or bytes, any stride from row to row; `loc` int32 or int64 (n,), contiguous, different from one another.
    Rows whose loc is `skip_index`, or outside the buffer, are left out. On a card this queues one launch to `stream`,
    by default torch's current one, and may be captured; below sm_90 it is Triton's. Raises LocalProtocolError for
    what does not fit together.
    """
    argument = argument_of(buffer, loc, nope, rope, skip_index)
    if not argument.rows:
        return
    if not buffer.is_cuda:
        _on_cpu(buffer, loc, nope, rope, skip_index)
        return
    here = card(buffer.device.index)
    if stream is None and here.capability < _BULK_CAPABILITY:
        from .set_mla_triton import scatter

        scatter(argument, buffer, loc, nope, rope)
        return
    if stream is None:
        import torch

        stream = int(torch.cuda.current_stream(buffer.device).cuda_stream)
    launch(here, argument, stream)


def argument_of(buffer: Any, loc: Any, nope: Any, rope: Any, skip_index: int | None) -> SetMlaArgument:
    """What the kernel is told, in bytes; LocalProtocolError, naming both values, for what does not fit together."""
    rows = loc.shape[0]
    if loc.dim() != 1 or loc.element_size() not in (4, 8) or loc.is_floating_point() or not loc.is_contiguous():
        raise LocalProtocolError(f"loc: {loc.dtype} of shape {tuple(loc.shape)}, not contiguous int32 or int64 (n,)")
    widths = [_row_bytes(name, each) for name, each in (("buffer", buffer), ("nope", nope), ("rope", rope))]
    if nope.shape[0] != rows or rope.shape[0] != rows:
        raise LocalProtocolError(f"rows: {rows} of loc, {nope.shape[0]} of nope, {rope.shape[0]} of rope")
    if widths[0] != widths[1] + widths[2]:
        raise LocalProtocolError(f"buffer: rows of {widths[0]} bytes, nope and rope of {widths[1]} and {widths[2]}")
    if len({each.device for each in (buffer, loc, nope, rope)}) > 1:
        raise LocalProtocolError(f"device: buffer on {buffer.device}, nope on {nope.device}, loc on {loc.device}")
    return SetMlaArgument(
        buffer=buffer.data_ptr(), nope=nope.data_ptr(), rope=rope.data_ptr(), loc=loc.data_ptr(),
        buffer_stride=_stride(buffer), nope_stride=_stride(nope), rope_stride=_stride(rope),
        slots=buffer.shape[0], skip=-1 if skip_index is None else skip_index, rows=rows,
        nope_units=widths[1], units=widths[0], wide=loc.element_size() == 8,
    )  # fmt: skip


def _row_bytes(name: str, tensor: Any) -> int:
    width, inner = 1, 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != inner:
            raise LocalProtocolError(f"{name}: rows of shape {tuple(tensor.shape[1:])} are not contiguous")
        inner *= size
        width *= size
    return width * int(tensor.element_size())


def _stride(tensor: Any) -> int:
    return int(tensor.stride(0)) * int(tensor.element_size())


def launch(here: Card, argument: SetMlaArgument, stream: int, *, bulk: bool = True) -> None:
    """Queues it, by bulk copies where they are possible; `bulk` is for those who compare."""
    shape = shape_of(argument, bulk=bulk, capability=here.capability)
    here.launch(
        _KERNEL,
        argument,
        blocks=shape.blocks,
        threads=(shape.columns, shape.together),
        stream=stream,
        shared_bytes=shape.shared_bytes,
        function=shape.function,
    )


def shape_of(argument: SetMlaArgument, *, bulk: bool, capability: tuple[int, int]) -> Shape:
    """Chooses the width of access by what all addresses share, and turns the argument's bytes into such units."""
    parts = argument.nope_units, argument.units, argument.nope_stride, argument.rope_stride, argument.buffer_stride
    unit = gcd(16, *parts, argument.buffer, argument.nope, argument.rope)
    if bulk and unit == 16 and capability >= _BULK_CAPABILITY:
        # up to so many rows, a block has so many, a thread each
        threads, how = next((each, how) for rows_max, each, how in _BULK_ROWS if argument.rows <= rows_max)
        return Shape(f"{_KERNEL}_{how}", -(-argument.rows // threads), threads, 1, threads * argument.units)
    unit = 1 if unit == 2 else unit
    argument.nope_units //= unit
    argument.units //= unit
    held = next(each for rows_max, each in _HELD if argument.rows <= rows_max) if unit == 16 else 4
    columns = min(argument.units, 1_024)
    together = max(1, min(_THREADS // columns, -(-argument.rows // held)))
    return Shape(f"{_KERNEL}_{unit}x{held}", -(-argument.rows // (together * held)), columns, together, 0)


def _on_cpu(buffer: Any, loc: Any, nope: Any, rope: Any, skip_index: int | None) -> None:
    import torch

    kept = (loc >= 0) & (loc < buffer.shape[0])
    if skip_index is not None:
        kept &= loc != skip_index
    rows = [_as_bytes(each[kept]) for each in (nope, rope)]
    width = prod(buffer.shape[1:]) * buffer.element_size()
    _as_bytes(buffer)[loc[kept].long()] = torch.cat(rows, dim=1).reshape(-1, width)


def _as_bytes(tensor: Any) -> Any:
    import torch

    return tensor.view(torch.uint8).reshape(tensor.shape[0], -1) if tensor.is_contiguous() else _bytes_of(tensor)


def _bytes_of(tensor: Any) -> Any:
    """A buffer whose rows have gaps between them, as bytes of the same memory."""
    import torch

    width = prod(tensor.shape[1:])
    return tensor.as_strided((tensor.shape[0], width), (tensor.stride(0), 1)).view(torch.uint8)
