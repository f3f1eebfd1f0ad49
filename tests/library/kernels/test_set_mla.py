"""set_mla_kv_buffer without a GPU: the kernel as host code, and the CPU path, against plain indexing."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.errors import LocalProtocolError
from pdtransfer.kernels.arguments import SetMlaArgument
from pdtransfer.kernels.set_mla import argument_of, set_mla_kv_buffer, shape_of
from tests.library.kernels.mla_rows import PARTS, SLOTS, as_bytes, by_indexing, case


def on_host(lib: ctypes.CDLL, given: list[Any], skip: int | None = None) -> None:
    argument = argument_of(*given, skip)
    shape = shape_of(argument, bulk=False, capability=(9, 0))
    lib.set_mla_on_host(ctypes.byref(argument), *map(int, shape.function.split("_")[-1].split("x")), *shape[1:4])


@pytest.mark.grid
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("gap", [0, 1, 8])
@pytest.mark.parametrize("rows", [1, 7, 64, 257, 1024])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("dtype", "loc_dtype"), [(torch.bfloat16, torch.int64), (torch.uint8, torch.int32)])
def test_rows_land_side_by_side_in_their_slots(
    lib: ctypes.CDLL,
    dtype: torch.dtype,
    loc_dtype: torch.dtype,
    parts: tuple[int, int],
    rows: int,
    gap: int,
    native: bool,
) -> None:
    given = case(rows, parts, dtype, loc_dtype, gap)
    right, gaps = by_indexing(given), given[0].as_strided((SLOTS, gap), (sum(parts) + gap, 1), sum(parts)).clone()
    if native:
        on_host(lib, given)
    else:
        set_mla_kv_buffer(*given)
    assert torch.equal(as_bytes(given[0]), right)
    left = given[0].as_strided((SLOTS, gap), (sum(parts) + gap, 1), sum(parts))
    assert torch.equal(as_bytes(left[:-1]), as_bytes(gaps[:-1]))


@pytest.mark.parametrize("native", [True, False])
def test_rows_to_skip_or_outside_the_buffer_are_left_out(lib: ctypes.CDLL, native: bool) -> None:
    given = case(6, (512, 64), torch.bfloat16, torch.int64)
    given[1] = torch.tensor([5, -1, 9, SLOTS, 1 << 40, 0])
    right = by_indexing(given, skip=9)
    if native:
        on_host(lib, given, skip=9)
    else:
        set_mla_kv_buffer(*given, skip_index=9)
    assert torch.equal(as_bytes(given[0]), right)


@pytest.mark.parametrize("loc", [[], [-1, SLOTS, -1]])
def test_no_rows_are_nothing_to_do(loc: list[int]) -> None:
    """Where there are none, and where each is left out."""
    given = case(len(loc), (512, 64), torch.bfloat16, torch.int64)
    given[1] = torch.tensor(loc, dtype=torch.int64)
    before = as_bytes(given[0]).clone()
    set_mla_kv_buffer(*given)
    assert torch.equal(as_bytes(given[0]), before)


def test_rows_of_a_middle_axis_are_taken_as_they_lie(lib: ctypes.CDLL) -> None:
    buffer, loc, nope, rope = case(7, (512, 64), torch.bfloat16, torch.int32)
    right = by_indexing([buffer, loc, nope, rope])
    on_host(lib, [buffer.unsqueeze(1), loc, nope.unsqueeze(1), rope.unsqueeze(1)])
    assert torch.equal(as_bytes(buffer), right)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({1: torch.zeros(5)}, "loc: torch.float32"),
        ({1: torch.zeros(4, dtype=torch.int64)}, "rows: 4 of loc, 5 of nope"),
        ({2: torch.zeros(5, 500, dtype=torch.bfloat16)}, "buffer: rows of 1152 bytes, nope and rope of 1000 and 128"),
        ({2: torch.zeros(5, 2, 512, dtype=torch.bfloat16)[:, :, ::2]}, "nope: rows of shape"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[int, Any], complaint: str) -> None:
    given = case(5, (512, 64), torch.bfloat16, torch.int64)
    for at, tensor in change.items():
        given[at] = tensor
    with pytest.raises(LocalProtocolError, match=complaint):
        set_mla_kv_buffer(*given)


@pytest.mark.parametrize(
    ("parts", "dtype", "gap", "function"),
    [
        ((512, 64), torch.bfloat16, 0, "set_mla_16x1"),
        ((528, 128), torch.uint8, 0, "set_mla_16x1"),
        ((512, 64), torch.bfloat16, 4, "set_mla_8x4"),
        ((512, 64), torch.bfloat16, 2, "set_mla_4x4"),
        ((512, 64), torch.bfloat16, 1, "set_mla_1x4"),
        ((7, 3), torch.uint8, 0, "set_mla_1x4"),
    ],
)
def test_the_width_of_access_is_what_all_addresses_share(
    parts: tuple[int, int], dtype: torch.dtype, gap: int, function: str
) -> None:
    given = case(9, parts, dtype, torch.int64, gap)
    assert shape_of(argument_of(*given, None), bulk=False, capability=(9, 0)).function == function


def test_bulk_copies_need_sixteen_bytes_and_a_card_that_has_them() -> None:
    even, odd = (case(1_025, (512, 64), torch.bfloat16, torch.int64, gap) for gap in (0, 4))
    functions = [
        shape_of(argument_of(*given, None), bulk=True, capability=capability).function
        for given, capability in ((even, (9, 0)), (even, (8, 0)), (odd, (9, 0)))
    ]
    assert functions == ["set_mla_early", "set_mla_16x2", "set_mla_8x4"]


def test_arguments_are_as_long_as_the_kernels_own(lib: ctypes.CDLL) -> None:
    assert lib.sizes_of(3) == ctypes.sizeof(SetMlaArgument)
