"""Answers that go on in another room when the one that generates them is lost, over HTTP: each token once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from pdtransfer.limits import PROMPT_BYTES_MAX
from tests.serve.router.router_site import Site, site
from tests.support.routing_world import LIMITS
from tests.support.waiting import until

ASKED = {"prompt": "abcde", "max_tokens": 16, "seed": 3, "logprobs": 1, "enable_resume": True}


def tokens_of(site: Site) -> float | None:
    return site.router.metrics.registry.get_sample_value("pdtransfer_generated_tokens_total", {"model": "m"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.given(decode=2)
async def test_a_client_gets_one_answer_whose_usage_counts_it_once(site: Site, stream: bool) -> None:
    _, wanted, _ = await site.post(**ASKED)
    assert wanted["pdtransfer"]["resumptions"] == 0
    for decode in site.decode:
        decode.more.clear()
        decode.begun.clear()
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    asked = asyncio.create_task(site.http.post(site.url + "/v1/completions", json=ASKED | more))
    await until(lambda: tokens_of(site) == 16 + 3)
    first, second = site.decode if site.decode[0].begun else site.decode[::-1]
    first.failure = "peer_lost"
    for decode in site.decode:
        decode.more.set()
    async with await asked as response:
        assert response.status == 200
        text = await response.text()
    if stream:
        events = [json.loads(each[6:]) for each in text.split("\n\n") if each.startswith("data: {")]
        choices = [event["choices"][0] for event in events if event["choices"]]
        answer = {
            "text": "".join(choice["text"] for choice in choices),
            "tokens": [token for choice in choices for token in choice["logprobs"]["tokens"]],
            "offsets": [at for choice in choices for at in choice["logprobs"]["text_offset"]],
            "reason": choices[-1]["finish_reason"],
            "usage": events[-1]["usage"],
            "pdtransfer": events[-2]["pdtransfer"],
        }
    else:
        answer = facts(json.loads(text))
    expected = facts(wanted)
    expected["usage"]["prompt_tokens_details"] = None  # what is cached of an answer is not a cached prompt
    record, _ = answer.pop("pdtransfer"), expected.pop("pdtransfer")
    assert answer == expected
    assert (record["resumptions"], record["tokens_digest"], record["kv_digest"]) == (1, None, "03")
    assert (record["decode"], record["room"]) == (second.node, f"{second.begun[0].room:016x}")
    assert site.backend.routing.resumptions == 1
    lost, ended, whole = site.ended[-3:]
    assert [each.resumptions for each in (lost, ended, whole)] == [0, 1, 1]
    assert (lost.retried, lost.tokens + ended.tokens, whole.tokens) == (True, 16, 16)
    assert lost.tokens in (3, 6), "a loss may overtake the piece before it"
    assert (ended.prompt_tokens, whole.prompt_tokens, whole.cached_tokens) == (5 + lost.tokens - 1, 5, None)
    assert whole.rooms == (*lost.rooms, *ended.rooms)


def facts(answer: dict) -> dict:
    choice = answer["choices"][0]
    return {
        "text": choice["text"],
        "tokens": choice["logprobs"]["tokens"],
        "offsets": choice["logprobs"]["text_offset"],
        "reason": choice["finish_reason"],
        "usage": answer["usage"],
        "pdtransfer": answer["pdtransfer"],
    }


@pytest.mark.given(decode=2)
async def test_a_stop_string_may_lie_across_the_loss(site: Site) -> None:
    for decode in site.decode:
        decode.more.clear()
        decode.piece = 2
    body = {"prompt": "abcde", "max_tokens": 16, "stop": "cba", "enable_resume": True}
    asked = asyncio.create_task(site.post(**body))
    await until(lambda: tokens_of(site) == 2)
    first = site.decode[0] if site.decode[0].begun else site.decode[1]
    first.failure = "peer_lost"
    for decode in site.decode:
        decode.more.set()
    _, answer, _ = await asked
    assert answer["choices"][0]["text"] == "ed"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 5


@pytest.mark.given(limits=replace(LIMITS, prompts_bytes_max=PROMPT_BYTES_MAX))
async def test_what_is_kept_of_answers_counts_against_the_bytes_of_all_prompts(site: Site) -> None:
    body = {"prompt": ["ab", "cd"], "max_tokens": 400_000}
    status, answer, _ = await site.post(**body, enable_resume=True)
    assert (status, answer["error"]["param"]) == (400, "n"), "it never fits"


async def test_only_streams_ask_for_the_first_token_of_prefill_and_only_where_the_flag_allows_it() -> None:
    for stream_from in ("prefill", "decode"):
        async with site(stream_from=stream_from) as it:
            for stream in (True, False):
                body = {"prompt": "once", "max_tokens": 3, "stream": stream}
                async with it.http.post(it.url + "/v1/completions", json=body) as response:
                    assert response.status == 200
                    await response.read()
            asked = [[begin.first_token for begin in side[0].begun] for side in (it.prefill, it.decode)]
            assert asked == [[stream_from == "prefill", False], [False, False]]
