"""Hostile HTTP clients: too many, too slow, too large; the others are served meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from prometheus_client import CollectorRegistry

from pdtransfer.limits import HTTP_BODY_BYTES_MAX
from pdtransfer.serve.process import connection_limit, http
from pdtransfer.serve.process.http import Health, HttpListener, application
from pdtransfer.serve.router.front import openai_http
from tests.serve.router.router_site import Site
from tests.support.processes import forked_descriptors
from tests.support.waiting import until

GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def listening(
    connections_max: int = 8, app: http.web.Application | None = None
) -> AsyncIterator[tuple[HttpListener, Callable[[], Awaitable[Stream]]]]:
    app = app or application(lambda: Health(True, {}), CollectorRegistry())
    listener = HttpListener(app, connections_max=connections_max)
    host, _, port = (await listener.open("127.0.0.1:0")).rpartition(":")
    streams: list[Stream] = []

    async def connect() -> Stream:
        streams.append(await asyncio.open_connection(host, int(port)))
        return streams[-1]

    try:
        yield listener, connect
    finally:
        for _, writer in streams:
            writer.close()
        await listener.close()


def serving(handler: Callable[[http.web.Request], Awaitable[http.web.Response]]) -> http.web.Application:
    """GET /live is answered so."""
    app = http.web.Application()
    app.add_routes([http.web.get("/live", handler)])
    return app


async def live(stream: Stream) -> bool:
    """Whether this connection is served."""
    reader, writer = stream
    writer.write(GET)
    try:
        return b"200 OK" in await reader.readuntil(b'{"live":true}')
    except (asyncio.IncompleteReadError, ConnectionError):
        return False


async def test_beyond_the_bound_the_longest_idle_connection_is_closed() -> None:
    async with listening(connections_max=8) as (listener, connect):
        assert listener.doors is not None
        crowd = [await connect() for _ in range(8)]
        await until(lambda: len(listener.doors) == 8)
        assert await live(crowd[0])  # this request makes it the most recent
        newcomers = [await connect() for _ in range(3)]
        assert all([await live(newcomer) for newcomer in newcomers])
        assert [await live(each) for each in crowd] == [True, *[False] * 3, *[True] * 4]
        assert listener.doors.refused == 3
        assert len(listener.doors) == 8


async def test_a_flood_of_idle_connections_keeps_no_client_out() -> None:
    async with listening(connections_max=16) as (listener, connect):
        for _ in range(400):
            await connect()
        assert await live(await connect())
        assert listener.doors is not None
        assert len(listener.doors) == 16


async def test_a_connection_being_served_is_not_closed() -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def slowly(_: object) -> http.web.Response:
        asked.set()
        await go.wait()
        return http.web.Response(text="here")

    async with listening(connections_max=1, app=serving(slowly)) as (_, connect):
        reader, writer = await connect()
        writer.write(GET)
        await asked.wait()
        other, _ = await connect()
        assert await other.read() == b""
        go.set()
        assert b"here" in await reader.readuntil(b"here")


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Reads until the connection is closed or reset."""
    sent = b""
    with suppress(ConnectionError):
        while some := await reader.read(1_000):
            sent += some
    return sent


@pytest.mark.parametrize("sent", [b"", b"GET /li", b"GET /live HTTP/1.1\r\nHost: localhost\r\nX: 1\r\n"])
async def test_half_a_request_is_not_waited_for(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit.ConnectionLimiter.__init__, "__kwdefaults__", {"wait_s": 0.2})
    async with listening() as (listener, connect):
        reader, writer = await connect()
        writer.write(sent)
        over = asyncio.ensure_future(ended(reader))
        while not (await asyncio.wait([over], timeout=0.05))[0]:
            if sent and not writer.is_closing():
                writer.write(b"x")  # a single byte now and then extends no deadline
        assert await over == b""
        assert await live(await connect())
        assert listener.doors is not None
        await until(lambda: len(listener.doors) <= 1)


async def test_an_answer_that_its_client_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit.ConnectionLimiter.__init__, "__kwdefaults__", {"wait_s": 0.2})
    size, transports = 32 << 20, []

    async def large(request: http.web.Request) -> http.web.Response:
        transports.append(request.transport)
        return http.web.Response(body=bytes(size))

    async with listening(app=serving(large)) as (listener, connect):
        reader, writer = await connect()
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        assert listener.doors is not None
        await until(lambda: len(listener.doors) == 0)
        await until(lambda: transports[0].get_write_buffer_size() == 0)
        assert len(await ended(reader)) < size


