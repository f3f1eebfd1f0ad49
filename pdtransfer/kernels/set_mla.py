"""Writes a step's new MLA rows into a paged buffer: on a GPU through registers or bulk copies, or on the CPU."""

from __future__ import annotations

from math import gcd, prod
from typing import Any, NamedTuple

from ..errors import LocalProtocolError
from .arguments import SetMlaArgument
from .gpu import Gpu, gpu_at

_ONE_HELD_ROWS, _FEW_ROWS = 1_024, 128  # rows up to which a thread takes one unit; and two rows a block, not four
_HELD = (4_096, 2), (1 << 31, 4)  # more rows: up to, loads in flight for each thread
_THREADS, _THREADS_MAX = 144, 1_024  # about the size of a block: two rows of 72 units
_BULK_ROWS = (1_024, 1, "bulk"), (4_096, 3, "early"), (1 << 31, 4, "bulk")  # rows up to, per block
_BULK_CAPABILITY = 9, 0
_KERNEL = "set_mla"


class SetMlaLaunch(NamedTuple):
    """The shape of a launch: function, blocks, threads (x and y) of a block, dynamic shared memory."""

    function: str
    blocks: int
    columns: int
    together: int
    shared_bytes: int


def set_mla_kv_buffer(
    buffer: Any, loc: Any, nope: Any, rope: Any, *, skip_index: int | None = None, stream: int | None = None
) -> None:
    """Sets buffer[loc[i]] to the concatenation of nope[i] and rope[i] for each i; any element width works.

    Torch tensors of one device: `buffer` (slots, ..., row), `nope` and `rope` (n, ..., part) with contiguous rows and
    any row stride. `loc` is int32 or int64 (n,), contiguous and distinct. Rows whose loc is `skip_index` or outside the
    buffer are skipped. On a GPU this queues one launch on `stream`, by default torch's current one, and a graph may
    capture it; below sm_90 it uses Triton. Raises LocalProtocolError for shapes or dtypes that do not match.
    """
    argument = argument_of(buffer, loc, nope, rope, skip_index)
    if not argument.rows:
        return
    if not buffer.is_cuda:
        _on_cpu(buffer, loc, nope, rope, skip_index)
        return
    gpu = gpu_at(buffer.device.index)
    if stream is None and gpu.capability < _BULK_CAPABILITY:
        from .set_mla_triton import scatter

        scatter(argument, buffer, loc, nope, rope)
        return
    if stream is None:
        import torch

        stream = int(torch.cuda.current_stream(buffer.device).cuda_stream)
    launch(gpu, argument, stream)


def argument_of(buffer: Any, loc: Any, nope: Any, rope: Any, skip_index: int | None) -> SetMlaArgument:
    """The kernel's argument, in bytes. Raises LocalProtocolError, with both values, for tensors that do not match."""
    rows = loc.shape[0]
    if loc.dim() != 1 or loc.element_size() not in (4, 8) or loc.is_floating_point() or not loc.is_contiguous():
        raise LocalProtocolError(f"loc: {loc.dtype} of shape {tuple(loc.shape)}, not contiguous int32 or int64 (n,)")
    widths = [_row_bytes(name, tensor) for name, tensor in (("buffer", buffer), ("nope", nope), ("rope", rope))]
    if nope.shape[0] != rows or rope.shape[0] != rows:
        raise LocalProtocolError(f"rows: {rows} of loc, {nope.shape[0]} of nope, {rope.shape[0]} of rope")
    if widths[0] != widths[1] + widths[2]:
        raise LocalProtocolError(f"buffer: rows of {widths[0]} bytes, nope and rope of {widths[1]} and {widths[2]}")
    if len({tensor.device for tensor in (buffer, loc, nope, rope)}) > 1:
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


def launch(gpu: Gpu, argument: SetMlaArgument, stream: int, *, bulk: bool = True) -> None:
    """Queues the launch, with bulk copies if possible. Benchmarks disable `bulk`."""
    shape = shape_of(argument, bulk=bulk, capability=gpu.capability)
    gpu.launch(
        _KERNEL, argument, blocks=shape.blocks, threads=(shape.columns, shape.together), stream=stream,
        shared_bytes=shape.shared_bytes, function=shape.function,
    )  # fmt: skip


def shape_of(argument: SetMlaArgument, *, bulk: bool, capability: tuple[int, int]) -> SetMlaLaunch:
    """Chooses the access width by the alignment of all addresses, and converts the argument from bytes to units."""
    parts = argument.nope_units, argument.units, argument.nope_stride, argument.rope_stride, argument.buffer_stride
    unit = gcd(16, *parts, argument.buffer, argument.nope, argument.rope)
    columns = argument.units // unit
    if unit == 16 and argument.rows <= _ONE_HELD_ROWS and columns <= _THREADS_MAX:
        argument.nope_units, argument.units = argument.nope_units // unit, columns
        together = min(2 if argument.rows <= _FEW_ROWS else 4, _THREADS_MAX // columns)
        return SetMlaLaunch(f"{_KERNEL}_16x1", -(-argument.rows // together), columns, together, 0)
    if bulk and unit == 16 and capability >= _BULK_CAPABILITY:
        # Each thread of a block copies one row.
        threads, kind = next((count, kind) for rows_max, count, kind in _BULK_ROWS if argument.rows <= rows_max)
        return SetMlaLaunch(f"{_KERNEL}_{kind}", -(-argument.rows // threads), threads, 1, threads * argument.units)
    unit = 1 if unit == 2 else unit
    argument.nope_units //= unit
    argument.units //= unit
    rows_held = next(count for rows_max, count in _HELD if argument.rows <= rows_max) if unit == 16 else 4
    columns = min(argument.units, _THREADS_MAX)
    together = max(1, min(_THREADS // columns, -(-argument.rows // rows_held)))
    return SetMlaLaunch(
        f"{_KERNEL}_{unit}x{rows_held}", -(-argument.rows // (together * rows_held)), columns, together, 0
    )


def _on_cpu(buffer: Any, loc: Any, nope: Any, rope: Any, skip_index: int | None) -> None:
    import torch

    used = (loc >= 0) & (loc < buffer.shape[0])
    if skip_index is not None:
        used &= loc != skip_index
    rows = [_as_bytes(tensor[used]) for tensor in (nope, rope)]
    width = prod(buffer.shape[1:]) * buffer.element_size()
    _as_bytes(buffer)[loc[used].long()] = torch.cat(rows, dim=1).reshape(-1, width)


def _as_bytes(tensor: Any) -> Any:
    """The rows, which may have gaps between them, as bytes of the same memory."""
    import torch

    width = prod(tensor.shape[1:])
    if tensor.is_contiguous():
        return tensor.view(torch.uint8).reshape(tensor.shape[0], width * tensor.element_size())
    return tensor.as_strided((tensor.shape[0], width), (tensor.stride(0), 1)).view(torch.uint8)
