"""Completions through real processes: equal to a single process's, or turned away with a reason."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdtransfer.serve.engines.generation import Generation
from tests.support import healing
from tests.support.fleets import GQA, LIMITS, MLA, SLOTS, TOKENS, Gates, Site, equal, generated, prompts, running
from tests.support.processes import mapped_files, open_files
from tests.support.waiting import until

# Every option of both is in one of those that run without --full.
FLEETS = [
    pytest.param(
        MLA, {"page_size": 64, "host_layout": "layer_first"}, {"page_size": 1, "host_layout": "page_first"},
        id="mla-64-to-1", marks=pytest.mark.full,
    ),
    pytest.param(
        GQA, {"page_size": 16, "host_layout": "page_first"}, {"page_size": 16, "host_layout": "page_head"},
        id="gqa-16-to-16", marks=pytest.mark.full,
    ),
    pytest.param(
        (*MLA, "layers_per_cell=1"), {"page_size": 16, "host_layout": "page_first_direct", "chunk_tokens": 8},
        {"page_size": 16, "host_layout": "layer_first"}, id="mla-16-to-16,-chunks-of-8-and-a-layer",
    ),
    pytest.param(
        GQA, {"page_size": 64, "host_layout": "page_head"}, {"page_size": 1, "host_layout": "page_first_direct"},
        id="gqa-64-to-1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "prefill", "decode"), FLEETS)
async def test_many_prompts_at_once_are_answered_as_by_a_single_process_and_nothing_leaks(
    tmp_path: Path, options: tuple[str, ...], prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    own = {"engine_option": options}
    router = {"limits": replace(LIMITS, turn_tokens_max=0)}  # each prompt is handed over
    async with running(tmp_path, prefills=[prefill | own], decodes=[decode | own], router=router) as site:
        texts = prompts(1, 1, 2, 15, 16, 17, 63, 64, 65, 130, 200)
        await site.served(options=options)
        await site.settled()
        workers = site.prefill, site.decode
        before = [open_files(worker.process.pid) for worker in workers]
        answers = await asyncio.gather(*(site.complete(text) for text in texts))
        for text, answer in zip(texts, answers, strict=True):
            expected = generated(text, options=options)
            assert equal(answer, expected), (text, answer)
            assert answer.text == text_of(expected)
            assert answer.body["usage"] == {
                "prompt_tokens": len(text),
                "completion_tokens": TOKENS,
                "total_tokens": len(text) + TOKENS,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            assert answer.facts["kv_bytes"] == len(text) * row_bytes(options)
            assert (answer.facts["prefill"], answer.facts["decode"]) == ("prefill-0", "decode-0")
        await site.settled()
        for worker in workers:
            libraries = mapped_files(worker.process.pid)
            assert "numpy" in libraries
            assert "libtorch" not in libraries
        of_prefill, of_decode = await asyncio.gather(*map(site.metrics, workers))
        total = sum(len(text) for text in texts) + len("does it work")
        assert of_prefill["pdtransfer_kv_bytes_total"] >= total * row_bytes(options)
        assert of_decode["pdtransfer_kv_bytes_total"] == of_prefill["pdtransfer_kv_bytes_total"]
        assert of_decode["pdtransfer_rooms_ended_total{length}"] == of_prefill["pdtransfer_rooms_ended_total{done}"]

        async def closed() -> bool:
            return all(open_files(each.process.pid) <= count for each, count in zip(workers, before, strict=True))

        await until(closed, f"no more open files than {before}")  # those of the last /metrics close in their time
        await share_what_two_prompts_have_unless_their_salts_differ(site, options)
        answer = await site.complete([5, 4_000_000_000])  # pyright: ignore
        assert answer.status == 400
        assert "4000000000" in answer.error["message"]


async def share_what_two_prompts_have_unless_their_salts_differ(site: Site, options: tuple[str, ...]) -> None:
    shared, one, other = prompts(3, 150, 20, 30)
    seen = list[int]()
    for text, salt in ((shared + one, "a"), (shared + one, "a"), (shared + other, "a"), (shared + other, "b")):
        answer = await site.complete(text, cache_salt=salt)
        assert equal(answer, generated(text, options=options)), answer
        cached = answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert answer.facts["kv_bytes"] == (len(text) - cached) * row_bytes(options)
        seen.append(cached)
    assert seen == [0, 128, 128, 0]
    await site.settled()
    decode = await site.metrics(site.decode)
    assert decode["pdtransfer_prefix_hit_tokens_total"] >= 256
    assert decode["pdtransfer_prefix_queried_tokens_total"] >= 512
    assert decode["pdtransfer_prefix_tokens"] >= 256
    assert decode["pdtransfer_prefix_used_tokens"] == 0
    # The router hears that what is cached is free.
    await site.until(site.router, "pdtransfer_worker_slots_free{decode}", lambda free: free == SLOTS)


def text_of(expected: Generation) -> str:
    return bytes(token for token in expected.tokens if token < 256).decode("utf-8", "replace")


def row_bytes(options: tuple[str, ...]) -> int:
    """Of one token in both layers."""
    return 2 * 256 * (2 * 4 if options == GQA else 1)


async def test_a_full_queue_is_429_with_retry_after_and_everybody_else_is_served(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    texts = prompts(6, *[100] * 12)
    gates = Gates(tmp_path_factory.mktemp("gates"))
    full_at_two = {"limits": replace(LIMITS, queue_max=2)}
    async with running(
        tmp_path_factory.mktemp("f"),
        prefills=[healing.prefill()],
        decodes=[healing.decode(slots=128, gates=gates.directory) | full_at_two],
        router=full_at_two,
    ) as site:

        async def served(site: Site) -> bool:
            return healing.right("does it work", await site.complete("does it work"))

        assert await served(site)  # the session is up: from here on rooms queue for slots
        with gates.closed("decode"):  # until all but one, and those that may queue behind it, are answered
            asked = [asyncio.ensure_future(site.complete(text)) for text in texts]
            await until(lambda: any(each.done() for each in asked), "some are turned away")
        answers = await asyncio.gather(*asked)
        full = [answer for answer in answers if answer.status == 429]
        assert full
        assert len(full) < len(texts)
        for text, answer in zip(texts, answers, strict=True):
            if answer.status == 429:
                assert answer.error["code"] == "full"
                assert answer.retry_after is not None
                assert int(answer.retry_after) >= 1
            else:
                assert healing.right(text, answer), answer
        await site.settled()
        await until(lambda: served(site), "the router has heard that there are slots again")