@pytest.mark.parametrize(("unread", "looks"), [(0, 1), (5, 2)])
async def test_a_client_that_still_reads_has_longer(unread: int, looks: int) -> None:
    class Transport(asyncio.Transport):
        looks = aborted = 0

        def get_write_buffer_size(self) -> int:
            self.looks += 1
            return unread

        def abort(self) -> None:
            self.aborted += 1

    transport = Transport()
    doors = connection_limit.ConnectionLimiter(asyncio.Protocol, connections_max=1, wait_s=0.02)
    assert doors.came(transport)
    await until(lambda: transport.aborted)
    assert (transport.looks, transport.aborted, len(doors)) == (looks, 1, 0)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"A%d: x\r\n" % n for n in range(100_000)) + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # TLS
        b"GET /live HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
        bytes(1_000),
    ],
    ids=["line", "header", "headers", "tls", "smuggled", "zeros"],
)
async def test_an_invalid_request_is_refused_and_closes_its_connection(request_: bytes) -> None:
    async with listening() as (_, connect):
        reader, writer = await connect()
        writer.write(request_)
        with suppress(ConnectionResetError):  # it may close before it has read everything
            assert (await reader.read()).startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
        assert await live(await connect())


# The router's bodies


async def posting(url: str, head: bytes) -> Stream:
    host, _, port = url.removeprefix("http://").rpartition(":")
    stream = await asyncio.open_connection(host, int(port))
    stream[1].write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + head)
    return stream


@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_being_received_are_bounded_together(
    site: Site, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_http, "HTTP_BODIES_BYTES_MAX", 250_000)
    head = b"Transfer-Encoding: chunked\r\n\r\n20000\r\n" if chunked else b"Content-Length: 200000\r\n\r\n"
    streams = [await posting(site.url, head + b" " * 100_000) for _ in range(2)]
    await until(lambda: site.router.open_requests.bodies_bytes == 200_000)
    last, _ = await posting(site.url, head + b" " * 100_000)
    assert (await last.readline()).startswith(b"HTTP/1.1 429")
    await until(lambda: site.router.open_requests.bodies_bytes == 200_000)
    for _, writer in streams:
        writer.close()
    await until(lambda: site.router.open_requests.bodies_bytes == 0)
    assert (await site.post(prompt="a", max_tokens=1))[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_limit_is_refused(site: Site, chunked: bool) -> None:
    head = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" if chunked else b"Content-Length: %d\r\n\r\n"
    reader, writer = await posting(site.url, head % (HTTP_BODY_BYTES_MAX + 1))
    writer.write(b" " * (HTTP_BODY_BYTES_MAX + 1) if chunked else b"")
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    assert site.router.open_requests.bodies_bytes == 0
    writer.close()


async def test_no_body_is_decompressed(site: Site) -> None:
    bomb = gzip.compress(json.dumps({"prompt": "a" * 100_000}).encode())
    reader, writer = await posting(site.url, b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb))
    writer.write(bomb)
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()


CHAT = {"messages": [{"role": "user", "content": "a"}]}
HALVES = [
    ("/v1/completions", {}, "prompt", "a\ud800"),
    ("/v1/completions", {"prompt": "a"}, "prompt", ["a", "\udfff"]),
    ("/v1/completions", {"prompt": "a"}, "stop", ["\ud800\ud800"]),
    ("/v1/completions", {"prompt": "a"}, "user", "\ud800"),
    ("/v1/completions", {"prompt": "a"}, "model", "\udc00m"),
    ("/v1/completions", {"prompt": "a"}, "cache_salt", "\ud800"),
    ("/v1/completions", {"prompt": "a"}, "logit_bias", {"\ud800": 1}),
    ("/v1/chat/completions", {}, "messages", [{"role": "user", "content": "\ud800"}]),
    ("/v1/chat/completions", {}, "messages", [{"role": "user", "content": "a", "name": "\ud800"}]),
    ("/v1/chat/completions", CHAT, "model", "\ud800"),
    ("/tokenize", {}, "prompt", "\ud800"),
    ("/tokenize", CHAT, "model", "\ud800"),
    ("/detokenize", {"tokens": [1]}, "model", "\ud800"),
]


async def test_half_a_surrogate_pair_is_a_400_that_names_its_field(site: Site) -> None:
    for path, body, field, value in HALVES:
        status, answer, _ = await site.post(path, **body | {field: value})
        assert (status, answer["error"]["param"]) == (400, field), (path, field, answer)
        assert "half of a surrogate pair" in answer["error"]["message"]
    assert not site.decode[0].begun


async def test_an_answer_and_a_listener_end_although_a_forked_child_has_their_descriptors() -> None:
    async with listening() as (listener, connect):
        assert listener.doors is not None
        reader, writer = await connect()
        await until(lambda: len(listener.doors))
        with forked_descriptors():
            writer.write(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            async with asyncio.timeout(10):
                assert (await reader.read()).endswith(b'{"live":true}'), "the answer, and the end"
            await listener.close()
            with pytest.raises(ConnectionRefusedError):
                await connect()
