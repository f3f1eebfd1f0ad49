"""The router in front of servers that behave like SGLang's; what depends on no engine is tested with vLLM's."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from aiohttp import web

from tests.support.sglang_servers import FakeSglang
from tests.support.vllm_servers import LIMITS, PIECES, ServerSite, server_site
from tests.support.waiting import until

WHOLE = "".join(PIECES)


def rooms(it: ServerSite) -> list[list[object]]:
    """Of each server, the rooms that it got."""
    return [[seen.body["bootstrap_room"] for seen in each.seen] for each in it.servers]


async def test_both_servers_are_asked_at_once_with_one_room_from_the_first_request_on() -> None:
    async with server_site(of=FakeSglang) as it:
        (prefill,), (decode,) = it.prefill, it.decode
        for each in it.servers:
            each.gate.clear()
        task = asyncio.create_task(it.post(prompt="once", max_tokens=9, min_tokens=3, bootstrap_room=1))
        await until(lambda: prefill.seen and decode.seen)
        for each in it.servers:
            each.gate.set()
        assert (await task)[:2] == (200, {"id": "cmpl-1", "choices": [{"text": WHOLE}], "server": "d0"})
        [[at_prefill], [at_decode]] = rooms(it)
        assert at_prefill == at_decode != 1
        own = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": at_prefill}
        body = {"model": "m", "prompt": "once", "max_tokens": 9, "min_tokens": 3, "rid": decode.seen[0].body["rid"]}
        assert decode.seen[0].body == body | own
        assert prefill.seen[0].body == body | own | {"stream": False}
        assert (await it.post())[0] == 200
        assert prefill.info_requests == 1  # of where its bootstrap server is
        assert len(set(rooms(it)[1])) == 2


async def test_only_the_bootstrap_servers_owner_reports_where_it_is() -> None:
    async with server_site(of=FakeSglang) as it:

        async def answers(*_: object) -> web.Response:
            return web.json_response({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 1})

        it.prefill[0].reply = answers  # type: ignore[method-assign]
        it.decode[0].hand_over = answers  # type: ignore[method-assign]
        for _ in range(2):
            assert (await it.post())[0] == 200
        assert [each.body["bootstrap_port"] for each in it.decode[0].seen] == [8998, 8998]
        assert it.backend.metrics.retries == 0


async def test_streams_and_sglangs_own_path_are_relayed() -> None:
    async with server_site(of=FakeSglang) as it:
        assert [json.loads(each[6:])["choices"][0]["text"] for each in (await it.stream()).split("\n\n")[:-2]] == PIECES
        sampling = {"max_new_tokens": 8, "n": 1}
        status, answer, _ = await it.post("/generate", input_ids=[[1, 2], [3]], sampling_params=sampling)
        assert (status, answer["server"]) == (200, "d0")
        seen = it.prefill[0].seen[-1]
        assert (seen.path, seen.body["input_ids"], seen.body["sampling_params"]) == (
            "/generate",
            [[1, 2], [3]],
            sampling,
        )


@pytest.mark.parametrize("how", ["500", "dies", "no prefill", "other port"])
async def test_a_prefill_that_fails_is_replaced(how: str) -> None:
    async with server_site(prefill=2, of=FakeSglang) as it:
        bad, good = it.prefill
        assert (await it.post())[0] == 200
        assert (await it.post())[0] == 200
        it.server(good).unfinished += 1
        if how == "dies":
            bad.dies = "early"
        elif how == "500":
            bad.status, bad.answer = 500, {"error": {}}
        else:  # another process is at this address
            bad.healthy = False
            await until(lambda: not it.server(bad).usable)
            bad.healthy, bad.connector, bad.port = True, how != "no prefill", 9009
            await until(lambda: it.server(bad).usable)
        for each in it.servers:
            each.seen.clear()
        assert (await it.post())[1]["server"] == "d0"
        last = it.decode[0].seen[-1].body
        serves = bad if how == "other port" else good
        assert last["bootstrap_port"] == serves.port
        assert last["bootstrap_room"] == serves.seen[-1].body["bootstrap_room"]
        assert it.backend.metrics.retries == (how != "other port")
        assert (it.server(bad).identity is None) == (how != "other port")


async def test_an_engine_that_is_busy_for_long_is_left_out_meanwhile() -> None:
    """SGLang computes a token to answer /health, which waits while a long step runs."""
    async with server_site(decode=2, of=FakeSglang, limits=replace(LIMITS, silence_ms=2_000)) as it:
        [prefill], [busy, _] = it.prefill, it.decode
        busy.mute = True
        await until(lambda: not it.server(busy).usable)
        assert [(await it.post())[1]["server"] for _ in range(2)] == ["d1", "d1"]
        prefill.mute = True
        await until(lambda: not it.server(prefill).usable)
        status, answer, headers = await it.post()
        assert (status, headers["Retry-After"]) == (503, "2")
        assert "/health has not answered within 2000 ms" in answer["error"]["message"]
        prefill.mute = busy.mute = False
        await until(lambda: it.server(prefill).usable and it.server(busy).usable)
        assert (await it.post())[1]["server"] == "d0"


async def test_the_only_prefill_server_that_ends_at_a_prompt_serves_again_when_it_is_back() -> None:
    async with server_site(of=FakeSglang) as it:
        [prefill] = it.prefill
        prefill.gate.clear()
        asked = asyncio.create_task(it.post())
        await until(lambda: prefill.seen)
        await prefill.close()
        status, answer, _ = await asked
        assert status in (502, 503), answer
        await until(lambda: not it.server(prefill).usable)
        status, answer, _ = await it.post()
        assert (status, "no prefill server is healthy" in answer["error"]["message"]) == (503, True)
        prefill.gate.set()
        await prefill.come_back()
        await until(lambda: it.server(prefill).usable)
        assert (await it.post())[0] == 200


async def test_servers_with_a_key_are_asked_as_the_client() -> None:
    async with server_site(of=FakeSglang) as it:
        it.prefill[0].key = "Bearer k"
        assert (await it.post())[0] == 401
        assert (await it.post(headers={"Authorization": "Bearer k"}))[0] == 200


async def test_a_client_that_leaves_has_both_servers_notified_by_the_name_that_they_know() -> None:
    """SGLang looks every four seconds whether the client of a request is there."""
    async with server_site(of=FakeSglang) as it:
        for each in it.servers:
            each.gate.clear()
        task = asyncio.create_task(it.post(headers={"X-Request-Id": "r1"}))
        await until(lambda: all(each.seen for each in it.servers))
        task.cancel()
        await until(lambda: all(each.given_up == [each.seen[0].body["rid"]] for each in it.servers))
        assert it.prefill[0].given_up[0].startswith("r1-")
        assert it.prefill[0].given_up == it.decode[0].given_up


async def test_a_client_that_leaves_cancels_both() -> None:
    async with server_site(of=FakeSglang) as it:
        await it.abandoned()


async def test_other_paths_are_404_and_the_answer_names_sglangs() -> None:
    async with server_site(of=FakeSglang) as it, it.http.post(it.url + "/v1/embeddings", json={}) as response:
        assert response.status == 404
        assert "/generate" in (await response.json())["error"]["message"]
