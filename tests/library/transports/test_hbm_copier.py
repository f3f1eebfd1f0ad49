"""Rows copied up to a GPU's memory, on one that this process plays."""

from __future__ import annotations

import asyncio
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pdtransfer.errors import WorldError
from pdtransfer.handoff.effects import ComponentRows, Settle
from pdtransfer.kernels import kv_copy
from pdtransfer.layout.layout import Component, Span
from pdtransfer.memory.hbm import Hbm
from pdtransfer.transports import hbm_copier
from pdtransfer.transports.copier import CANCELLED
from tests.support import kernels_host
from tests.support.gpu_on_host import GpuOnHost
from tests.support.layout_tensors import Pool as Tensors
from tests.support.layout_tensors import mla
from tests.support.slot_copies import filled, wanted
from tests.support.waiting import until

EXTENTS = np.array([[8, 40], [70, 3]])
SLOTS = [*range(8, 48), *range(70, 73)]


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = GpuOnHost(kernels_host.library(tmp_path_factory.getbasetemp()))
    made.driver = Mock()
    for module in (kv_copy, hbm_copier):
        monkeypatch.setattr(module, "gpu_at", lambda _: made)
    synchronise = made.synchronise

    def watched(stream: int) -> None:
        assert stream == made.side_stream, "inside the driver it would hold up who asks an event"
        synchronise(stream)

    monkeypatch.setattr(made, "synchronise", watched)
    return made


def lifted(source: Tensors, target: Tensors) -> list[str]:
    """What the lifter says of a grant, once it has ended."""
    at, size = source.memory.ctypes.data, len(target.memory)
    mapping = SimpleNamespace(address=at, registered=SimpleNamespace(device_address=at))
    memory = Hbm(base=0, byte_count=size, address=target.memory.ctypes.data, device=0, handle=b"", free=lambda: None)
    component = Component("kv", "hbm", 1, Span(), source.layout)
    texts: list[str] = []

    async def run() -> None:
        up = hbm_copier.HbmCopier(SimpleNamespace(mapping=mapping), memory, lambda _, __, text: texts.append(text))  # type: ignore[arg-type]
        rows = ComponentRows(component, 0, EXTENTS)
        up.lift(Settle(1, 2, 3, (rows,), (rows,)))
        await until(lambda: texts or up._lost)
        await up.close()
        assert up.moved_bytes == (len(SLOTS) * source.layout.row_bytes if texts == [""] else 0)

    asyncio.run(run())
    return texts


@pytest.mark.parametrize("by", ["cancel", "close"])
def test_a_copy_that_is_stopped_ends_after_its_piece_and_is_reported(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (source, target), texts, begun, goes_on = pools(), list[str](), Event(), Event()
    right = wanted(source, target, SLOTS[:5], SLOTS[:5])

    def slow_copy(*copied: Any) -> None:
        begun.set()
        assert goes_on.wait(60)
        kv_copy.kv_copy(*copied)

    monkeypatch.setattr(hbm_copier, "PIECE_BYTES", 5 * source.layout.row_bytes)
    monkeypatch.setattr(hbm_copier, "kv_copy", slow_copy)
    memory = Hbm(
        base=0, byte_count=len(target.memory), address=target.memory.ctypes.data, device=None, handle=b"",
        free=lambda: None,
    )  # fmt: skip
    arena: Any = SimpleNamespace(mapping=SimpleNamespace(address=source.memory.ctypes.data, registered=None))

    async def run() -> None:
        up = hbm_copier.HbmCopier(arena, memory, lambda _, __, text: texts.append(text))
        rows = ComponentRows(Component("kv", "hbm", 1, Span(), source.layout), 0, EXTENTS)
        up.lift(Settle(1, 2, 3, (rows,), (rows,)))
        await until(begun.is_set)
        up.stop(1, 3)  # there is no such grant
        if by == "cancel":
            up.stop(1, 2)
        closing = asyncio.create_task(up.close() if by == "close" else until(lambda: texts))
        await asyncio.sleep(0.05)
        assert not closing.done(), "a row is being written"
        goes_on.set()
        await closing
        await until(lambda: texts)
        await up.close()
        assert (up.moved_bytes, texts) == (5 * source.layout.row_bytes, [CANCELLED])

    asyncio.run(run())
    assert np.array_equal(target.memory, right)


def pools() -> tuple[Tensors, Tensors]:
    first, second = (filled("page_first", mla(), 4, 64, content=content) for content in (True, False))
    return first, second


@pytest.mark.parametrize("rows", [0.5, 1, 5, len(SLOTS)])
def test_rows_are_there_once_it_is_reported_and_the_thread_has_asked_for_that(
    here: GpuOnHost, rows: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pools()
    monkeypatch.setattr(hbm_copier, "PIECE_BYTES", int(rows * source.layout.row_bytes))
    right = wanted(source, target, SLOTS, SLOTS)
    assert lifted(source, target) == [""]
    assert np.array_equal(target.memory, right)


def test_a_copy_that_the_gpu_refuses_is_reported_once_nothing_is_under_way(here: GpuOnHost) -> None:
    here.refuses = "launch"
    assert [text.endswith("refused") for text in lifted(*pools())] == [True]


def test_a_copy_that_fails_once_it_is_queued_is_waited_for(here: GpuOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its slots would be given to others while it writes."""
    source, target = pools()
    right = wanted(source, target, SLOTS, SLOTS)

    def queued(*copied: Any, **how: Any) -> None:
        kv_copy.kv_copy(*copied, **how)
        raise WorldError("no answer")

    monkeypatch.setattr(hbm_copier, "kv_copy", queued)
    assert [text.endswith("no answer") for text in lifted(source, target)] == [True]
    assert np.array_equal(target.memory, right)


def test_where_the_gpu_cannot_determine_whether_a_copy_has_ended_nobody_reports_that_it_has(
    here: GpuOnHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(_: int) -> None:
        raise WorldError("GPU 0: cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(here, "reach", lost)
    assert lifted(*pools()) == []
    assert "keeps its slots" in caplog.text
    assert "ILLEGAL_ADDRESS" in caplog.text
