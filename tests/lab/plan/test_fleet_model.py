"""The fleet model: times that can be computed by hand, the project's own admission and placement, and what is left."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from pdtransfer_lab.plan.fleet_model import FleetModel, FleetShape, modelled
from pdtransfer_lab.plan.rates import Curve, Rates
from pdtransfer_lab.plan.serving_figures import GapHistogram, Slo
from pdtransfer_lab.plan.trace import TraceRequest

from pdtransfer.limits import Limits

RATES = Rates(
    prefill=Curve.of({1_000: 1.0}),
    decode=Curve.of({1: 0.1, 11: 0.2}),
    link_bytes_s=1e4,
    handoff_s=0.01,
    overhead_s=0.005,
)
SHAPE = FleetShape(prefill_slots=4_096, decode_slots=4_096, page_size=16, chunk_tokens=500, bytes_per_token=1)
BLOCK = 16


def ask(at_s: float, tokens: int, output: int, first: int = 0) -> TraceRequest:
    return TraceRequest(at_s, tokens, output, tuple(range(first, first - -tokens // BLOCK + 1)))


def run(*requests: TraceRequest, shape: FleetShape = SHAPE, rates: Rates = RATES, **limits: int) -> FleetModel:
    model = modelled(requests, shape, rates, Limits(**limits), block_tokens=BLOCK, slo=Slo(1.2, 0.15))
    check_empty(model)
    return model


def check_empty(model: FleetModel) -> None:
    """Nothing is left: slots, pages, rooms at the router."""
    assert model.load.rooms == 0
    for decode in model.decodes.values():
        assert decode.slots_taken == 0
        assert (decode.rooms, len(decode.admission), decode.admission.inflight_bytes) == (0, 0, 0)
    for prefill in model.prefills.values():
        assert prefill.slots_taken == prefill.waiting == 0
    for worker in model.pool.by_peer.values():
        assert not worker.rooms
        assert worker.prompt_tokens == 0


def test_one_request_takes_what_its_parts_take() -> None:
    model = run(ask(3.0, 1_000, 5))
    report = model.report()
    # 1 s of computing; the last chunk of 500 bytes still has to cross; the first step; then 3 steps for 5 tokens,
    # since the first one reports two.
    first = 1.0 + 500 / 1e4 + 0.01 + 0.1
    assert report["ttft_ms"]["p50"] == pytest.approx(1e3 * (first + 0.005))
    assert report["total_ms"]["p50"] == pytest.approx(1e3 * (first + 0.3 + 0.005))
    assert report["itl_ms"]["p50"] == pytest.approx(100, rel=0.005)
    assert model.figures.gaps.count == 3
    assert report["fleet"]["kv_bytes"] == 1_000
    assert (report["good"], report["errors"]) == (1, {})


def test_two_requests_share_a_step_and_the_second_joins_at_its_end() -> None:
    rates = replace(RATES, prefill=Curve.of({1_000: 0.001}), link_bytes_s=1e12, handoff_s=0.0, overhead_s=0.0)
    shape = replace(SHAPE, prefill=2)
    model = run(ask(0.0, 16, 12), ask(0.05, 16, 3, first=100), shape=shape, rates=rates)
    ttft = sorted(model.figures.ttft_s)
    # The first step began at 0.000016; the second request waits for its end, and then for a step of two: 0.11 s.
    assert ttft[0] == pytest.approx(0.1, abs=1e-3)
    assert ttft[1] == pytest.approx(0.05 + 0.11, abs=1e-3)
    # 11 steps: 1 alone, 2 of two, 8 alone.
    assert max(model.figures.total_s) == pytest.approx(0.1 + 2 * 0.11 + 8 * 0.1, abs=2e-3)


def test_a_request_beyond_the_largest_batch_takes_turns() -> None:
    rates = replace(RATES, prefill=Curve.of({1_000: 1e-6}), link_bytes_s=1e12, handoff_s=0.0)
    alone = run(*(ask(0.0, 16, 20, first=100 * index) for index in range(4)), rates=rates).figures.total_s[0]
    turns = run(
        *(ask(0.0, 16, 20, first=100 * index) for index in range(4)), rates=rates, shape=replace(SHAPE, batch_max=2)
    ).figures.total_s[0]
    assert turns / alone == pytest.approx(2 * 0.11 / 0.13, rel=0.05)


def test_a_prompt_that_landed_spares_the_next_its_bytes_where_the_router_sends_it() -> None:
    shape = replace(SHAPE, decode=3)
    turns = [ask(0.0, 160, 2), ask(5.0, 320, 2), ask(10.0, 320, 2, first=50)]
    model = run(*turns, shape=shape)
    assert model.figures.cached_tokens == 160
    assert model.report()["fleet"]["kv_bytes"] == 160 + 160 + 320
    without = run(*turns, shape=replace(shape, prefix_cache=False))
    assert without.figures.cached_tokens == 0


def test_slots_for_prompt_and_growth_are_leased_together() -> None:
    shape = replace(SHAPE, decode_slots=1_024)
    one, two = ask(0.0, 500, 30), ask(0.0, 464, 30, first=100)
    assert run(one, two, shape=shape).load.queued_max == 1, "544 and 496 slots in whole pages are more than 1,024"
    assert run(one, replace(two, output_tokens=16), shape=shape).report()["arena_high_water_tokens"] == 1_024
    grown = run(one, replace(two, output_tokens=16), shape=replace(shape, growth_min=100))
    assert grown.report()["arena_high_water_tokens"] < 1_024, "one waited for the other"


def test_what_can_never_be_held_is_refused_and_a_full_queue_is_429() -> None:
    shape = replace(SHAPE, decode_slots=512)
    assert run(ask(0.0, 600, 2), shape=shape).report()["errors"] == {"400": 1}
    many = [ask(0.0, 400, 50, first=100 * index) for index in range(6)]
    report = run(*many, shape=shape, queue_max=2).report()
    assert report["errors"] == {"429": 3}
    assert report["answered"] == 3
    assert run(*many, rooms_max=2).report()["errors"]["429"] >= 4


def test_a_request_without_a_token_until_its_deadline_is_504() -> None:
    report = run(*(ask(0.0, 1_000, 2, first=100 * index) for index in range(8)), room_deadline_ms=3_000).report()
    assert report["errors"]["504"] == 8 - report["answered"]
    assert 1 <= report["answered"] <= 3


def test_prefill_that_keeps_prefixes_computes_only_the_rest() -> None:
    turns = [ask(0.0, 960, 2), ask(5.0, 1_920, 2)]
    plain, kept = (
        run(*turns, shape=replace(SHAPE, prefill_cache_tokens=tokens)).figures.ttft_s[1] for tokens in (0, 4_096)
    )
    assert plain - kept == pytest.approx(0.96, abs=0.02)


def test_a_long_prompt_and_a_short_one_take_turns() -> None:
    model = run(ask(0.0, 3_000, 2), ask(0.1, 100, 2, first=500))
    assert min(model.figures.ttft_s) < 1.0, "the short one waits for a chunk, not for the whole prompt"


@pytest.mark.parametrize("seed", range(4))
def test_random_loads_end_and_leave_nothing(seed: int) -> None:
    dice = random.Random(seed)
    requests = [
        ask(index / 8, dice.randrange(1, 700), dice.randrange(1, 60), first=dice.choice((0, 100, 1_000 * index)))
        for index in range(250)
    ]
    shape = replace(SHAPE, prefill=2, decode=3, decode_slots=1_024, prefill_slots=1_500, batch_max=4)
    model = run(*requests, shape=shape, queue_max=6, room_deadline_ms=6_000)
    report = model.report()
    assert report["requests"] == 250
    assert report["answered"] > 20
    assert set(report["errors"]) <= {"429", "504"}
    again = run(*requests, shape=shape, queue_max=6, room_deadline_ms=6_000).report()
    assert again == report, "the same load has the same figures"


def test_gaps_are_counted_to_half_a_percent() -> None:
    gaps = GapHistogram()
    assert gaps.percentile(50) is None
    gaps.add(0.0)
    gaps.add(0.02, 8)
    gaps.add(0.5)
    assert gaps.percentile(5) == 0.0
    assert gaps.percentile(50) == pytest.approx(0.02, rel=0.005)
    assert gaps.percentile(99) == pytest.approx(0.5, rel=0.005)
