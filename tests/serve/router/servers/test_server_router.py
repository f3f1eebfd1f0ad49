"""The router in front of HTTP servers, with servers that behave like vLLM's and compute nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from dataclasses import replace

import aiohttp
import pytest

from pdtransfer.errors import Cause
from pdtransfer.serve.router.backends.servers import upstream
from pdtransfer.serve.router.backends.servers.attempt import HELD_BYTES_MAX
from pdtransfer.serve.router.fleet.roles import Departure
from pdtransfer.serve.router.process import router_of
from pdtransfer.serve.settings.router import RouterConfig
from tests.support.sglang_servers import FakeSglang
from tests.support.vllm_servers import LIMITS, PIECES, FakeVllm, ServerSite, server_site, streamed, texts
from tests.support.waiting import until

WHOLE = "".join(PIECES)


async def test_the_first_request_learns_prefills_identity_and_the_next_asks_both_at_once(site: ServerSite) -> None:
    (prefill,), (decode,) = site.prefill, site.decode
    prefill.gate.clear()
    first = asyncio.create_task(site.post())
    await until(lambda: prefill.seen)
    await asyncio.sleep(0.05)
    assert not decode.seen  # nothing is known yet of where prefill's KV is
    prefill.gate.set()
    assert (await first)[0] == 200
    prefill.gate.clear()
    second = asyncio.create_task(site.post())
    await until(lambda: len(prefill.seen) == len(decode.seen) == 2)
    assert not second.done()
    prefill.gate.set()
    assert (await second)[:2] == (200, {"id": "cmpl-1", "choices": [{"text": WHOLE}], "server": "d0"})
    for each in (0, 1):
        assert prefill.seen[each].kv["transfer_id"] == decode.seen[each].kv["transfer_id"]
    assert len({each.kv["transfer_id"] for each in decode.seen}) == 2


async def test_each_side_gets_the_whole_body_with_its_own_part(site: ServerSite) -> None:
    await site.meet()
    own = {
        "n": 3, "logprobs": 5, "tools": [{"type": "function", "function": {"name": "f"}}], "min_tokens": 4,
        "response_format": {"type": "json_object"}, "seed": 123456789012345678901234567890, "temperature": 1.10,
        "stream_options": {"include_usage": True}, "max_completion_tokens": 7,
        "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "another's"},
    }  # fmt: skip
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    given = {"X-Request-Id": "mine-1", "traceparent": trace, "tracestate": "a=b", "Authorization": "Bearer k"}
    status, _, headers = await site.post(headers=given | {"Cookie": "a=b", "X-Data-Parallel-Rank": "3"}, **own)
    assert (status, headers["X-Request-Id"], headers["X-Vllm"]) == (200, "mine-1", "yes")
    (prefill,), (decode,) = site.prefill[0].seen, site.decode[0].seen
    for each in (prefill, decode):
        assert {name: each.headers.get(name) for name in given} == given
        assert each.headers["Content-Type"] == "application/json"
        assert "Cookie" not in each.headers
        assert "X-Data-Parallel-Rank" not in each.headers
    transfer = decode.kv["transfer_id"]
    whole = {"model": "m", "prompt": "once", "max_tokens": 9, **own}
    assert decode.body == whole | {
        "kv_transfer_params": {
            "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer, "transfer_mode": "push",
            "remote_engine_id": "p0", "remote_host": "127.0.0.1", "remote_port": 7000, "tp_size": 2,
            "remote_request_id": "mine-1",
        },
    }  # fmt: skip
    assert b'"temperature":1.1,' in decode.raw.replace(b" ", b"")  # as the client's library wrote it
    del whole["min_tokens"], whole["stream_options"]
    assert prefill.body == whole | {
        "max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer},
    }  # fmt: skip


@pytest.mark.given(prefill=0)
async def test_a_look_up_needs_no_prefill_server_and_counts_as_no_request(site: ServerSite) -> None:
    for _ in range(2):
        async with site.http.get(site.url + "/v1/models", headers={"Authorization": "me"}) as response:
            listed = {"object": "list", "data": [{"id": "d0"}], "for": "me"}
            assert (response.status, await response.json()) == (200, listed)
    assert site.server(site.decode[0]).sent == 0
    site.decode[0].healthy = False
    await until(lambda: not site.server(site.decode[0]).usable)
    async with site.http.get(site.url + "/v1/models") as response:
        assert (response.status, "Retry-After" in response.headers) == (503, True)
        assert "no decode server is healthy: " in (await response.json())["error"]["message"]


@pytest.mark.parametrize("step", ["look", "left"])
async def test_a_server_is_asked_for_its_health_again_after_an_error_of_ours(
    site: ServerSite, step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = site.server(site.decode[0])

    def breaks(*_: object) -> bool:
        raise ValueError("a bug")

    monkeypatch.setattr(site.backend.upstream if step == "look" else site.backend.pool, step, breaks)
    await until(lambda: "ValueError: a bug" in server.why)
    assert "Traceback" in caplog.text
    monkeypatch.undo()
    await until(lambda: server.usable)


async def test_servers_without_a_connector_answer_all_the_same(site: ServerSite) -> None:
    site.prefill[0].connector = False
    for _ in range(2):
        assert (await site.post(kv_transfer_params={"transfer_id": "another's"}))[0] == 200
    assert [each.kv for each in site.decode[0].seen] == [{}, {}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.given(prefill=2, decode=2)
async def test_a_servers_refusal_is_the_answer(site: ServerSite, side: str, stream: bool) -> None:
    await site.meet()
    refusal = {"error": {"message": "max_tokens is too large", "code": 400}}
    for each in site.prefill if side == "prefill" else site.decode:
        each.status, each.answer = 400, refusal
    others = site.decode if side == "prefill" else site.prefill
    for each in others:
        each.gate.clear()
    status, answer, headers = await site.post(stream=stream)
    assert (status, answer, headers["Content-Type"]) == (400, refusal, "application/json; charset=utf-8")
    for each in (site.prefill, site.decode):
        assert sum(len(fake.seen) for fake in each) <= 1  # no other server is asked the same
    assert all(each.identity for each in site.backend.pool.prefill)  # the next request waits for nobody
    await until(lambda: all(each.left for other in others for each in other.seen))


@pytest.mark.parametrize("how", ["400", "500", "its client leaves", "refuses"])
async def test_a_prefill_that_has_answered_is_notified_where_decode_does_not_take_its_kv(
    site: ServerSite, how: str
) -> None:
    """Its request is over for its HTTP server: closing the connection would be no word to anybody."""
    await site.meet()
    prefill, decode = site.prefill[0], site.decode[0]
    decode.gate.clear()
    if how == "refuses":
        await site.leaves_unnoticed(decode)
    elif how in {"400", "500"}:
        decode.status, decode.answer = int(how), {"error": {"message": "no", "code": int(how)}}
    task = asyncio.create_task(site.post())
    if how != "refuses":
        await until(lambda: prefill.seen and prefill.seen[0].answered and decode.seen)
    if how == "its client leaves":
        task.cancel()
    else:
        decode.gate.set()
    await until(lambda: prefill.given_up)
    # Where decode refuses the connection, the request may be given up before it is sent to prefill.
    assert prefill.given_up == [seen.kv["transfer_id"] for seen in prefill.seen] or (
        how == "refuses" and not prefill.seen
    )
    if how != "its client leaves":
        assert (await task)[0] in (400, 500, 503)


async def test_without_a_prefill_server_decode_serves_if_it_may_and_the_router_reports_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    async def shown(it: ServerSite) -> tuple[int, bool, str]:
        status, health = await it.get("/health")
        metrics = (await it.get("/metrics"))[1].splitlines()
        (line,) = [each for each in metrics if each.startswith("pdtransfer_without_prefill ")]
        return status, json.loads(health)["without_prefill"], line[-3:]

    async with server_site(without_prefill="serve") as it:
        await it.meet()
        assert await shown(it) == (200, False, "0.0")
        it.prefill[0].healthy = False
        await until(lambda: it.backend.pool.serves_alone)
        assert await shown(it) == (200, True, "1.0")
        status, answer, _ = await it.post()
        assert (status, answer["server"]) == (200, "d0")
        assert texts(await it.stream()) == PIECES
        assert not it.prefill[0].seen
        assert all("kv_transfer_params" not in each.body for each in it.decode[0].seen)
        assert (it.ended[-1].prefill, it.ended[-1].decode) == ("", it.decode[0].url)
        assert it.ended[-1].tokens is None, "the server's answer passes through unread"
        assert it.backend.metrics.requests_without_prefill == 2
        it.prefill[0].healthy = True
        await until(lambda: not it.backend.pool.serves_alone)
        assert (await it.post())[0] == 200
        assert it.prefill[0].seen
    lines = [each.getMessage() for each in caplog.records]
    assert "no prefill server is healthy: decode computes the prompts (without_prefill: serve)" in lines
    assert "decode serves without prefill no more" in lines

    async with server_site() as it:  # by default it refuses
        it.prefill[0].healthy = False
        await until(lambda: not it.backend.pool.usable)
        assert not it.backend.pool.serves_alone
        assert (await it.post())[0] == 503


async def test_what_decode_has_taken_is_not_given_up(site: ServerSite) -> None:
    await site.meet()
    assert (await site.post())[0] == 200
    site.decode[0].more.clear()
    async with site.http.post(site.url + "/v1/completions", json={"prompt": "once", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        await until(lambda: len(site.prefill[0].seen) > 1 and site.prefill[0].seen[1].answered)
        await until(lambda: not site.backend.pool.prefill[0].unfinished)
        response.close()
    await until(lambda: site.decode[0].seen[1].left)
    await site.backend.upstream.close()
    assert site.prefill[0].given_up == []


async def test_a_client_that_leaves_within_a_stream_cancels_a_prefill_that_has_not_answered(site: ServerSite) -> None:
    await site.meet()
    site.prefill[0].more.clear()
    site.decode[0].more.clear()
    async with site.http.post(site.url + "/v1/completions", json={"prompt": "once", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        await until(lambda: all(each.seen for each in site.servers))
        response.close()
    await until(lambda: all(each.seen[0].left for each in site.servers))


async def test_a_prefill_that_answers_after_decode_is_left_to_it(site: ServerSite) -> None:
    await site.meet()
    site.prefill[0].more.clear()
    assert texts(await site.stream()) == PIECES
    assert (await site.post())[0] == 200
    site.prefill[0].more.set()
    await until(lambda: all(each.answered for each in site.prefill[0].seen))
    assert not any(each.left for each in site.prefill[0].seen)
    await until(lambda: not site.backend.pool.prefill[0].unfinished)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["refuses", "500", "503", "429", "dies", "late"])
async def test_a_prefill_that_fails_is_replaced_before_decode_has_answered(how: str, stream: bool) -> None:
    limits = replace(LIMITS, room_deadline_ms=1_000) if how == "late" else LIMITS
    async with server_site(prefill=2, limits=limits) as it:
        await it.meet()
        bad, good = it.prefill
        it.server(good).unfinished += 1  # so that the bad one is asked first
        if how == "refuses":
            await it.leaves_unnoticed(bad)
        elif how == "dies":
            bad.dies = "early"
        elif how == "late":
            bad.gate.clear()
        else:
            bad.status, bad.answer = int(how), {"error": {}}
        if stream:
            assert texts(await it.stream()) == PIECES
        else:
            assert (await it.post())[:2] == (200, {"id": "cmpl-1", "choices": [{"text": WHOLE}], "server": "d0"})
        # A decode whose prefill fails at once may never see the first attempt.
        *first, second = it.decode[0].seen
        assert len(first) == 1 if how == "late" else len(first) <= 1
        assert second.kv["remote_engine_id"] == "p1"
        assert second.kv["transfer_id"] == good.seen[0].kv["transfer_id"]
        for each in first:
            assert each.kv["remote_engine_id"] == "p0"
            assert each.kv["transfer_id"] != second.kv["transfer_id"]
            assert each.headers["X-Request-Id"] == second.headers["X-Request-Id"]
            await until(lambda each=each: each.left)  # it no longer waits for what does not come
        assert it.backend.metrics.retries == 1
        assert it.server(bad).identity is None
        assert it.server(bad).usable == (how != "refuses")  # which is as good as a /health that fails


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["refuses", "500", "429", "dies", "first event"])
@pytest.mark.given(decode=2)
async def test_a_decode_that_fails_is_replaced_before_its_first_byte(site: ServerSite, how: str, stream: bool) -> None:
    await site.meet()
    bad, good = site.decode
    site.server(good).unfinished += 1
    if how == "refuses":
        await site.leaves_unnoticed(bad)
    elif how == "dies":
        bad.dies = "early"
    elif how in {"500", "429"}:
        bad.status, bad.answer = int(how), {"error": {}}
    elif stream:
        bad.first_error = 500
    else:
        return
    if stream:
        assert texts(await site.stream()) == PIECES
    else:
        assert (await site.post())[1]["server"] == "d1"
    transfers = [each.kv["transfer_id"] for each in site.prefill[0].seen]
    assert len(set(transfers)) == len(transfers) <= 2  # prefill may not have seen what was cancelled at once
    assert good.seen[0].kv["transfer_id"] == transfers[-1]
    assert site.backend.metrics.retries == 1


@pytest.mark.parametrize("port", ["7000", None, 0, 2**64, [], {"x": 1}])
@pytest.mark.given(prefill=2)
async def test_what_a_prefill_server_returns_of_itself_is_checked_before_decode_gets_it(
    site: ServerSite, port: object, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = site.prefill
    bad.port = port
    site.server(good).unfinished += 1
    status, answer, _ = await site.post()
    assert status == 200, answer
    as_no_field = port is None
    assert [each.kv["remote_engine_id"] for each in site.decode[0].seen] == ["p0" if as_no_field else "p1"]
    assert as_no_field or site.backend.metrics.retries == 1
    assert as_no_field or "its answer: kv_transfer_params.remote_port: " in caplog.text


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_failure_that_no_other_server_mends_is_passed_on(site: ServerSite, side: str) -> None:
    await site.meet()
    bad = site.prefill[0] if side == "prefill" else site.decode[0]
    bad.status, bad.answer = 503, {"error": {"message": "overloaded"}}
    status, answer, headers = await site.post()
    assert (status, answer, headers["Retry-After"]) == (503, bad.answer, "7")
    assert len(bad.seen) == 1
    bad.status, bad.dies = 200, "early"
    status, answer, headers = await site.post()
    assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "peer_lost", "2")
    assert bad.url in answer["error"]["message"]


@pytest.mark.given(prefill=5, decode=5)
async def test_a_request_that_breaks_servers_meets_a_bounded_number_of_them(site: ServerSite) -> None:
    await site.meet()
    for each in site.decode:
        each.status, each.answer = 500, {"error": {}}
    assert (await site.post())[0] == 500
    assert sum(len(each.seen) for each in site.decode) == 3
    record, last = site.ended[-1], [each for each in site.decode if each.seen][-1]
    assert (record.status, record.cause) == (500, Cause.ENGINE)
    assert record.detail == f"{last.url}: answers 500"


async def test_an_error_that_a_stream_begins_with_becomes_its_status(site: ServerSite) -> None:
    site.decode[0].first_error = 400
    status, answer, headers = await site.post(stream=True)
    assert (status, answer["error"]["message"], headers["Content-Type"]) == (400, "KV is lost", "application/json")


async def test_a_prefill_that_is_another_process_is_met_again(site: ServerSite) -> None:
    await site.meet()
    site.prefill[0].engine = "p0-new"
    site.prefill[0].gate.clear()
    task = asyncio.create_task(site.post())
    await until(lambda: site.decode[0].seen)
    site.prefill[0].gate.set()
    status, answer, _ = await task
    assert (status, answer["server"]) == (200, "d0")
    assert [each.kv["remote_engine_id"] for each in site.decode[0].seen] == ["p0", "p0-new"]
    assert site.decode[0].seen[0].left


@pytest.mark.given(decode=2)
async def test_a_stream_that_a_server_cuts_ends_with_an_error_event_and_without_done(site: ServerSite) -> None:
    for each in site.decode:
        each.dies = "late"
    stream = await site.stream()
    first, last, rest = stream.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == PIECES[0]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "peer_lost"
    assert rest == ""
    assert sum(len(each.seen) for each in site.decode) == 1  # what has begun is not begun again
    assert "pdtransfer_answers_cut_total 1.0" in (await site.get("/metrics"))[1]
    (record,) = site.ended
    assert (record.state, record.cause) == ("failed", Cause.PEER_LOST)
    assert record.detail.startswith(f"cut off: {site.decode[0].url}: ")


@pytest.mark.parametrize("text", [b"", b"x" * HELD_BYTES_MAX], ids=["short", "long"])
@pytest.mark.given(decode=2)
async def test_a_whole_answer_that_a_server_cuts_is_not_passed_off_as_whole(site: ServerSite, text: bytes) -> None:
    """Of a short one the client has nothing yet."""
    bad, good = site.decode
    site.server(good).unfinished += 1

    async def half(request, seen):
        headers = {"Content-Type": "application/json", "Content-Length": "99999"}
        response = aiohttp.web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(b'{"choices": "' + text)
        await asyncio.sleep(0.05)
        request.transport.abort()
        return response

    bad.reply = half
    if text:
        with pytest.raises(aiohttp.ClientError):
            await site.post()
    else:
        assert (await site.post())[1]["server"] == "d1"


@pytest.mark.given(decode=2)
async def test_unhealthy_servers_are_left_out_until_they_are_healthy_again(site: ServerSite) -> None:
    site.decode[0].healthy = False
    await until(lambda: not site.server(site.decode[0]).usable)
    for _ in range(3):
        assert (await site.post())[1]["server"] == "d1"
    await site.decode[1].close()
    await until(lambda: not site.server(site.decode[1]).usable)
    status, answer, headers = await site.post()
    assert (status, headers["Retry-After"]) == (503, "2")
    assert "no decode server is healthy" in answer["error"]["message"]
    assert "/health answers 503" in answer["error"]["message"]
    assert f"{site.decode[1].url}: cannot connect: Connection refused" in answer["error"]["message"]
    status, text = await site.get("/health")
    assert (status, json.loads(text)["ready"]) == (503, False)
    site.decode[0].healthy = True
    await site.decode[1].come_back()
    await until(lambda: all(each.usable for each in site.backend.pool.all))
    assert [each["usable"] for each in json.loads((await site.get("/health"))[1])["servers"]] == [True, True, True]
    assert (await site.post())[0] == 200


@pytest.mark.given(limits=replace(LIMITS, ping_ms=20, silence_ms=100, room_deadline_ms=300))
async def test_requests_of_a_server_that_stays_silent_fail(site: ServerSite) -> None:
    decode = site.decode[0]
    decode.gate.clear()
    whole = asyncio.create_task(site.post())
    await until(lambda: decode.seen)
    await asyncio.sleep(0.5)
    assert not whole.done()  # a whole answer may take long, as long as its server is healthy
    decode.mute = True
    status, answer, _ = await whole
    assert (status, answer["error"]["code"]) == (503, "peer_lost")
    assert "has not answered within 100 ms" in answer["error"]["message"]


@pytest.mark.given(decode=2, limits=replace(LIMITS, silence_ms=300, room_deadline_ms=3_600_000))
async def test_requests_of_a_server_that_listens_no_more_are_tried_again_long_before_the_deadline(
    site: ServerSite,
) -> None:
    bad, good = site.decode
    site.server(good).unfinished += 1
    bad.gate.clear()
    whole = asyncio.create_task(site.post())
    await until(lambda: bad.seen)
    await bad.stop_listening()
    status, answer, _ = await whole
    assert (status, answer["server"]) == (200, "d1")


@pytest.mark.given(limits=replace(LIMITS, silence_ms=1_000, room_deadline_ms=3_600_000))
async def test_a_stream_of_a_server_that_listens_no_more_goes_on_to_its_end(site: ServerSite) -> None:
    piece = b'data: {"choices":[{"text":"a"}]}\n\n'
    site.decode[0].reply = lambda request, _: streamed(request, [piece] * 20, pause_s=0.1)  # type: ignore[method-assign]
    body = {"prompt": "a", "stream": True}
    async with site.http.post(site.url + "/v1/completions", json=body) as response:
        assert await response.content.readexactly(len(piece)) == piece
        await site.decode[0].stop_listening()
        assert await response.read() == piece * 19


BAD = [
    (b"{", 400, "not JSON"),
    (b"[]", 400, "object"),
    (b"", 400, "not JSON"),
    (b'{"prompt": "\xff"}', 400, "not JSON"),
    (b'{"\xff": 1}', 400, "not JSON"),
    (b'{"prompt": ' + b"[" * 100_000, 400, "nested"),
    (b'{"prompt": 1 2}', 400, "not JSON"),
]


@pytest.mark.parametrize(("body", "status", "words"), BAD)
async def test_a_body_that_is_no_object_is_refused_here(site: ServerSite, body: bytes, status: int, words: str) -> None:
    async with site.http.post(site.url + "/v1/completions", data=body) as response:
        assert response.status == status
        assert words in (await response.json())["error"]["message"]
        assert not any(each.seen for each in site.servers)


@pytest.mark.parametrize(("of", "path"), [(FakeVllm, "/v1/chat/completions"), (FakeSglang, "/generate")])
async def test_other_paths_are_404_and_the_answer_names_the_engines_own(of: type[FakeVllm], path: str) -> None:
    async with server_site(of=of) as it, it.http.post(it.url + "/v1/embeddings", json={}) as response:
        assert response.status == 404
        assert path in (await response.json())["error"]["message"]


@pytest.mark.slow
async def test_a_client_that_does_not_read_stops_its_server_from_sending(site: ServerSite) -> None:
    decode = site.decode[0]
    decode.pieces = ["x" * 1_000] * 200_000
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect(("127.0.0.1", int(site.url.rpartition(":")[2])))
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: decode.sent)
    before = -1
    while before < decode.sent:
        before = decode.sent
        await asyncio.sleep(0.3)
    assert decode.sent < 40 << 20  # what sockets hold, of 200 MB
    assert (await site.post(prompt="b", stream=False))[0] == 200
    client.close()
    await until(lambda: decode.seen[0].left)


@pytest.mark.parametrize("begun", [True, False])
async def test_closing_ends_requests_with_an_error_and_cancels_their_servers(site: ServerSite, begun: bool) -> None:
    await site.meet()
    (site.decode[0].more if begun else site.decode[0].gate).clear()
    request = site.http.post(site.url + "/v1/completions", json={"prompt": "once", "stream": True})
    task = asyncio.create_task(request.__aenter__())
    await until(lambda: site.decode[0].seen)
    text = await (await task).content.readuntil(b"\n\n") if begun else b""
    await site.router.close()
    async with await task as response:
        text = (await response.content.read()).decode().removeprefix("data: ")
        assert response.status == (200 if begun else 503)
    answer = json.loads(text)["error"]
    assert (answer["message"], answer["code"]) == ("the router shuts down", "shutdown")
    await until(lambda: site.decode[0].seen[0].left)


async def test_a_prefill_whose_answer_is_huge_is_not_read_to_its_end(
    site: ServerSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "HTTP_BODY_BYTES_MAX", 10_000)
    site.prefill[0].pieces = ["x" * 20_000]
    status, answer, _ = await site.post()
    assert (status, answer["error"]["code"]) == (502, "breach")
    assert "larger than 10000 bytes" in answer["error"]["message"]
    site.prefill[0].pieces, site.decode[0].pieces = ["x"], ["x" * 20_000]
    assert (await site.post())[0] == 200  # decode's is passed on, not kept


async def test_metrics_count_answers_by_status_and_name_servers(site: ServerSite) -> None:
    await site.post()
    await site.stream()
    await site.http.post(site.url + "/v1/completions", data=b"{")
    _, text = await site.get("/metrics")
    assert 'pdtransfer_requests_total{model="",status="200"} 2.0' in text
    assert 'pdtransfer_requests_total{model="",status="400"} 1.0' in text
    assert 'pdtransfer_first_token_seconds_count{model=""} 1.0' in text
    assert f'pdtransfer_server_usable{{role="prefill",url="{site.prefill[0].url}"}} 1.0' in text


@pytest.mark.slow
async def test_the_command_serves_and_drains_on_sigterm(site: ServerSite) -> None:
    site.decode[0].more.clear()
    urls = f"--prefill={site.prefill[0].url}", f"--decode={site.decode[0].url}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdtransfer", "router", "--engine=vllm", "--listen=127.0.0.1:0", "--json", *urls,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    ready = json.loads(await process.stdout.readline())
    assert (ready["ready"], ready["role"]) == (True, "router")
    site.url = f"http://{ready['http']}"

    async def healthy() -> bool:
        return (await site.get("/health"))[0] == 200

    await until(healthy)
    stream = asyncio.create_task(site.stream())
    await until(lambda: site.decode[0].sent)
    process.terminate()
    await until(lambda: refuses(site))
    site.decode[0].more.set()
    assert texts(await stream) == PIECES
    assert await process.wait() == 0


async def refuses(it: ServerSite) -> bool:
    return (await it.post())[0] == 503


async def test_a_request_is_recorded_with_its_servers_status_and_first_byte(site: ServerSite) -> None:
    await site.meet()
    site.ended.clear()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await site.post(headers={"X-Request-Id": "mine-1", "traceparent": trace})
    await site.stream()
    await until(lambda: len(site.ended) == 2)
    whole, stream = site.ended
    assert (whole.request_id, str(whole.trace), whole.status, whole.stream) == ("mine-1", trace, 200, False)
    assert (whole.prefill, whole.decode, whole.state) == (site.prefill[0].url, site.decode[0].url, "finished")
    assert (whole.first_token_s, whole.scope) == (None, "request")
    assert (stream.trace, stream.stream, len(stream.request_id)) == (None, True, 32)
    assert site.decode[0].seen[1].headers["X-Request-Id"] == stream.request_id
    assert stream.first_token_s is not None
    assert stream.first_token_s <= stream.total_s


async def test_the_next_turn_of_a_chat_is_decodes_and_the_first_one_prefills(site: ServerSite) -> None:
    await site.meet()
    (prefill,), (decode,) = site.prefill, site.decode
    messages = [{"role": "user", "content": "a question " * 50}]
    for turn in range(4):
        assert (await site.post("/v1/chat/completions", messages=messages))[0] == 200
        assert len(prefill.seen) == 1, "what decode has generated is computed nowhere again"
        assert (decode.seen[turn].kv == {}) is (turn > 0)
        messages += [{"role": "assistant", "content": "an answer " * 20}, {"role": "user", "content": "and then?"}]
    assert (site.backend.metrics.requests_kept, site.backend.metrics.requests_without_prefill) == (3, 0)
    messages[0]["content"] = "another question " * 50
    assert (await site.post("/v1/chat/completions", messages=messages))[0] == 200
    assert len(prefill.seen) == 2, "it is another chat"
    assert {each.path for each in (*prefill.seen, *decode.seen)} == {"/v1/chat/completions"}


@pytest.mark.given(limits=replace(LIMITS, turn_tokens_max=300))
async def test_decode_computes_turns_up_to_its_first_tokens_and_others_are_prefills_meanwhile(site: ServerSite) -> None:
    await site.meet()
    (decode,) = site.decode
    assert (await site.post(prompt="a" * 1_000))[0] == 200
    decode.gate.clear()
    prompt = "a" * 1_000 + "b" * 1_000  # 16 blocks, of which the last does not count
    first, second = (asyncio.create_task(site.post(prompt=prompt)) for _ in range(2))
    await until(lambda: len(decode.seen) == 3)
    assert sorted(each.kv == {} for each in decode.seen[1:]) == [False, True]
    decode.gate.set()
    assert {(await first)[0], (await second)[0]} == {200}
    assert site.server(decode).computing == 0


@pytest.mark.given(decode=2)
async def test_where_a_turn_fails_on_its_decode_another_pair_answers_it(site: ServerSite) -> None:
    await site.meet()
    site.server(site.decode[1]).unfinished += 2
    prompt = "a" * 1_000
    assert (await site.post(prompt=prompt))[0] == 200
    site.decode[0].dies = "early"
    assert (await site.post(prompt=prompt + "b"))[1]["server"] == "d1"
    assert [each.kv != {} for each in site.decode[1].seen] == [True]
    assert site.server(site.decode[0]).computing == 0


@pytest.mark.given(decode=0)
async def test_one_server_may_have_both_roles(site: ServerSite) -> None:
    (only,) = site.prefill
    config = RouterConfig(engine="vllm", listen="127.0.0.1:0", prefill=(only.url,), decode=(only.url,), limits=LIMITS)
    router = router_of(config)
    url = "http://" + await router.open()
    try:
        await until(lambda: router.backend.usable())
        async with site.http.post(url + "/v1/completions", json={"prompt": "once"}) as response:
            assert response.status == 200
        assert [each.kv for each in only.seen] == [{}]
        assert [(each.role, each.address) for each in router.backend.workers_status()] == [
            ("prefill", only.url), ("decode", only.url)
        ]  # fmt: skip
        router.backend.depart_worker(only.url, Departure.LEAVES)
        await until(lambda: not router.backend.workers_status())
    finally:
        await router.close()
