"""The router in front of servers that behave like SGLang's; what depends on no engine is tested with vLLM's."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from aiohttp import web

from tests.support.sglang_servers import FakeSglang
from tests.support.vllm_servers import LIMITS, PIECES, ServerSite
from tests.support.waiting import until

WHOLE = "".join(PIECES)
pytestmark = pytest.mark.given(of=FakeSglang)


def rooms(it: ServerSite) -> list[list[object]]:
    """Of each server, the rooms that it got."""
    return [[seen.body["bootstrap_room"] for seen in each.seen] for each in it.servers]


async def test_both_servers_are_asked_at_once_with_one_room_from_the_first_request_on(site: ServerSite) -> None:
    (prefill,), (decode,) = site.prefill, site.decode
    for each in site.servers:
        each.gate.clear()
    task = asyncio.create_task(site.post(prompt="once", max_tokens=9, min_tokens=3, bootstrap_room=1))
    await until(lambda: prefill.seen and decode.seen)
    for each in site.servers:
        each.gate.set()
    assert (await task)[:2] == (200, {"id": "cmpl-1", "choices": [{"text": WHOLE}], "server": "d0"})
    [[at_prefill], [at_decode]] = rooms(site)
    assert at_prefill == at_decode != 1
    own = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": at_prefill}
    body = {"model": "m", "prompt": "once", "max_tokens": 9, "min_tokens": 3, "rid": decode.seen[0].body["rid"]}
    assert decode.seen[0].body == body | own
    assert prefill.seen[0].body == body | own | {"stream": False}
    assert (await site.post())[0] == 200
    assert prefill.info_requests == 1  # of where its bootstrap server is
    assert len(set(rooms(site)[1])) == 2


async def test_only_the_bootstrap_servers_owner_reports_where_it_is(site: ServerSite) -> None:

    async def answers(*_: object) -> web.Response:
        return web.json_response({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 1})

    site.prefill[0].reply = answers  # type: ignore[method-assign]
    site.decode[0].hand_over = answers  # type: ignore[method-assign]
    for _ in range(2):
        assert (await site.post())[0] == 200
    assert [each.body["bootstrap_port"] for each in site.decode[0].seen] == [8998, 8998]
    assert site.backend.metrics.retries == 0


async def test_streams_and_sglangs_own_path_are_relayed(site: ServerSite) -> None:
    assert [json.loads(each[6:])["choices"][0]["text"] for each in (await site.stream()).split("\n\n")[:-2]] == PIECES
    sampling = {"max_new_tokens": 8, "n": 1}
    status, answer, _ = await site.post("/generate", input_ids=[[1, 2], [3]], sampling_params=sampling)
    assert (status, answer["server"]) == (200, "d0")
    seen = site.prefill[0].seen[-1]
    assert (seen.path, seen.body["input_ids"], seen.body["sampling_params"]) == ("/generate", [[1, 2], [3]], sampling)


@pytest.mark.parametrize("how", ["500", "dies", "no prefill", "other port"])
@pytest.mark.given(prefill=2)
async def test_a_prefill_that_fails_is_replaced(site: ServerSite, how: str) -> None:
    bad, good = site.prefill
    assert (await site.post())[0] == 200
    assert (await site.post())[0] == 200
    site.server(good).unfinished += 1
    if how == "dies":
        bad.dies = "early"
    elif how == "500":
        bad.status, bad.answer = 500, {"error": {}}
    else:  # another process is at this address
        bad.healthy = False
        await until(lambda: not site.server(bad).usable)
        bad.healthy, bad.connector, bad.port = True, how != "no prefill", 9009
        await until(lambda: site.server(bad).usable)
    for each in site.servers:
        each.seen.clear()
    assert (await site.post())[1]["server"] == "d0"
    last = site.decode[0].seen[-1].body
    serves = bad if how == "other port" else good
    assert last["bootstrap_port"] == serves.port
    assert last["bootstrap_room"] == serves.seen[-1].body["bootstrap_room"]
    assert site.backend.metrics.retries == (how != "other port")
    assert (site.server(bad).identity is None) == (how != "other port")


@pytest.mark.given(decode=2, limits=replace(LIMITS, silence_ms=2_000))
async def test_an_engine_that_is_busy_for_long_is_left_out_meanwhile(site: ServerSite) -> None:
    """SGLang computes a token to answer /health, which waits while a long step runs."""
    [prefill], [busy, _] = site.prefill, site.decode
    busy.mute = True
    await until(lambda: not site.server(busy).usable)
    assert [(await site.post())[1]["server"] for _ in range(2)] == ["d1", "d1"]
    prefill.mute = True
    await until(lambda: not site.server(prefill).usable)
    status, answer, headers = await site.post()
    assert (status, headers["Retry-After"]) == (503, "2")
    assert "/health has not answered within 2000 ms" in answer["error"]["message"]
    prefill.mute = busy.mute = False
    await until(lambda: site.server(prefill).usable and site.server(busy).usable)
    assert (await site.post())[1]["server"] == "d0"


async def test_the_only_prefill_server_that_ends_at_a_prompt_serves_again_when_it_is_back(site: ServerSite) -> None:
    [prefill] = site.prefill
    prefill.gate.clear()
    asked = asyncio.create_task(site.post())
    await until(lambda: prefill.seen)
    await prefill.close()
    status, answer, _ = await asked
    assert status in (502, 503), answer
    await until(lambda: not site.server(prefill).usable)
    status, answer, _ = await site.post()
    assert (status, "no prefill server is healthy" in answer["error"]["message"]) == (503, True)
    prefill.gate.set()
    await prefill.come_back()
    await until(lambda: site.server(prefill).usable)
    assert (await site.post())[0] == 200


async def test_servers_with_a_key_are_asked_as_the_client(site: ServerSite) -> None:
    site.prefill[0].key = "Bearer k"
    assert (await site.post())[0] == 401
    assert (await site.post(headers={"Authorization": "Bearer k"}))[0] == 200


async def test_a_client_that_leaves_has_both_servers_notified_by_the_name_that_they_know(site: ServerSite) -> None:
    """SGLang looks every four seconds whether the client of a request is there."""
    for each in site.servers:
        each.gate.clear()
    task = asyncio.create_task(site.post(headers={"X-Request-Id": "r1"}))
    await until(lambda: all(each.seen for each in site.servers))
    task.cancel()
    await until(lambda: all(each.given_up == [each.seen[0].body["rid"]] for each in site.servers))
    assert site.prefill[0].given_up[0].startswith("r1-")
    assert site.prefill[0].given_up == site.decode[0].given_up
