"""Figures of the prompt in answers of a pair of vLLM's servers: decode counts the KV that it received as cached."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from pdtransfer.serve.router.backends.servers.hand_offs import ANSWER_TAIL_BYTES, with_prompt_figures
from tests.support.vllm_servers import ServerSite, streamed
from tests.support.waiting import until

CHAT = {"messages": [{"role": "user", "content": "once"}], "prompt": None}
COUNTS = {"prompt_tokens": 192, "completion_tokens": 3, "total_tokens": 195}


def usage(cached: int | None, **more: Any) -> dict[str, Any]:
    return COUNTS | {"prompt_tokens_details": {"cached_tokens": cached} | more}


async def answered(site: ServerSite, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The usage of an answer."""
    body = {"model": "m", "prompt": "once", "max_tokens": 9} | body
    async with site.http.post(site.url + path, json=body) as response:
        raw = await response.read()
        assert response.status == 200
    if body.get("stream"):
        *_, raw, done, rest = raw.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
    return json.loads(raw.removeprefix(b"data: "))["usage"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["whole", "stream", "early"])
async def test_the_cached_tokens_are_prefills(site: ServerSite, path: str, n: int, how: str) -> None:
    # As vLLM: with the flag on decode alone, and prefill's connector returning the number with its identity.
    site.decode[0].figures = {"usage": usage(191)}
    site.prefill[0].more_params = {"remote_prefill_cached_tokens": 0}
    site.prefill[0].figures = {"usage": COUNTS | {"prompt_tokens_details": None}}
    await site.meet()
    body: dict[str, Any] = {"n": n} | (CHAT if "chat" in path else {})
    if how != "whole":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if how == "early":
        # A stream has no kv_transfer_params, so it needs the flag on prefill too.
        body |= {"temperature": 0}
        site.prefill[0].figures = {"usage": usage(0)}
    for _ in range(2):  # the first chat of a kind is only compared
        assert await answered(site, path, body) == usage(0)
    site.prefill[0].more_params = {"remote_prefill_cached_tokens": 176}
    site.prefill[0].figures = {"usage": usage(176)}
    assert await answered(site, path, body) == usage(176)


async def test_what_prefill_does_not_report_is_null(site: ServerSite) -> None:
    site.decode[0].figures = {"usage": usage(191, created_cache_tokens=7, multimodal_tokens={"image": 5})}
    site.prefill[0].more_params = {"remote_prefill_cached_tokens": None}
    expected = usage(None, created_cache_tokens=None, multimodal_tokens={"image": 5})
    for stream in (False, True):
        body = {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
        assert await answered(site, "/v1/completions", body) == expected


@pytest.mark.given(without_prefill="serve")
async def test_an_answer_that_decode_gives_alone_has_decodes_own_count(site: ServerSite) -> None:
    site.decode[0].figures = {"usage": usage(176)}
    await site.prefill[0].close()
    await until(lambda: site.backend.pool.serves_alone)
    assert await answered(site, "/v1/completions", {}) == usage(176)


async def test_a_prefill_that_answers_behind_decode_is_waited_for(site: ServerSite) -> None:
    site.decode[0].figures = {"usage": usage(191)}
    await site.meet()
    site.prefill[0].more.clear()  # its KV has landed, its answer is yet to come
    site.prefill[0].more_params = {"remote_prefill_cached_tokens": 16}
    answer = asyncio.create_task(answered(site, "/v1/completions", {}))
    await until(lambda: site.decode[0].seen and site.decode[0].seen[-1].answered)
    await asyncio.sleep(0.05)
    assert not answer.done()
    site.prefill[0].more.set()
    assert await answer == usage(16)


async def test_times_of_the_prompt_are_prefills_and_a_rate_without_it_is_null(site: ServerSite) -> None:
    generation = {"generation_time_ms": 20.5, "mean_itl_ms": 10.25}
    site.decode[0].figures = {
        "usage": COUNTS,
        "metrics": {"time_to_first_token_ms": 1.5, "queue_time_ms": 900.0, "tokens_per_second": 99.0} | generation,
    }
    site.prefill[0].figures = {
        "metrics": {"time_to_first_token_ms": 812.125, "queue_time_ms": 0.5, "tokens_per_second": 1.2}
    }
    _, answer, _ = await site.post()
    times = {"time_to_first_token_ms": 812.125, "queue_time_ms": 0.5, "tokens_per_second": None}
    assert answer["metrics"] == times | generation


@pytest.mark.parametrize("split", range(1, 60, 7))
async def test_a_figure_that_comes_in_two_pieces_is_prefills(site: ServerSite, split: int) -> None:
    text = "x" * 70_000 + 'a "cached_tokens":5 of one\'s own'
    whole = json.dumps({"choices": [{"text": text}], "usage": usage(191)}).encode()

    async def reply(request: web.Request, seen: Any) -> web.StreamResponse:
        await site.decode[0].hand_over(seen)
        pieces = whole[:-split], whole[-split:]
        return await streamed(request, pieces, kind="application/json", length=len(whole))

    site.decode[0].reply = reply
    site.prefill[0].more_params = {"remote_prefill_cached_tokens": 32}
    _, answer, _ = await site.post()
    assert answer == {"choices": [{"text": text}], "usage": usage(32)}


def test_an_object_of_figures_is_no_longer_than_what_is_kept_for_it() -> None:
    longest = b'"prompt_tokens_details": {"multimodal_tokens": {' + b" " * 600 + b'}, "cached_tokens": 5}'
    assert with_prompt_figures(longest, {}) == longest
    nested = b'"prompt_tokens_details": {"multimodal_tokens": {"image": 3}, "cached_tokens": 5}'
    assert with_prompt_figures(nested, {b"cached_tokens": b"1"}) == nested.replace(b"5}", b"1}").replace(b": 1", b":1")
    assert len(longest) < ANSWER_TAIL_BYTES


def test_a_token_of_that_name_keeps_its_logprob() -> None:
    scored = b'"top_logprobs": [{"cached_tokens": 0, "metrics": -1.5}]'
    assert with_prompt_figures(scored, {}) == scored
