"""What a decode step needs of a GPU, set_mla_kv_buffer and swap_plan, against the CPU: `make test-gpu`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer.hisparse.swap import HotBuffers, SwapPlan, swap_plan
from pdtransfer.kernels import driver
from pdtransfer.kernels import gpu as gpus
from pdtransfer.kernels.kv_copy import PlannedCopy, kv_copy
from pdtransfer.kernels.pools import Pool
from pdtransfer.kernels.set_mla import argument_of, launch, set_mla_kv_buffer
from pdtransfer.layout.layout import Layout, Plane
from tests.library.kernels import mla_rows
from tests.library.kernels.swap_plans import plan_for

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("loc_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", mla_rows.DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 64, 257, 1024, 1_025])
@pytest.mark.parametrize("parts", mla_rows.PARTS)
def test_rows_land_side_by_side_in_their_slots(
    parts: tuple[int, int], rows: int, dtype: torch.dtype, loc_dtype: torch.dtype, bulk: bool
) -> None:
    for gap in (0, 1, 8):
        given = mla_rows.case(rows, parts, dtype, loc_dtype, gap)
        there = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda") for each in given]
        for to, of in zip(there, given, strict=True):
            to.copy_(of)
        launch(gpus.gpu_at(0), argument_of(*there, None), torch.cuda.current_stream().cuda_stream, bulk=bulk)
        assert torch.equal(mla_rows.as_bytes(there[0]).cpu(), mla_rows.by_indexing(given))


@pytest.mark.parametrize("loc_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", mla_rows.DTYPES)
@pytest.mark.parametrize("parts", mla_rows.PARTS)
@pytest.mark.parametrize("rows", [1, 257])
def test_triton_scatters_the_same_on_older_cards(
    parts: tuple[int, int], rows: int, dtype: torch.dtype, loc_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus.gpu_at(0), "capability", (8, 0))
    for gap in (0, 1, 8):
        given = mla_rows.case(rows, parts, dtype, loc_dtype, gap)
        there = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda") for each in given]
        for to, of in zip(there, given, strict=True):
            to.copy_(of)
        set_mla_kv_buffer(*there)
        assert torch.equal(mla_rows.as_bytes(there[0]).cpu(), mla_rows.by_indexing(given))


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_rows_to_skip_or_outside_the_buffer_are_left_out(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus.gpu_at(0), "capability", capability)
    given = mla_rows.case(6, (512, 64), torch.bfloat16, torch.int64)
    given[1] = torch.tensor([5, -1, 9, mla_rows.SLOTS, 1 << 40, 0])
    there = [each.cuda() for each in given]
    set_mla_kv_buffer(*there, skip_index=9)
    assert torch.equal(mla_rows.as_bytes(there[0]).cpu(), mla_rows.by_indexing(given, skip=9))


@pytest.mark.parametrize(
    ("requests", "top", "places"),
    [(1, 2048, 4096), (7, 2048, 4096), (100, 64, 100), (3, 1, 1), (5, 333, 1027), (2, 2048, 8190), (2, 4000, 6000)],
)
@pytest.mark.parametrize("brought", [False, True])
def test_steps_are_planned_and_carried_out_as_on_the_cpu(requests: int, top: int, places: int, brought: bool) -> None:
    few, before = 0, np.empty(0, np.int32)
    rng, length, row = np.random.default_rng(top), 10_000, 656
    rows_held = requests + 1
    tables = HotBuffers(
        held=np.full((rows_held, places), -1, np.int32),
        order=np.tile(np.arange(places, dtype=np.int32), (rows_held, 1)),
        hot_slots=rng.permutation(rows_held * places).astype(np.int32).reshape(rows_held, places),
        host_slots=rng.permutation(rows_held * length).astype(np.int32).reshape(rows_held, length),
    )
    hot_buffers = HotBuffers(**{name: _there(getattr(tables, name)) for name in HotBuffers.__dataclass_fields__})
    plans = [plan_for(requests, top), SwapPlan(**{n: _there(a) for n, a in _fields(plan_for(requests, top)).items()})]
    lengths = rng.integers(1, length, requests).astype(np.int32)
    lengths[0] = length
    source = rng.integers(0, 256, (rows_held * length, row), dtype=np.uint8)
    arena, device = (
        torch.from_numpy(source).cuda(),
        torch.zeros(rows_held * places, row, dtype=torch.uint8, device="cuda"),
    )
    pools = [
        Pool(
            layout=Layout((Plane(0, "k", "uint8", 0, 1, 0, row, row, row),), 1, len(each)),
            address=each.data_ptr(),
            device=0,
        )
        for each in (device, arena)
    ]
    lists = plans[1].targets, plans[1].sources
    bring = PlannedCopy(pools[0], pools[1], *lists, counts=plans[1].counts) if brought else None
    for turn in range(6):
        window = rng.integers(1, 3 * places)
        positions = (rng.integers(-1, window, (requests, top)) % length).astype(np.int32)
        if brought and turn % 2:  # nearly what was there before
            positions = before.copy()
            positions[:, : min(3, top)] = rng.integers(0, length, (requests, min(3, top)))
        before = positions
        positions[:, ::17] = -1
        rows = np.arange(requests) if brought else rng.permutation(rows_held)[:requests]
        rows = rows.astype(np.int32)
        real = np.array([requests - (turn == 3)], np.int32)
        swap_plan(tables, positions, lengths, rows, plans[0], real=real)
        given = [_there(each) for each in (positions, lengths, rows)]
        swap_plan(hot_buffers, *given, plans[1], real=_there(real), bring=bring)
        kv_copy(pools[0], pools[1], plans[1].targets, plans[1].sources, plans[1].counts[:1])
        torch.cuda.synchronize()
        for name in ("held", "order"):
            assert np.array_equal(getattr(hot_buffers, name).cpu().numpy(), getattr(tables, name)), (turn, name)
        assert np.array_equal(plans[1].slots.cpu().numpy(), plans[0].slots)
        count = int(plans[0].counts[0])
        left = int(plans[1].counts[0])
        assert left <= count if brought else left == count
        assert plans[1].counts.tolist()[1:] == [int(plans[0].counts[1]), 0, 0, 0]
        few += left < count
        copies = [
            set(zip(np.asarray(plan.sources.tolist())[:some], np.asarray(plan.targets.tolist())[:some], strict=True))
            for plan, some in zip(plans, (count, left), strict=True)
        ]
        assert copies[1] <= copies[0]
        held = device.cpu().numpy()
        for request in range(int(real[0])):
            row_at, top_k = int(rows[request]), positions[request]
            if lengths[request] <= places:
                continue
            good = (top_k >= 0) & (top_k < lengths[request]) & (plans[0].slots[request] >= 0)
            wanted = source[tables.host_slots[row_at, top_k[good]]]
            assert np.array_equal(held[plans[0].slots[request][good]], wanted)
    assert bool(few) == (brought and top > 1)


def _there(array: Any) -> torch.Tensor:
    return torch.from_numpy(array).cuda()


def _fields(plan: SwapPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in SwapPlan.__dataclass_fields__}
