"""One attempt at a request, and the waits for a server: what the router's own tests do not tell apart."""

from __future__ import annotations

import asyncio
import gc
import gzip
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import pytest
from aiohttp import web

from pdtransfer.errors import Cause
from pdtransfer.limits import Limits
from pdtransfer.serve.router.backends.servers import upstream
from pdtransfer.serve.router.backends.servers.attempt import Attempt, Relay
from pdtransfer.serve.router.backends.servers.dialects import DIALECTS
from pdtransfer.serve.router.backends.servers.server_metrics import ServerMetrics
from pdtransfer.serve.router.backends.servers.server_pool import Server, ServerPool
from pdtransfer.serve.router.backends.servers.upstream import AttemptFailedError, Upstream, end_to_end
from pdtransfer.serve.router.fleet.prefixes import KnownPrefixes
from pdtransfer.serve.router.fleet.roles import Pair
from pdtransfer.serve.router.front.client_request import ClientRequest
from pdtransfer.serve.router.front.status import RouterMetrics
from tests.serve.router.servers.relayed import relayed
from tests.support.vllm_servers import LIMITS, ServerSite, server_site, streamed
from tests.support.waiting import until

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Half = Callable[[], Awaitable[object]]


@dataclass
class Alone:
    """An upstream and one server, whose answer to whatever is asked is a test's."""

    upstream: Upstream
    server: Server
    unreachable: list[str] = field(default_factory=list)

    async def get(self, wait_ms: int = 60_000) -> bytes:
        return (await self.upstream.get(self.server, "/any", {}, wait_ms=wait_ms)).body

    async def failure(self, wait_ms: int = 60_000) -> AttemptFailedError:
        with pytest.raises(AttemptFailedError) as caught:
            await self.get(wait_ms)
        return caught.value


@asynccontextmanager
async def alone(handler: Handler, *, url: str = "", limits: Limits = LIMITS) -> AsyncIterator[Alone]:
    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", handler)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = Server(url or f"http://127.0.0.1:{runner.addresses[0][1]}", "decode", KnownPrefixes(1), why="")
    unreachable: list[str] = []
    made = Upstream(limits, lambda _, why: unreachable.append(why))
    try:
        yield Alone(made, server, unreachable)
    finally:
        await made.close()
        await runner.cleanup()


async def fine(_: web.Request) -> web.Response:
    return web.Response(text="fine")


@pytest.fixture
def lone(marked: Callable[..., AbstractAsyncContextManager[Alone]]) -> AbstractAsyncContextManager[Alone]:
    return marked(alone)


def test_headers_of_one_connection_are_not_passed_on() -> None:
    given = {"Keep-Alive": "timeout=5", "transfer-encoding": "chunked", "DATE": "then", "X-Vllm": "yes"}
    assert end_to_end(given) == {"X-Vllm": "yes"}


async def test_nothing_that_a_server_sets_stays_for_the_next_request() -> None:
    seen: list[web.Request] = []

    async def sets(request: web.Request) -> web.Response:
        seen.append(request)
        return web.Response(headers={"Set-Cookie": "who=a; Path=/"})

    async with alone(sets) as it:
        it.server.url = it.server.url.replace("127.0.0.1", "localhost")  # cookies are kept by name
        for _ in range(2):
            await it.get()
    for each in seen:
        assert "Cookie" not in each.headers
        # Closing its connection is how a request is cancelled, so no other one has it.
        assert each.headers["Connection"] == "close"
        assert each.headers["Accept-Encoding"] == "identity"


