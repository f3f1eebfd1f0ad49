"""HiSparse through real processes: sparse and dense requests side by side on one daemon, both as a single process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pdtransfer.engine.base import EngineConfig
from pdtransfer.engine.reference import Generation, generate_many
from pdtransfer.wire import Sampling
from tests.integration.fleets import (
    ENGINE,
    LIMITS,
    SLOTS,
    TOKENS,
    Answer,
    Gates,
    Running,
    Site,
    equal,
    prompts,
    running,
    until,
)

OPTIONS = {"layers": "2", "top_k": "16", "index_share": "1"}
LAYOUTS = {"mla": {"page_size": 1, "host_layout": "page_first"}, "gqa": {"page_size": 16, "host_layout": "page_head"}}
TEXTS = prompts(1, 1, 20, 40, 48, 49, 130, 400, 700)


def expected(attention: str) -> list[Generation]:
    """Of a single process, with every token resident."""
    config = EngineConfig(
        role="decode", attention=attention, slots=SLOTS, page_size=64, host_layout="layer_first", options=OPTIONS
    )
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    return generate_many(
        config, [(np.frombuffer(text.encode(), np.uint8).astype(np.int64), sampling) for text in TEXTS]
    )


@pytest.fixture(scope="module", params=["mla", "gqa"])
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Running]]:
    """Places on the device for two long requests at once."""
    both = {"attention": request.param, "engine_option": tuple(f"{name}={value}" for name, value in OPTIONS.items())}
    decode = {
        "enable_hisparse": True,
        "hot_tokens": 48,
        "device_slots": 98,
        "dense_slots": 1_024,
        "limits": replace(LIMITS, hisparse_wait_steps=1, hisparse_quantum_steps=2),
    }
    with running(
        tmp_path_factory.mktemp("f"), prefills=[both], decodes=[both | decode | LAYOUTS[request.param]]
    ) as made:
        yield request.param, made


def test_sparse_and_dense_requests_side_by_side_are_answered_as_by_a_single_process(
    sparse: tuple[str, Running],
) -> None:
    attention, on = sparse
    wanted = expected(attention)

    async def case(site: Site) -> None:
        asked = [(text, kind) for text in TEXTS for kind in (True, False)]
        answers = await asyncio.gather(*(site.complete(text, enable_hisparse=kind) for text, kind in asked))
        for at, ((_, kind), answer) in enumerate(zip(asked, answers, strict=True)):
            assert equal(answer, wanted[at // 2]), answer
            assert answer.facts["enable_hisparse"] is kind
        await site.settled()
        m = await site.metrics(site.decode)
        assert m["pdtransfer_hot_misses_total"] >= 2 * 16 * 4  # the first step of each long one, in two groups
        assert m["pdtransfer_preloaded_bytes_total"] > 0
        assert (m["pdtransfer_staging_copies_total"], m["pdtransfer_index_copies_total"]) == (0, 0)
        assert (m["pdtransfer_hisparse_running"], m["pdtransfer_hisparse_waiting"]) == (0, 0)

    on(case)


def test_a_request_that_can_never_fit_is_refused_and_whoever_hangs_up_leaves_nothing(
    sparse: tuple[str, Running],
) -> None:
    attention, on = sparse
    wanted = expected(attention)

    async def case(site: Site) -> None:
        long = await site.complete("x" * SLOTS, enable_hisparse=True)
        assert long.status == 400, long
        async for _ in site.events(TEXTS[7], max_tokens=500, enable_hisparse=True):
            break
        assert equal(await site.complete(TEXTS[6], enable_hisparse=True), wanted[6])
        await site.settled()

    on(case)


def test_a_full_queue_for_the_device_is_429_with_retry_after_and_dense_requests_are_served(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    gates = Gates(tmp_path_factory.mktemp("gates"))
    options = tuple(f"{name}={value}" for name, value in OPTIONS.items())
    narrow = {
        "enable_hisparse": True,
        "hot_tokens": 48,
        "device_slots": 98,
        "engine": ENGINE,
        "engine_option": (*options, f"gates={gates.directory}"),
        "limits": replace(LIMITS, hisparse_queue_max=2),
    }
    with running(tmp_path_factory.mktemp("f"), prefills=[{"engine_option": options}], decodes=[narrow]) as on:

        async def case(site: Site) -> None:
            text = TEXTS[5]
            wanted = expected("mla")[5]
            assert equal(await site.complete(text, enable_hisparse=True), wanted)  # the session is up
            with gates.closed("decode"):
                asked = [asyncio.ensure_future(site.complete(text, enable_hisparse=True)) for _ in range(8)]
                await until(lambda: some_done(asked), "some are turned away")
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

        on(case)


async def some_done(asked: list[asyncio.Task[Answer]]) -> bool:
    return any(each.done() for each in asked)
