"""The bench of hybrid rooms: every way's bytes are looked at, on the CPU and on a GPU that this process plays."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from time import perf_counter
from typing import Any
from unittest.mock import Mock

import pytest
from pdtransfer_lab.bench import hybrid
from pdtransfer_lab.bench.hybrid import SHAPES

from pdtransfer.errors import WorldError
from pdtransfer.kernels import kv_copy
from pdtransfer.kernels import push as pushing
from pdtransfer.kernels.ring import lanes
from tests.support import kernels_host
from tests.support.bench_output import printed
from tests.support.gpu_on_host import GpuOnHost


class BenchCard(GpuOnHost):
    """A GPU of this process that also has timers, and memory to look into."""

    def call(self, name: str, *arguments: Any) -> Any:
        match name:
            case "cuEventRecord" | "cuEventSynchronize":
                self.finish()
            case "cuEventElapsedTime":
                return perf_counter()
            case "cuMemcpyDtoH":
                ctypes.memmove(*arguments)
            case _:
                assert name == "cuEventCreate", name
        return None

    def host_register(self, address: int, byte_count: int) -> int:
        del byte_count
        return address

    def host_unregister(self, address: int) -> None:
        pass

    def free(self, address: int, stream: int | None = None) -> None:
        if stream is not None:
            super().free(address, stream)


@pytest.fixture
def played(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[BenchCard]:
    bench_card: Any = BenchCard(kernels_host.library(tmp_path_factory.getbasetemp()))
    bench_card.driver, bench_card.architecture = Mock(), "sm_0"
    for module in (kv_copy, pushing, hybrid):
        monkeypatch.setattr(module, "gpu_at", lambda _: bench_card)
    monkeypatch.setattr("pdtransfer.kernels.gpu.gpu_at", lambda _: bench_card)
    monkeypatch.setattr(hybrid, "card_count", lambda: 1)
    monkeypatch.setattr(hybrid, "RATIOS", (0, 4, 128))
    monkeypatch.setattr(lanes, "native", lambda: lanes.NativeLanes("none", None))
    yield bench_card
    lanes._idle.clear()


def _check(figures: dict[str, Any], tokens: int) -> None:
    for direction in ("push", "load"):
        for shape in SHAPES:
            own = {way for way in hybrid.WAYS if f"{tokens}_{direction}_{shape.name}_{way}_share" in figures}
            assert own >= ({"kernel", "auto"} if shape.page_tokens == 1 else set(hybrid.WAYS)), (direction, shape, own)
            assert figures[f"{tokens}_{direction}_{shape.name}_best"] in own
        assert figures[f"{tokens}_{direction}_plain_share"] == 1
        assert 0 < figures[f"{tokens}_{direction}_claim"] <= 1


def test_every_layout_and_way_has_figures_on_the_cpu_and_is_marked_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hybrid, "card_count", lambda: 0)  # also where there is one
    figures = hybrid.measure(runs=1, tokens=(4_096,))
    _check(figures, 4_096)
    out = " ".join(printed(tuple(hybrid.lines(figures)), figures, hybrid.measure, capsys).split())
    assert "the CPU" in out
    assert "a room of 4,096 tokens" in out


def test_every_layout_and_way_has_figures_on_a_card(played: BenchCard) -> None:
    figures = hybrid.measure(runs=1, tokens=(1_024, 4_096))
    assert figures["on"] == "sm_0"
    for tokens in (1_024, 4_096):
        _check(figures, tokens)
    assert played.launches
    assert played.copies


def test_a_wrong_byte_is_an_error_that_names_the_way_and_no_figure(
    played: BenchCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = played.copy

    def short(target: int, source: int, byte_count: int, stream: int) -> None:
        copy(target, source, byte_count - (byte_count > 4_096), stream)

    monkeypatch.setattr(played, "copy", short)
    with pytest.raises(WorldError, match=r"GPU to host, layer_first, pages of 256, direct: byte \d+ of the target is"):
        hybrid.measure(runs=1, tokens=(1_024,))
