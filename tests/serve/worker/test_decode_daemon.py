"""A decode daemon that takes HiSparse requests: how many may wait for the device, and what the next one is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest

from pdtransfer.errors import Cause
from pdtransfer.limits import Limits
from pdtransfer.serve.engine_api import HotFigures
from pdtransfer.serve.worker.daemon_metrics import DecodeMetrics
from pdtransfer.wire import Begin, Load, Sampling, pack_ids
from tests.serve.worker.daemon_pair import decode
from tests.support.waiting import until

NOWHERE = "tcp://127.0.0.1:9"  # no prefill answers: rooms stay as they are
SPARSE = {
    "enable_hisparse": True, "engine_option": ("layers=1", "top_k=16"), "hot_tokens": 32, "device_slots": 66,
    "dense_slots": 256, "limits": Limits(hisparse_queue_max=2),
}  # fmt: skip


def begin(room: int, *, sparse: bool = True, tokens: int = 100) -> Begin:
    return Begin(room, pack_ids([97] * tokens), Sampling(4), (NOWHERE,), 30_000, sparse)


def taken(daemon: Any) -> set[int]:
    return set(daemon.rank.by_id)


async def test_beyond_its_bound_a_request_is_answered_full_and_when_to_ask_again(tmp_path: Path) -> None:
    async with decode(tmp_path, **SPARSE) as daemon:
        daemon.routers.send("a", begin(1), begin(2), begin(3), begin(4, sparse=False))
        assert taken(daemon) == {1, 2, 4}
        end = await daemon.routers.over("a", 3)
        assert (end.reason, end.retry_ms >= 100) == ("full", True)
        assert "hisparse_queue_max = 2" in end.detail
        # One that has a place on the device waits no more; one that is given up makes room as well.
        hot = daemon._engine.model.hot
        hot.figures = HotFigures(running=1)
        daemon.routers.send("a", begin(5))
        assert taken(daemon) == {1, 2, 4, 5}
        hot.figures = HotFigures()
        daemon.stop(1, Cause.ABORTED)
        daemon.stop(2, Cause.ABORTED)
        daemon.routers.send("a", begin(6), begin(7))
        await until(lambda: daemon.routers.ends("a", 7), "7 ends")
        assert taken(daemon) == {4, 5, 6}


async def test_a_request_that_could_never_run_is_refused_with_both_values(tmp_path: Path) -> None:
    async with decode(tmp_path, **SPARSE) as daemon:
        daemon.routers.send("a", begin(1, tokens=1_021), begin(2, sparse=False, tokens=253))
        assert "1025 tokens, the arena has 1024 slots" in (await daemon.routers.over("a", 1)).detail
        assert "257 tokens, the arena has 256 slots" in (await daemon.routers.over("a", 2)).detail
        assert taken(daemon) == set()


async def test_a_request_for_what_a_node_is_run_without_is_refused(tmp_path: Path) -> None:
    async with decode(tmp_path) as daemon:
        slots = {"sparse_slots_free": 1_024, "sparse_slots_total": 1_024}
        assert daemon.load() == Load(True, False, 0, 0, 1_024, 1_024, rest_max=1_024, **slots)
        most, dense = daemon.rank.rest_max, begin(2, sparse=False)
        daemon.routers.send("a", begin(1), replace(dense, rest_max=most + 1), replace(dense, room=3, rest_max=most))
        details = [(await daemon.routers.over("a", room)).detail for room in (1, 2)]
        assert details == [
            "enable_hisparse: the request wants it, this node is run without it",
            f"rest_max: {most + 1}, this node computes at most {most} prompt tokens",
        ]
        assert taken(daemon) == {3}


async def test_its_engines_figures_are_metrics_and_its_own(tmp_path: Path) -> None:
    figures = HotFigures(
        running=1, waiting=2, hits=3, misses=4, swapped_bytes=5, preloaded_bytes=6, retracts=7, admission_bytes=8
    )
    async with decode(tmp_path, **SPARSE) as daemon:
        daemon._engine.model.hot.figures = figures
        own, registry = daemon.figures(), CollectorRegistry()
        assert (own.hisparse_running, own.hisparse_waiting) == (1, 2)
        assert (own.hot_hits, own.hot_misses, own.swapped_bytes) == (3, 4, 5)
        DecodeMetrics(daemon.node, registry, lambda: figures)
        lines = generate_latest(registry).decode().splitlines()
    for line in (
        "pdtransfer_hisparse_running 1.0", "pdtransfer_hisparse_waiting 2.0", "pdtransfer_hot_hits_total 3.0",
        "pdtransfer_hot_misses_total 4.0", "pdtransfer_swapped_bytes_total 5.0", "pdtransfer_preloaded_bytes_total 6.0",
        "pdtransfer_retracts_total 7.0", "pdtransfer_admission_bytes_total 8.0", 'pdtransfer_sessions{state="up"} 0.0',
    ):  # fmt: skip
        assert line in lines
