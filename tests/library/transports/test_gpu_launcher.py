"""What a writer takes of a GPU, on one that this process plays."""

from __future__ import annotations

import ctypes
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pdtransfer.errors import WorldError
from pdtransfer.handoff.ready_gate import ReadyGate
from pdtransfer.kernels import kv_copy
from pdtransfer.kernels import push as pushing
from pdtransfer.kernels.pools import State
from pdtransfer.kernels.ring import blocks, lanes
from pdtransfer.transports import gpu_launcher
from tests.support.gpu_on_host import GpuOnHost
from tests.support.layout_tensors import mla
from tests.support.slot_copies import filled, pool_of, wanted

ROW = 3 * 1_152


@pytest.fixture(params=range(4))
def here(lib: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    made: Any = GpuOnHost(lib, request.param)
    made.driver = Mock()
    for module in (kv_copy, pushing):
        monkeypatch.setattr(module, "gpu_at", lambda _: made)
        monkeypatch.setattr("pdtransfer.kernels.gpu.gpu_at", lambda _: made)
    for module in (lanes, pushing):
        monkeypatch.setattr(module, "SLOT_BYTES", 6_000)
    for name in ("PLANNED_BYTES_MIN", "RING_BYTES_MIN"):
        monkeypatch.setattr(pushing, name, 0)
    monkeypatch.setattr(blocks, "RUN_BYTES_MIN", 4 * ROW)
    monkeypatch.setattr(gpu_launcher, "RUN_BYTES_MIN", 4 * ROW)
    yield made
    lanes._idle.clear()


@pytest.mark.grid
@pytest.mark.parametrize("spared", [(), (0,), (0, 1)])
@pytest.mark.parametrize("scattered", [(), (0,), (0, 1)])
def test_launches_of_either_kind_report_complete_in_their_place_once_all_is_drained(
    here: Any, scattered: tuple[int, ...], spared: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "STRIDED_BYTES_MIN", 0)
    source, target = (
        filled(name, mla(), 4, 64, content=name == "layer_first") for name in ("layer_first", "page_first")
    )
    order = np.random.default_rng(0).permutation(128)
    launcher = gpu_launcher.GpuLauncher(here)
    ours = [128 * place + (order if place in scattered else np.arange(128)) for place in range(2)]
    theirs = [128 * place + order[::-1] for place in range(2)]
    right = wanted(source, target, np.concatenate(theirs), np.concatenate(ours))
    pools = pool_of(target, device=0, host=True), pool_of(source, device=0)
    for place in range(2):
        launcher.prepare(place, *pools, ours[place], theirs[place], 128, launcher.word(), spare=place in spared)()
    launcher.drain()
    assert not here.step(), "something is queued still"
    assert all(launcher.wait(place, [], lanes.NEVER_NS) for place in range(2))
    assert [launcher.ended(place) for place in range(2)] == [(State.COMPLETE, 0)] * 2
    assert np.array_equal(target.memory, right)
    planes = [3 if place in spared else 1 for place in range(2) if place in spared or place not in scattered]
    assert len(here.copies) == 128 * sum(planes), "the engine drains what lies in runs, row by row"


def test_a_copy_that_a_room_waits_for_takes_more_of_the_gpu_than_one_that_has_time(
    here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = (
        filled(name, mla(), 4, 64, content=name == "layer_first") for name in ("layer_first", "page_first")
    )
    pools = pool_of(target, device=0), pool_of(source, device=0)
    launched, launch = list[int](), here.launch

    def counted(*given: Any, blocks: int, **how: Any) -> None:
        launched.append(blocks)
        launch(*given, blocks=blocks, **how)

    monkeypatch.setattr(here, "launch", counted)
    launcher = gpu_launcher.GpuLauncher(here)
    for place, spare in enumerate((True, False)):
        rows = range(64 * place, 64 * place + 64)
        launcher.prepare(place, *pools, rows, rows, 64, launcher.word(), spare=spare)()
    launcher.drain()
    assert launched == [gpu_launcher.COPY_BLOCKS_SPARE, gpu_launcher.COPY_BLOCKS]
    assert np.array_equal(target.memory, wanted(source, target, np.arange(128), np.arange(128)))


def test_of_a_gate_and_a_launch_that_are_both_passed_the_gate_is_reported_first(here: Any) -> None:
    here._random.random = lambda: 1.0  # C's asking says what is so
    launcher, gate = gpu_launcher.GpuLauncher(here), ReadyGate(Mock(spec=["cuda_event"], cuda_event=here.event()))
    assert not launcher.wait(0, [gate], lanes.NEVER_NS)
    assert gate.opened_ns
    assert launcher.wait(0, [], lanes.NEVER_NS)


@pytest.mark.parametrize(
    ("slots", "byte_count", "is_so"),
    [
        (range(8), 1 << 20, True),
        (range(8), (1 << 20) - 1, False),
        (np.array([4, 5, 9, 10]), 2 << 20, True),
        (np.array([4, 5, 9, 10]), (2 << 20) - 1, False),
        (np.array([5, 4, 3, 2]), 3 << 20, False),
    ],
)
def test_a_ring_is_looked_into_where_target_slots_lie_in_runs(slots: Any, byte_count: int, is_so: bool) -> None:
    assert gpu_launcher.in_runs(slots, byte_count) is is_so


def test_a_launcher_that_could_carry_nothing_is_not_handed_out_and_one_that_did_is_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launchers = [Mock(), Mock(), Mock()]
    launchers[0].try_out.side_effect = WorldError("cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED")
    monkeypatch.setattr(gpu_launcher, "gpu_at", Mock())
    monkeypatch.setattr(gpu_launcher, "GpuLauncher", Mock(side_effect=launchers))
    monkeypatch.setattr(lanes, "native", Mock())
    gpu = gpu_launcher.WriterGpu(0)
    with pytest.raises(WorldError, match="LAUNCH_FAILED"):
        gpu.prepare()
    gpu.prepare()
    gpu.prepare()
    launchers[1].try_out.assert_called_once()
    assert [gpu.launcher(), gpu.launcher()] == [launchers[1], launchers[2]]
