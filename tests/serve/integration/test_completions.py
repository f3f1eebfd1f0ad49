"""Completions through real processes, whole and streamed: equal to a single process's, or refused with a reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pdtransfer.serve.engines.generation import Generation
from tests.support import healing
from tests.support.fleets import (
    ENGINE,
    GQA,
    LIMITS,
    MLA,
    SLOTS,
    TOKENS,
    Gates,
    Site,
    equal,
    generated,
    prompts,
    running,
)
from tests.support.processes import mapped_files, open_files
from tests.support.waiting import Running, standing, until

Options = tuple[str, ...]

FLEETS: dict[str, tuple[Options, dict[str, Any], dict[str, Any]]] = {
    "mla 64 to 1": (
        MLA, {"page_size": 64, "host_layout": "layer_first"}, {"page_size": 1, "host_layout": "page_first"},
    ),
    "gqa 16 to 16": (
        GQA, {"page_size": 16, "host_layout": "page_first"}, {"page_size": 16, "host_layout": "page_head"},
    ),
    "mla 16 to 16, chunks of 8 and a layer": (
        (*MLA, "layers_per_cell=1"),
        {"page_size": 16, "host_layout": "page_first_direct", "chunk_tokens": 8},
        {"page_size": 16, "host_layout": "layer_first"},
    ),
    "gqa 64 to 1": (
        GQA, {"page_size": 64, "host_layout": "page_head"}, {"page_size": 1, "host_layout": "page_first_direct"},
    ),
}  # fmt: skip


# Every option of both is in one of them; the others run with --full.
COMMON = ("mla 16 to 16, chunks of 8 and a layer", "gqa 64 to 1")


@pytest.fixture(
    scope="module",
    params=[name if name in COMMON else pytest.param(name, marks=pytest.mark.full) for name in FLEETS],
    ids=lambda name: name.replace(" ", "-"),
)
def of(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def options(of: str) -> Options:
    return FLEETS[of][0]


@pytest.fixture(scope="module")
def site(of: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Site]]:
    options, prefill, decode = FLEETS[of]
    each = {"prefills": [prefill | {"engine_option": options}], "decodes": [decode | {"engine_option": options}]}
    router = {"limits": replace(LIMITS, turn_tokens_max=0)}  # each prompt is handed over
    yield from standing(running(tmp_path_factory.mktemp("f"), **each, router=router))


async def test_many_prompts_at_once_are_answered_as_by_a_single_process_and_nothing_leaks(
    options: Options, site: Site
) -> None:
    texts = prompts(1, 1, 2, 15, 16, 17, 63, 64, 65, 130, 200)
    await site.served(options=options)
    await site.settled()
    before = {daemon.role: open_files(daemon.process.pid) for daemon in site.fleet.daemons if daemon.role != "router"}
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
    for daemon in (site.prefill, site.decode):
        libraries = mapped_files(daemon.process.pid)
        assert "numpy" in libraries
        assert "libtorch" not in libraries
    prefill, decode = await asyncio.gather(*(site.metrics(daemon) for daemon in (site.prefill, site.decode)))
    total = sum(len(text) for text in texts) + len("does it work")
    assert prefill["pdtransfer_kv_bytes_total"] >= total * row_bytes(options)
    assert decode["pdtransfer_kv_bytes_total"] == prefill["pdtransfer_kv_bytes_total"]
    assert decode["pdtransfer_rooms_ended_total{length}"] == prefill["pdtransfer_rooms_ended_total{done}"]

    async def closed() -> bool:
        after = {
            daemon.role: open_files(daemon.process.pid) for daemon in site.fleet.daemons if daemon.role != "router"
        }
        return all(after[role] <= count for role, count in before.items())

    await until(closed, f"no more open files than {before}")  # those of the last /metrics close in their time


async def test_a_stream_carries_the_same_text_as_the_whole(options: Options, site: Site) -> None:
    (text,) = prompts(2, 90)
    *pieces, last = await site.stream(text, max_tokens=12)
    expected = generated(text, 12, options)
    streamed = "".join(each["choices"][0]["text"] for each in (*pieces, last))
    assert streamed == text_of(expected)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 12
    assert last["pdtransfer"]["tokens_digest"] == expected.tokens_digest.hex()
    assert last["pdtransfer"]["kv_digest"] == expected.kv_digest.hex()


async def test_what_two_prompts_share_crosses_once_unless_their_salts_differ(options: Options, site: Site) -> None:
    shared, one, other = prompts(3, 150, 20, 30)
    seen = []
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


def row_bytes(options: Options) -> int:
    """Of one token in both layers."""
    return 2 * 256 * (2 * 4 if options == GQA else 1)


# One fleet whose arena and queue are soon full


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Site]]:
    decode = {"slots": 256, "engine": ENGINE, "engine_option": ("layers=2", "step_ms=5")}
    yield from standing(running(tmp_path_factory.mktemp("f"), prefills=[{"slots": 512}], decodes=[decode], router={}))


async def test_more_than_fits_at_once_waits_its_turn(narrow: Site) -> None:
    texts = prompts(3, *[100] * 9)
    answers = await asyncio.gather(*(narrow.complete(text) for text in texts))
    assert all(equal(answer, generated(text)) for text, answer in zip(texts, answers, strict=True))
    await narrow.settled()


@pytest.mark.parametrize(
    ("size", "max_tokens", "words"),
    [(200, 57, ["57", "200", "256"]), (300, 1, ["300", "256"]), (20_000, 1, ["20000", "256"])],
)
async def test_a_prompt_that_never_fits_is_a_clear_error_and_holds_nothing(
    narrow: Site, size: int, max_tokens: int, words: list[str]
) -> None:
    answer = await narrow.complete("x" * size, max_tokens=max_tokens)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    (listed,) = json.loads((await narrow.get(narrow.router, "/v1/models"))[1])["data"]
    assert listed["max_model_len"] == 256, "what decode's memory takes"
    assert all(word in answer.error["message"] for word in words), answer
    assert answer.retry_after is None
    await narrow.settled()


async def test_a_prompt_that_fits_to_the_last_slot_is_served(narrow: Site) -> None:
    (text,) = prompts(4, 250)
    await narrow.served(text)


async def test_ids_that_the_model_has_not_are_refused_by_the_daemons(narrow: Site) -> None:
    answer = await narrow.complete([5, 4_000_000_000])  # pyright: ignore
    assert answer.status == 400
    assert "4000000000" in answer.error["message"]
    await narrow.settled()


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
