"""Requests that want HiSparse and others, side by side: one decode worker has its KV in both memories, one has not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.engines import plain
from tests.support.fleets import TOKENS, Site, prompts, running
from tests.support.healing import decode, prefill
from tests.support.waiting import Running, standing


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Site]]:
    """decode-0 can do HiSparse, decode-1 cannot."""
    decodes = [decode(slots=2_048, twin="1") | {"enable_hisparse": True}, decode(slots=2_048)]
    yield from standing(running(tmp_path_factory.mktemp("twins"), prefills=[prefill()], decodes=decodes))


async def test_each_kind_goes_where_it_can_and_reads_its_own_rows(site: Site) -> None:
    texts = prompts(3, *[40] * 24)
    asked = [site.complete(text, enable_hisparse=place % 2 == 0) for place, text in enumerate(texts)]
    for place, answer in enumerate(await asyncio.gather(*asked)):
        assert answer.status == 200, answer
        assert answer.text == plain.text(texts[place], TOKENS)
        assert answer.facts["enable_hisparse"] is (place % 2 == 0)
        assert answer.facts["decode"] == "decode-0" or place % 2, "only one can"
    await site.settled()


async def test_one_worker_decodes_both_kinds_at_once_from_either_memory(site: Site) -> None:
    worker = next(each for each in site.fleet.of("decode") if each.ready["node"] == "decode-0")
    texts = prompts(4, *[600] * 6)
    asked = [site.complete(text, enable_hisparse=place < 3) for place, text in enumerate(texts)]
    answers = await asyncio.gather(*asked)
    assert [answer.text for answer in answers] == [plain.text(text, TOKENS) for text in texts]
    metrics = await site.metrics(worker)
    assert metrics["pdtransfer_slots"] == 2 * 2_048, "the same slots in each memory"
    await site.settled()


async def test_a_request_without_the_field_has_what_its_router_asks_for_by_default(site: Site) -> None:
    async with site.beside("asks", enable_hisparse=True) as asks:
        for router, more, sparse in ((site, {}, False), (asks, {}, True), (asks, {"enable_hisparse": False}, False)):
            answer = await router.complete("by default", **more)
            assert answer.facts["enable_hisparse"] is sparse
            assert answer.text == plain.text("by default", TOKENS)
