"""Limits count answers, not requests, and what a failed request held of them comes back at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from pdtransfer.limits import HTTP_BODY_BYTES_MAX
from pdtransfer.serve.router.front import openai_http
from pdtransfer.serve.router.front.api_keys import ApiKey, ApiKeys
from pdtransfer.serve.router.front.json_bodies import RefusedRequestError
from tests.serve.router.client_keys import A, bearer
from tests.serve.router.router_site import LIMITS, Site
from tests.support.vllm_servers import ServerSite, server_site
from tests.support.waiting import until

PATH = "/v1/completions"


def key_of(site: Site | ServerSite) -> ApiKey:
    keys = site.router.guard.keys
    assert keys is not None
    key = keys.find(f"Bearer {A}")
    assert key is not None
    return key


async def ask(site: Site | ServerSite, body: dict | bytes, path: str = PATH) -> tuple[int, dict]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with site.http.post(site.url + path, data=raw, headers=bearer(A)) as response:
        return response.status, await response.json(content_type=None)


@pytest.mark.given(keys="open=4")
async def test_a_keys_open_answers_are_its_choices_and_the_prompts_of_its_lists(either: Site | ServerSite) -> None:
    for more in ({"n": 5}, {"prompt": ["a"] * 5}, {"prompt": [[1], [2], [3]], "n": 2}, {"n": 256}):
        status, answer = await ask(either, {"prompt": "a", "max_tokens": 1} | more)
        assert (status, answer["error"]["param"]) == (400, "n"), more
    assert key_of(either).open_count == 0
    either.decode[0].gate.clear()
    three = asyncio.create_task(ask(either, {"prompt": ["a", "b", "c"], "max_tokens": 1}))
    await until(lambda: key_of(either).open_count == 3)
    assert (await ask(either, {"prompt": "a", "n": 2, "max_tokens": 1}))[0] == 429
    task = asyncio.create_task(ask(either, {"prompt": "a", "max_tokens": 1}))
    await until(lambda: key_of(either).open_count == 4)
    either.decode[0].gate.set()
    assert [(await each)[0] for each in (three, task)] == [200, 200]
    assert key_of(either).open_count == 0


def test_a_request_of_many_answers_takes_them_from_a_full_second_and_the_next_waits_for_them() -> None:
    keys = ApiKeys()
    keys.replace(f"{A} a rate=2", source="keys")
    key = keys.find(f"Bearer {A}")
    assert key is not None
    with key.use(0.0) as use:
        use.widen(10, 0.0)
    assert key.tokens == -8.0
    for now in (1.0, 4.4):
        with pytest.raises(RefusedRequestError) as refused, key.use(now):
            pass
        assert now + refused.value.retry_ms / 1e3 == pytest.approx(4.5, abs=2e-3)
    with key.use(4.6) as use, pytest.raises(RefusedRequestError) as refused:
        use.widen(2, 4.6)
    assert key.tokens == pytest.approx(1.2), "what is refused takes nothing"
    with key.use(4.6 + refused.value.retry_ms / 1e3) as use:
        use.widen(2, 4.6 + refused.value.retry_ms / 1e3)
    assert key.open_count == 0


async def test_a_relay_counts_answers_against_its_limits_and_where_it_sends_them() -> None:
    async with server_site(prefill=2, decode=2, limits=replace(LIMITS, rooms_max=8)) as it:
        await it.meet()
        for body in ({"n": 9}, {"prompt": ["a"] * 3, "n": 3}):
            status, answer, _ = await it.post(**body)
            assert (status, answer["error"]["param"]) == (400, "n")
        for each in it.decode:
            each.gate.clear()
        tasks = [asyncio.create_task(it.post(**body)) for body in ({"prompt": ["a", "b"], "n": 2},)]
        await until(lambda: sum(len(each.seen) for each in it.decode) == 1)
        for number in range(2, 5):
            tasks.append(asyncio.create_task(it.post()))
            await until(lambda number=number: sum(len(each.seen) for each in it.decode) == number)
        assert sorted(len(each.seen) for each in it.decode) == [1, 3], "four answers are more than three"
        assert it.router.open_requests.count == 7
        for each in it.decode:
            each.gate.set()
        assert [(await task)[0] for task in tasks] == [200] * 4
        assert it.router.open_requests.count == 0
        await until(lambda: not any(each.unfinished for each in it.backend.pool.all))


# What fails


async def raw(
    site: Site | ServerSite, head: str, body: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = site.url.removeprefix("http://").rpartition(":")
    stream = await asyncio.open_connection(host, int(port))
    start = (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {A}\r\nContent-Type: application/json\r\n"
    )
    stream[1].write(f"{start}{head}\r\n\r\n".encode() + body)
    return stream


def body_of(**more: object) -> bytes:
    return json.dumps({"prompt": "abc", "max_tokens": 6} | more).encode()


async def answered(site: Site | ServerSite, body: bytes, *statuses: int) -> None:
    async with site.http.post(site.url + PATH, data=body, headers=bearer(A)) as response:
        await response.read()
        assert response.status in statuses


async def leaves(site: Site | ServerSite, sent: Callable[[], Awaitable[object]], body: bytes, length: int = 0) -> None:
    """A client that sends this and is gone when `sent` holds."""
    _, writer = await raw(site, f"Content-Length: {length or len(body)}", body)
    await until(sent)
    writer.transport.abort()


async def held(site: Site | ServerSite) -> bool:
    return key_of(site).open_count > 0


async def without_answer(site: Site | ServerSite, body: bytes) -> None:
    site.decode[0].gate.clear()
    await leaves(site, lambda: site.at_decode, body)


async def in_stream(site: Site | ServerSite) -> None:
    site.decode[0].more.clear()
    body = body_of(stream=True)
    reader, writer = await raw(site, f"Content-Length: {len(body)}", body)
    await reader.readuntil(b"data: ")
    writer.transport.abort()


async def worker_fails(site: Site | ServerSite, *, stream: bool = False) -> None:
    if isinstance(site, Site):
        site.decode[0].failure = "engine"
    else:
        site.decode[0].status, site.decode[0].answer = 500, {"error": {}}
    await answered(site, body_of(stream=stream), 500, 503, 200)


async def worker_is_lost(site: Site | ServerSite) -> None:
    site.decode[0].gate.clear()
    task = asyncio.create_task(ask(site, body_of()))
    await until(lambda: site.at_decode)
    await site.decode[0].close()
    assert (await task)[0] in (500, 503, 502)


async def in_turn(site: Site | ServerSite) -> None:
    """A large body, whose client leaves while it is read."""
    await leaves(site, lambda: held(site), b'{"prompt": "' + b"a" * 300_000 + b'"}')


FAILURES: dict[str, Callable[[Site | ServerSite], Awaitable[None]]] = {
    "no JSON": lambda it: answered(it, b"{", 400),
    "large and no JSON": lambda it: answered(it, b"{" * 100_000, 400),
    "a wrong field": lambda it: answered(it, body_of(n="2"), 400),
    "too large": lambda it: answered(it, body_of(user="a" * HTTP_BODY_BYTES_MAX), 413),
    "too many answers": lambda it: answered(it, body_of(n=200), 400),
    "leaves in its body": lambda it: leaves(it, lambda: held(it), b'{"prompt"', 100),
    "leaves while it is read": in_turn,
    "leaves before the answer": lambda it: without_answer(it, body_of()),
    "leaves before the stream": lambda it: without_answer(it, body_of(stream=True)),
    "leaves in the stream": in_stream,
    "a worker fails": worker_fails,
    "a worker fails in a stream": lambda it: worker_fails(it, stream=True),
    "a worker is lost": worker_is_lost,
}


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.given(keys="open=1")
async def test_what_a_failed_request_held_comes_back(either: Site | ServerSite, how: str) -> None:
    await FAILURES[how](either)
    await until(lambda: key_of(either).open_count == 0)
    requests = either.router.open_requests
    await until(lambda: (requests.count, requests.prompts_bytes, requests.bodies_bytes) == (0, 0, 0))
    if isinstance(either, ServerSite):
        await until(lambda: not any(each.unfinished for each in either.backend.pool.all))
        return
    await until(lambda: not either.backend.routing.rooms)
    for each in either.backend.routing.workers.by_peer.values():
        assert (len(each.rooms), each.prompt_tokens, each.promised) == (0, 0, {})


@pytest.mark.given(keys="open=1")
async def test_a_body_that_is_late_gives_its_place_back(
    either: Site | ServerSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_http, "BODY_S", 0.2)
    reader, writer = await raw(either, "Content-Length: 100", b"{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    assert key_of(either).open_count == 0
    assert (await ask(either, {"prompt": "a", "max_tokens": 1}))[0] == 200
    writer.close()
