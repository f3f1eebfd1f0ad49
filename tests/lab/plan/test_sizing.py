"""Sizing: the smallest fleet that keeps an SLO, and a clear answer where none does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pdtransfer_lab.plan.fleet_model import FleetShape
from pdtransfer_lab.plan.rates import Curve, Rates
from pdtransfer_lab.plan.serving_figures import Slo
from pdtransfer_lab.plan.sizing import FleetSize, WorkBounds, enlarged, resources, smallest_fleet, work_bounds
from pdtransfer_lab.plan.trace import Trace, TraceRequest

from pdtransfer.errors import WorldError
from pdtransfer.limits import ENGINES_MAX, Limits

RATES = Rates(prefill=Curve.of({1_000: 1.0}), decode=Curve.of({1: 0.1, 11: 0.2}), handoff_s=0.0)
TRACE = Trace(tuple(TraceRequest(index / 2, 1_000, 10, (index,)) for index in range(21)), block_tokens=1_000)


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("needed", [(1, 1), (7, 3), (30, 90)])
def test_the_smallest_fleet_is_found_with_few_runs(needed: tuple[int, int], at_once: int) -> None:
    tried: list[FleetSize] = []

    def evaluate(sizes: Sequence[FleetSize]) -> list[dict[str, Any]]:
        tried.extend(sizes)
        return [{"good_share": float(all(a >= b for a, b in zip(size, needed, strict=True)))} for size in sizes]

    bounds = WorkBounds(prefill=3, decode=2, batch=4, slow_alone=0.0)
    size, report = smallest_fleet(evaluate, bounds, share=0.95, at_once=at_once)
    assert size == needed
    assert report["good_share"] == 1.0
    assert len(tried) == len(set(tried)) < 60


def test_the_work_alone_bounds_the_fleet() -> None:
    # 21 prompts of 1 s in 10 s; 210 tokens at steps of 6 requests in 0.15 s.
    bounds = work_bounds(TRACE, RATES, FleetShape(), Slo(2.0, 0.151))
    assert (bounds.prefill, bounds.decode, bounds.batch, bounds.slow_alone) == (3, 1, 6, 0.0)
    assert work_bounds(TRACE, RATES, FleetShape(), Slo(2.0, 0.151), users=10).prefill == 21


def test_an_slo_that_no_fleet_can_keep_is_refused_at_once() -> None:
    bounds = work_bounds(TRACE, RATES, FleetShape(), Slo(ttft_s=0.9))
    assert bounds.slow_alone == 1.0
    with pytest.raises(WorldError, match=r"slo: no fleet keeps it for 95.0%.*100.0% of the requests miss it"):
        smallest_fleet(lambda _: pytest.fail("nothing is run"), bounds, share=0.95)


def test_a_size_that_is_nearly_enough_is_enlarged() -> None:
    size, _ = enlarged(lambda sizes: [{"good_share": float(sizes[0].prefill >= 105)}], FleetSize(100, 10), share=0.9)
    assert size == (105, 11)


def test_a_decode_that_meets_more_prefill_workers_than_it_may_have_engines_is_named() -> None:
    fleet = {
        "prefill_slots_high_water": 33, "batch_high_water": 4, "rooms_high_water": 9, "prefill_link_gb_s_max": 1.0,
        "decode_link_gb_s_max": 2.0,
    }  # fmt: skip
    for sessions, fits in ((10, True), (ENGINES_MAX + 1, False)):
        report = {"arena_high_water_tokens": 100, "fleet": fleet | {"sessions_of_a_decode_max": sessions}}
        found = resources(report, FleetShape(page_size=16, bytes_per_token=1 << 20), Limits())
        assert found["mooncake_sessions_fit"] is fits
        assert (found["decode_slots"], found["prefill_slots"]) == (112, 48)
        assert found["decode_arena_gib"] == pytest.approx(0.098, abs=1e-3)
