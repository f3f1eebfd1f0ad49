"""How long a request may be: what some pair of servers takes, in /v1/models and for the requests themselves."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from pdtransfer.serve.router.backends.servers.dialects import DIALECTS
from tests.support.sglang_servers import FakeSglang
from tests.support.vllm_servers import FakeVllm, ServerSite, server_site
from tests.support.waiting import until


async def published(site: ServerSite) -> int | None:
    (model,) = json.loads((await site.get("/v1/models"))[1])["data"]
    return model.get("max_model_len")


@pytest.mark.parametrize(
    ("prefill", "decode", "longest"),
    [
        ((512,), (1024,), 512),
        ((1024,), (512,), 512),
        ((512, 900), (1024,), 900),
        ((0,), (1024,), 1024),
        ((9,), (0,), None),
    ],
)
async def test_models_are_as_long_as_the_longest_pair(
    prefill: tuple[int, ...], decode: tuple[int, ...], longest: int | None
) -> None:
    async with server_site(prefill=len(prefill), decode=len(decode)) as site:
        for server, tokens in zip(site.servers, (*prefill, *decode), strict=True):
            server.longest = tokens
        assert await published(site) == longest


@pytest.mark.given(of=FakeSglang)
async def test_sglangs_servers_are_as_long_as_their_kv_caches(site: ServerSite) -> None:
    (prefill,), (decode,) = site.prefill, site.decode
    prefill.longest = decode.longest = 8_192
    prefill.shown, decode.shown = {"context_tokens": 4_096}, {"context_tokens": 688}
    assert await published(site) == 688


@pytest.mark.given(decode=2)
async def test_a_shorter_server_is_known_before_anybody_asks_for_the_models(site: ServerSite) -> None:
    shorter, longer = site.decode
    refuses(shorter, 512)
    longer.longest = 1_024
    shorter.healthy = longer.healthy = False
    await until(lambda: not any(server.usable for server in site.backend.pool.decode))
    shorter.healthy = longer.healthy = True
    await until(lambda: site.backend.pool.is_shorter(site.backend.pool.decode[0]))
    assert [(await site.post())[0] for _ in range(2)] == [200] * 2
    assert shorter.seen, "it was asked"


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.given(prefill=2, decode=2)
async def test_what_a_shorter_server_refuses_goes_to_a_longer_one(site: ServerSite, side: str) -> None:
    servers = site.prefill if side == "prefill" else site.decode
    for server in site.servers:
        server.longest = 1_024
    refuses(servers[0], 512)
    assert await published(site) == 1_024
    statuses = [(await site.post())[0] for _ in range(4)]
    assert statuses == [200] * 4
    assert servers[0].seen, "it was asked"
    refuses(servers[1], 512)
    assert (await site.post())[0] == 400


def refuses(server: FakeVllm, longest: int) -> None:
    async def reply(*_: object) -> web.Response:
        return web.json_response({"error": {"message": f"the maximum is {longest}", "code": 400}}, status=400)

    server.longest, server.reply = longest, reply  # type: ignore[method-assign]


def test_an_answer_of_another_form_has_no_length() -> None:
    for answer in (b"", b"[]", b'{"data": 5}', b'{"data": [{"max_model_len": null}, {"max_model_len": "7"}]}'):
        assert DIALECTS["vllm"].longest(answer) is None
        assert DIALECTS["sglang"].longest(answer) is None
    assert DIALECTS["vllm"].longest(json.dumps({"data": [{"max_model_len": 7}, {"max_model_len": 9}]}).encode()) == 7