async def test_a_body_that_is_compressed_all_the_same_is_passed_on_as_it_is() -> None:
    body = gzip.compress(b"fine")

    async def compressed(_: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    async with alone(compressed) as it:
        assert await it.get() == body


async def test_a_server_that_accepts_no_connection_fails_in_time() -> None:
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # the kernel answers nobody once this many wait
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        async with alone(fine, url=url, limits=replace(LIMITS, silence_ms=100)) as it:
            async with asyncio.timeout(30):
                failed = await it.failure()
            assert (failed.cause, failed.blamed) == (Cause.PEER_LOST, (it.server,))


@pytest.mark.parametrize(("status", "headers"), [(404, {}), (302, {"Location": "/elsewhere"})])
async def test_only_200_is_healthy_and_no_redirection_is_followed(status: int, headers: dict[str, str]) -> None:
    async def answers(request: web.Request) -> web.Response:
        return web.Response() if request.path == "/elsewhere" else web.Response(status=status, headers=headers)

    async with alone(answers) as it:
        assert (await it.upstream.look(it.server, "/health"))[1] == f"/health answers {status}"
        assert (await it.upstream.get(it.server, "/any", {}, wait_ms=60_000)).status == status


@pytest.mark.given(handler=fine)
async def test_once_stopped_nothing_waits_for_a_server(lone: Alone) -> None:
    assert await lone.get() == b"fine"
    lone.upstream.stop()
    failed = await lone.failure()
    assert (failed.cause, failed.blamed, failed.again) == (Cause.SHUTDOWN, (), False)


@pytest.mark.usefixtures("young_heap")
@pytest.mark.given(handler=fine)
async def test_nothing_is_kept_of_a_server_that_nobody_waits_for(lone: Alone) -> None:
    server = Server(lone.server.url, "decode", KnownPrefixes(1), why="")
    await asyncio.gather(*(lone.upstream.get(server, "/any", {}, wait_ms=60_000) for _ in range(2)))
    gone = weakref.ref(server.known)
    del server
    gc.collect()
    assert gone() is None


async def test_a_healthy_server_that_does_not_answer_fails_by_the_deadline() -> None:
    async def silent(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with alone(silent) as it:
        failed = await it.failure(wait_ms=50)
        assert (failed.cause, failed.blamed) == (Cause.DEADLINE, (it.server,))
        assert "no answer in time" in str(failed)
        it.server.why = "down"
        assert (await it.failure(wait_ms=50)).cause is Cause.PEER_LOST


@pytest.mark.given(handler=partial(streamed, pieces=(b"in ", b"parts")))
async def test_an_answer_is_read_whole_up_to_its_limit(lone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "HTTP_BODY_BYTES_MAX", 8)
    assert await lone.get() == b"in parts"
    monkeypatch.setattr(upstream, "HTTP_BODY_BYTES_MAX", 7)
    failed = await lone.failure()
    assert (failed.cause, failed.blamed, failed.again) == (Cause.BREACH, (lone.server,), False)


@pytest.mark.given(handler=fine)
async def test_a_connection_that_breaks_is_the_servers_fault(lone: Alone) -> None:
    with pytest.raises(AttemptFailedError, match="reset") as caught:
        async with lone.upstream.waiting(lone.server):
            raise ConnectionResetError("reset")
    assert (caught.value.cause, caught.value.blamed) == (Cause.PEER_LOST, (lone.server,))
    assert not lone.unreachable  # it may accept the next one


async def test_each_event_is_relayed_when_it_comes(site: ServerSite) -> None:
    steps = asyncio.Semaphore(0)
    site.decode[0].more = SimpleNamespace(wait=steps.acquire)  # type: ignore[assignment]
    async with site.http.post(site.url + "/v1/completions", json={"prompt": "once", "stream": True}) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        for text in ("one ", "two ", "three"):
            assert text.encode() in await response.content.readuntil(b"\n\n")
            steps.release()


@pytest.mark.parametrize(
    "pieces", [[b'data: {"error": {"co', b'de": "5"}}\n\n'], [b": a comment\n\n"], [b"data: 7\n\n"], [b"data: 7"]]
)
async def test_a_stream_that_begins_otherwise_is_relayed(site: ServerSite, pieces: list[bytes]) -> None:
    site.decode[0].reply = lambda request, _: streamed(request, pieces)  # type: ignore[method-assign]
    assert (await site.stream()).encode() == b"".join(pieces)
    assert site.backend.metrics.retries == 0


async def test_an_answer_of_200_is_relayed_whatever_is_in_it(site: ServerSite) -> None:

    async def answers(*_: object) -> web.Response:
        return web.json_response({"error": {"code": 500}})

    site.decode[0].reply = answers  # type: ignore[method-assign]
    assert (await site.post())[:2] == (200, {"error": {"code": 500}})


async def test_a_redirection_is_the_clients_to_follow(site: ServerSite) -> None:
    """Its server is none that this router was given."""
    await site.meet()

    async def redirects(*_: object) -> web.Response:
        return web.Response(status=307, headers={"Location": site.prefill[0].url + "/v1/completions"})

    site.decode[0].reply = redirects  # type: ignore[method-assign]
    body = {"prompt": "once"}
    async with site.http.post(site.url + "/v1/completions", json=body, allow_redirects=False) as response:
        assert response.status == 307
    assert len(site.prefill[0].seen) <= 1, "its own part at most"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.given(prefill=2, decode=2)
async def test_where_decode_fails_its_prefill_is_avoided_as_well(
    site: ServerSite, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Decode may have failed for what prefill wrote."""
    await site.meet()
    for role in (site.prefill, site.decode):
        site.server(role[1]).unfinished += 1
    bad, good = site.decode
    if stream:
        bad.first_error = 500
        assert "three" in await site.stream()
    else:
        bad.status, bad.answer = 500, {"error": {}}
        assert (await site.post())[0] == 200
    assert good.seen[0].kv["remote_engine_id"] == "p1"
    assert f"{bad.url}: answers 500" in caplog.text


@pytest.mark.usefixtures("young_heap")
async def test_a_prefill_whose_request_has_its_answer_is_forgotten_when_it_ends(site: ServerSite) -> None:
    await site.meet()
    site.prefill[0].more.clear()
    before = asyncio.all_tasks()
    assert (await site.post())[0] == 200
    left = [weakref.ref(each) for each in asyncio.all_tasks() - before if "Attempt." in repr(each)]
    assert [each() is not None for each in left] == [True]
    site.prefill[0].more.set()
    await until(lambda: not site.backend.pool.prefill[0].unfinished)
    gc.collect()
    assert [each() for each in left] == [None]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_both_servers_and_is_no_error_of_ours(stream: bool) -> None:
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with server_site() as it:
        await it.meet()
        for each in it.servers:
            each.gate.clear()
        task = asyncio.create_task(it.post(stream=stream))
        await until(lambda: all(each.seen for each in it.servers))
        task.cancel()
        await until(lambda: all(each.seen[0].left for each in it.servers))
        await until(lambda: not any(each.unfinished for each in it.backend.pool.all))
        assert it.router.open_requests.count == 0
    assert not errors


async def test_role_events_beyond_those_of_the_choices_are_passed_on(site: ServerSite) -> None:
    role, more = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', asyncio.Event()

    async def stutters(request: web.Request, _: object) -> web.StreamResponse:
        response = await streamed(request, [role] * 3, pause_s=0)
        await more.wait()
        return response

    site.decode[0].reply = stutters  # type: ignore[method-assign]
    body = {"messages": [], "stream": True, "n": 2}
    async with asyncio.timeout(20), site.http.post(site.url + "/v1/chat/completions", json=body) as response:
        assert await response.content.readexactly(3 * len(role)) == role * 3
        more.set()


@pytest.mark.usefixtures("young_heap")
async def test_closing_leaves_nothing_open() -> None:
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    async def asks() -> None:
        async with alone(fine) as it:
            assert await it.get() == b"fine"

    await asks()
    gc.collect()  # what was not closed reports it
    assert not errors


async def test_a_prefill_that_reports_nothing_of_itself_is_the_process_it_was(site: ServerSite) -> None:
    await site.meet()
    site.prefill[0].connector = False
    site.decode[0].gate.clear()
    task = asyncio.create_task(site.post())
    await until(lambda: site.prefill[0].seen and site.prefill[0].seen[0].answered)
    await asyncio.sleep(0.05)
    site.decode[0].gate.set()
    assert (await task)[0] == 200
    assert site.backend.metrics.retries == 0


@asynccontextmanager
async def halves(prefill: Half, decode: Half) -> AsyncIterator[tuple[Attempt, asyncio.Task[None]]]:
    """An attempt whose two parts are done so; decode's returns the response."""

    class Halves(Attempt):
        async def _post_prefill(self, *_: object) -> object:
            return await prefill()

        async def _post_decode(self, *_: object) -> None:
            self._response = await decode()

    async with alone(fine) as it:
        server = replace(it.server, role="prefill", identity={"remote_engine_id": "p0"})
        pair, request = Pair(server, it.server), relayed({"prompt": "once"})
        client = ClientRequest(node="r", path="/v1/completions", request_id="r")
        pool = ServerPool((), (), LIMITS)
        metrics = ServerMetrics(RouterMetrics(node="r"), pool)
        attempt = Halves(Relay(request, client, pool, it.upstream, DIALECTS["vllm"], metrics), pair)
        yield attempt, asyncio.create_task(attempt.begin())
        assert it.server.unfinished == 0


async def test_an_answer_of_decode_counts_also_where_prefill_fails_with_it() -> None:
    """Both are there in the same turn of the loop."""
    closed = asyncio.Event()

    async def fails() -> None:
        raise AttemptFailedError("late", Cause.PEER_LOST, ())

    async def answers() -> object:
        return SimpleNamespace(close=closed.set)

    async with halves(fails, answers) as (attempt, begun):
        await begun
        assert not closed.is_set()
        attempt.close(complete=True)
        assert closed.is_set()


async def test_an_answer_that_comes_as_the_client_leaves_is_closed() -> None:
    closed, comes = asyncio.Event(), asyncio.Event()

    async def silent() -> None:
        await asyncio.Event().wait()

    async def answers() -> object:
        await asyncio.sleep(0)
        comes.set()
        return SimpleNamespace(close=closed.set)

    async with halves(silent, answers) as (_, begun):
        await comes.wait()
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun
        assert closed.is_set()
