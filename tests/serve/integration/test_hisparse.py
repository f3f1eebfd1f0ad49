"""HiSparse through real processes: sparse and dense requests side by side on one daemon, both as a single process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdtransfer.serve.engines.generation import Generation
from tests.support.fleets import ENGINE, LIMITS, MLA, SLOTS, Gates, Site, equal, generated, prompts, running
from tests.support.waiting import PATIENCE_S, Running, standing, until

OPTION = (*MLA, "top_k=16", "index_share=1")
BOTH = {"mla": OPTION, "gqa": (*OPTION, "kv_heads=4")}
LAYOUTS = {"mla": {"page_size": 1, "host_layout": "page_first"}, "gqa": {"page_size": 16, "host_layout": "page_head"}}
TEXTS = prompts(1, 1, 20, 40, 48, 49, 130, 400, 700)


def expected(attention: str) -> list[Generation]:
    """Of a single process, with every token resident."""
    return [generated(text, options=BOTH[attention]) for text in TEXTS]


DECODE = {
    "enable_hisparse": True,
    "hot_tokens": 48,
    "device_slots": 98,
    "dense_slots": 1_024,
    "limits": replace(LIMITS, hisparse_wait_steps=1, hisparse_quantum_steps=2),
}  # places on the device for two long requests at once


@pytest.fixture(
    scope="module",
    params=[
        ("mla", 1),
        pytest.param(("gqa", 1), marks=pytest.mark.full),
        pytest.param(("mla", 2), marks=pytest.mark.full),
        ("gqa", 2),
    ],
    ids="{0[0]}-tp{0[1]}".format,
)
def of(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


@pytest.fixture(scope="module")
def attention(of: tuple[str, int]) -> str:
    return of[0]


@pytest.fixture(scope="module")
def site(of: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Site]]:
    """One decode process, or two of half the heads."""
    attention, tp_size = of
    both = {"engine_option": BOTH[attention]}
    decode = both | DECODE | LAYOUTS[attention] | {"tp_size": tp_size}
    yield from standing(running(tmp_path_factory.mktemp("f"), prefills=[both], decodes=[decode]))


async def test_sparse_and_dense_requests_side_by_side_are_answered_as_by_a_single_process(
    attention: str, site: Site
) -> None:
    wanted = expected(attention)
    asked = [(text, kind) for text in TEXTS for kind in (True, False)]
    answers = await asyncio.gather(*(site.complete(text, enable_hisparse=kind) for text, kind in asked))
    for index, ((_, kind), answer) in enumerate(zip(asked, answers, strict=True)):
        assert equal(answer, wanted[index // 2]), answer
        assert answer.facts["enable_hisparse"] is kind
    await site.settled()
    m = await site.metrics(site.decode)
    assert m["pdtransfer_hot_misses_total"] >= 2 * 16 * 4  # the first step of each long one, in two groups
    assert m["pdtransfer_preloaded_bytes_total"] > 0
    # Nothing is copied up on the CPU, and nothing moves twice.
    assert m["pdtransfer_admission_bytes_total"] == m["pdtransfer_preloaded_bytes_total"]
    assert m["pdtransfer_index_copies_total"] == 0
    assert (m["pdtransfer_hisparse_running"], m["pdtransfer_hisparse_waiting"]) == (0, 0)


async def test_a_request_that_can_never_fit_is_refused_and_whoever_hangs_up_leaves_nothing(
    attention: str, site: Site
) -> None:
    wanted = expected(attention)
    long = await site.complete("x" * SLOTS, enable_hisparse=True)
    assert long.status == 400, long
    async for _ in site.events(TEXTS[7], max_tokens=500, enable_hisparse=True):
        break
    asked = [asyncio.ensure_future(site.complete(TEXTS[at], enable_hisparse=True)) for at in (4, 5, 6)]
    events = site.events(TEXTS[7], max_tokens=500, enable_hisparse=True)
    for _ in range(3):  # it has had a place, and may have been retracted since
        await anext(events)
    await events.aclose()
    for index, each in enumerate(asked, 4):
        assert equal(await each, wanted[index])
    await site.settled()


async def test_a_full_queue_for_the_device_is_429_with_retry_after_and_dense_requests_are_served(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    gates = Gates(tmp_path_factory.mktemp("gates"))
    narrow = {
        "enable_hisparse": True,
        "hot_tokens": 48,
        "device_slots": 98,
        "engine": ENGINE,
        "engine_option": (*OPTION, f"gates={gates.directory}"),
        "limits": replace(LIMITS, hisparse_queue_max=2),
    }
    async with running(tmp_path_factory.mktemp("f"), prefills=[{"engine_option": OPTION}], decodes=[narrow]) as site:
        text = TEXTS[5]
        wanted = expected("mla")[5]
        assert equal(await site.complete(text, enable_hisparse=True), wanted)  # the session is up
        with gates.closed("decode"):
            asked = [asyncio.ensure_future(site.complete(text, enable_hisparse=True)) for _ in range(8)]
            await until(lambda: any(each.done() for each in asked), "some are turned away")
            dense = asyncio.ensure_future(site.complete(text, enable_hisparse=False))
        answers = await asyncio.gather(*asked)
        full = [answer for answer in answers if answer.status == 429]
        assert full
        assert len(full) <= 6, "two of them had places to wait in"
        for answer in full:
            assert answer.error["code"] == "full"
            assert answer.error["type"] == "rate_limit_error"
            assert answer.retry_after is not None
            assert int(answer.retry_after) >= 1
        assert all(equal(answer, wanted) for answer in answers if answer.status != 429)
        assert equal(await dense, wanted)
        await site.settled()


@pytest.mark.full
async def test_a_rank_that_is_refused_a_place_that_its_leader_has_ends_the_worker(tmp_path: Path) -> None:
    option = (*OPTION, "fault=refuse")
    decode = DECODE | {"engine": ENGINE, "engine_option": option, "tp_size": 2}
    async with running(tmp_path, ends_as=(1,), prefills=[{"engine_option": OPTION}], decodes=[decode]) as site:
        assert equal(await site.complete(TEXTS[6], enable_hisparse=True), expected("mla")[6])
        answer = await asyncio.wait_for(site.complete("?" + TEXTS[6], enable_hisparse=True), PATIENCE_S)
        assert answer.status == 500, answer
        assert "rank tp1 (decode-0-tp1) of this worker" in answer.error["message"], answer
        assert await asyncio.wait_for(site.decode.process.wait(), PATIENCE_S) == 1
        assert "the engine stops: rank 1 runs other HiSparse requests" in site.log(site.decode)
