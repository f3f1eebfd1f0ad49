"""Bodies that are too large to be read on the loop are read in another process, which may fail at it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from pdtransfer.limits import HTTP_BODY_BYTES_MAX, Limits
from pdtransfer.serve.router import body_child
from pdtransfer.serve.router.backends.daemons.backend import Daemons
from pdtransfer.serve.router.backends.daemons.completions import ReadBody, detokenized, read_body, tokenized
from pdtransfer.serve.router.backends.servers.backend import Servers
from pdtransfer.serve.router.backends.servers.dialects import read_for_servers
from pdtransfer.serve.router.backends.servers.server_request import ServerRequest
from pdtransfer.serve.router.front import body_readers
from pdtransfer.serve.router.front.body_readers import BodyReaders, BodyReading, ReadingProcess
from pdtransfer.serve.router.front.json_bodies import Read, RefusedRequestError
from pdtransfer.serve.router.front.text import BytesText
from pdtransfer.wire import unpack_ids
from tests.serve.router.router_site import Site
from tests.support.sglang_servers import FakeSglang
from tests.support.vllm_servers import server_site
from tests.support.waiting import until

COMPLETION, CHAT = (BodyReading(read_body, ReadBody, {"chat": chat}) for chat in (False, True))
TOKENIZE, DETOKENIZE = BodyReading(tokenized, Read, {"served": {"m": 5}}), BodyReading(detokenized, Read, {})
LARGE = b'{"prompt": "' + b"a" * Daemons.inline_bytes_max + b'"}'


def of_size(head: bytes, item: bytes, tail: bytes, size: int = HTTP_BODY_BYTES_MAX) -> bytes:
    """A body of nearly `size` bytes, as many items as fit."""
    return head + item * ((size - len(head) - len(tail)) // len(item)) + tail


GENERATE, RELAYED = (
    BodyReading(read_for_servers, ServerRequest, {"engine": engine, "block_tokens": 64, "path": path})
    for engine, path in (("sglang", "/generate"), ("vllm", "/v1/chat/completions"))
)


def hostile() -> Iterator[tuple[str, BodyReading, bytes, str | None]]:
    """Each is made as it is asked for: together they are too much to be kept."""
    yield "nested prompts", COMPLETION, of_size(b'{"prompt":[', b"[1],", b"[1]]}"), "prompt"
    yield "nested lists of nothing", COMPLETION, of_size(b'{"prompt":[', b"[],", b"[]]}"), "prompt"
    yield "texts", COMPLETION, of_size(b'{"prompt":[', b'"a",', b'"a"]}'), "prompt"
    yield "ids", COMPLETION, of_size(b'{"prompt":[', b"1,", b"1]}"), "prompt"
    yield "deep", COMPLETION, of_size(b'{"prompt":', b"[", b""), None
    yield "deep elsewhere", COMPLETION, of_size(b'{"prompt":"a","x":', b'{"a":', b""), None
    yield "stops", COMPLETION, of_size(b'{"prompt":"a","stop":[', b'"a",', b'"a"]}'), "stop"
    yield "biases", COMPLETION, of_size(b'{"prompt":"a","logit_bias":{', b'"1":0,', b'"1025":"a"}}'), "logit_bias"
    yield "fields", COMPLETION, of_size(b"{", b'"a":1,', b'"b":1}'), "prompt"
    yield "messages", CHAT, of_size(b'{"messages":[', b'{"role":"user","content":""},', b"5]}"), "messages"
    yield "parts", CHAT, of_size(b'{"messages":[{"role":"user","content":[', b"{},", b"{}]}]}"), "messages"
    yield "tokens", DETOKENIZE, of_size(b'{"tokens":[', b"1,", b"1]}"), "tokens"
    yield "a text", TOKENIZE, of_size(b'{"prompt":"', b"a", b'"}'), "prompt"
    yield "sampling", GENERATE, of_size(b'{"sampling_params":[', b"[],", b"[]]}"), "sampling_params"
    yield "fields passed on", RELAYED, b"{%s}" % b",".join(b'"%d":1' % i for i in range(800_000)), None


@asynccontextmanager
async def readers(processes: int = 1) -> AsyncIterator[BodyReaders]:
    made = BodyReaders("reference", BytesText(), processes=processes, inline_bytes_max=Daemons.inline_bytes_max)
    try:
        yield made
    finally:
        await made.close()


def nothing() -> None: ...


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all bodies that this process reads itself."""
    lengths = list[int]()
    read = BodyReading.read

    def noted(self: BodyReading, body: bytes, text: BytesText) -> object:
        lengths.append(len(body))
        return read(self, body, text)

    monkeypatch.setattr(BodyReading, "read", noted)
    return lengths


async def test_no_body_of_any_shape_is_read_on_the_loop_beyond_some_kilobytes(read_here: list[int]) -> None:
    async with readers() as its:
        for name, reading, body, field in hostile():
            assert len(body) > HTTP_BODY_BYTES_MAX * 0.9
            with pytest.raises(RefusedRequestError) as refused:
                await its.read(reading, body, nothing)
            outer = refused.value.param and refused.value.param.partition("[")[0]
            assert (outer, refused.value.status) == (field, 400), (name, refused.value)
        assert not read_here
        await its.read(COMPLETION, b'{"prompt": "a"}', nothing)
        assert read_here == [15]


PROMPTS = [[7] * 2_000, [300] * 5_000, [1 << 31]]
EQUAL = {
    "text": (COMPLETION, {"prompt": "\u017c" * 70_000, "seed": 3, "stop": ["a"], "logit_bias": {"5": 1.5}}),
    "lists": (COMPLETION, {"prompt": PROMPTS, "echo": True, "n": 3, "max_tokens": 3, "stream": True}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "a" * 3_000}] * 20, "logprobs": True, "top_logprobs": 2}),
    "tokenize": (TOKENIZE, {"prompt": "a" * 50_000}),
    "detokenize": (DETOKENIZE, {"tokens": [97] * 50_000}),
    "relayed": (RELAYED, {"messages": [{"role": "user", "content": "a" * 90_000}], "n": 2, "x": [{}]}),
}


async def test_what_another_process_reads_is_what_this_one_reads() -> None:
    async with readers() as its:
        for name, (reading, fields) in EQUAL.items():
            body = json.dumps(fields).encode()
            assert await its.read(reading, body, nothing) == reading.read(body, BytesText()), name


async def test_a_router_takes_bodies_of_the_largest_size(site: Site, read_here: list[int]) -> None:
    tokens = 524_288
    status, answer, _ = await site.post(prompt="ab" * (tokens // 2), max_tokens=2)
    assert (status, answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]) == (200, "ba", tokens)
    status, answer, _ = await site.post(prompt=[[97, 98] * 6_000] * 100, max_tokens=1)
    assert (status, len(answer["choices"])) == (200, 100)
    assert {len(unpack_ids("", each.prompt)) for each in site.decode[0].begun[1:]} == {12_000}
    messages = [{"role": "user", "content": "a" * 60}] * 4_000
    status, answer, _ = await site.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert status == 200
    status, answer, _ = await site.post("/tokenize", prompt="a" * tokens)
    assert (status, answer["count"]) == (200, tokens)
    assert not read_here


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.full)])
async def test_a_relay_passes_on_a_body_of_the_largest_size_as_it_came(engine: str, read_here: list[int]) -> None:
    of = {"of": FakeSglang} if engine == "sglang" else {}
    async with server_site(**of) as it:
        large = of_size(b'"x":[', b'{"a":[[1.10]],"b":"%s"},' % (b"a" * 1_000), b"0]", HTTP_BODY_BYTES_MAX - 100)
        async with it.http.post(it.url + "/v1/completions", data=b'{"prompt":"a",%s}' % large) as response:
            assert response.status == 200
        for each in (it.decode[0], it.prefill[0]):
            assert large in each.seen[-1].raw
        assert not read_here


def frozen(process: ReadingProcess) -> None:
    os.kill(process.pid, signal.SIGSTOP)


async def idle(its: BodyReaders) -> ReadingProcess:
    """One process, once it has started."""
    await its.read(COMPLETION, LARGE, nothing)
    await until(lambda: its.idle)
    return its.idle[-1]


async def test_a_process_that_dies_fails_its_request_alone_and_another_takes_over() -> None:
    async with readers() as its:
        process = await idle(its)
        frozen(process)
        failing = asyncio.create_task(its.read(COMPLETION, LARGE, nothing))
        await until(lambda: its.under_way)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RefusedRequestError, match="the process that read the body has ended") as failed:
            await failing
        assert failed.value.status == 500
        assert (await idle(its)).pid != process.pid


async def test_a_body_that_takes_too_long_is_given_up_and_its_process_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with readers() as its:
        process = await idle(its)
        frozen(process)
        monkeypatch.setattr(body_readers, "READ_S", 0.2)
        with pytest.raises(RefusedRequestError, match="takes longer than 0 s"):
            await its.read(COMPLETION, LARGE, nothing)
        monkeypatch.undo()
        assert (await idle(its)).pid != process.pid


async def test_a_process_that_starts_slowly_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_readers, "START_S", 0.001)
    async with readers() as its:
        with pytest.raises(RefusedRequestError, match="has not started within 0 s") as failed:
            await its.read(COMPLETION, LARGE, nothing)
        assert failed.value.status == 503


async def test_a_turn_that_comes_as_its_request_leaves_is_the_next_ones() -> None:
    errors, loop = list[dict[str, object]](), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    async with readers() as its:
        frozen(process := await idle(its))
        reading = asyncio.create_task(
            its.read(COMPLETION, LARGE, lambda: early.cancel() and loop.call_soon(late.cancel) and None)
        )
        await until(lambda: its.under_way)
        early, late, last = [asyncio.create_task(its.read(COMPLETION, LARGE, nothing)) for _ in range(3)]
        await until(lambda: len(its.waiting) == 3)
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.gather(reading, last)
        assert [each.cancelled() for each in (early, late)] == [True, True]
        assert (await idle(its)).pid == process.pid
    assert not errors


async def test_the_shortest_body_is_read_next_and_who_leaves_gives_its_turn_back() -> None:
    async with readers() as its:
        process, order = await idle(its), list[int]()
        frozen(process)
        bodies = [b'{"prompt": "' + b"a" * size + b'"}' for size in (5_000, 9_000, 7_000, 6_000, 8_000)]
        tasks = [asyncio.create_task(its.read(COMPLETION, body, partial(order.append, len(body)))) for body in bodies]
        await until(lambda: len(its.waiting) == 4)
        tasks[2].cancel()
        await asyncio.wait([tasks[2]])
        assert (order, len(its.waiting)) == ([len(bodies[2])], 3), "it waits for nobody"
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        assert len(order) == 1, "its body is still being read"
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.gather(tasks[1], tasks[3], tasks[4])
        assert order == [len(bodies[each]) for each in (2, 0, 3, 4, 1)]
        assert (await idle(its)).pid == process.pid


async def test_processes_are_bounded_and_end_with_their_router() -> None:
    async with readers(processes=2) as its:
        await asyncio.gather(*(its.read(COMPLETION, LARGE, nothing) for _ in range(6)))
        await until(lambda: len(its.idle) == 2)
        pids = [each.pid for each in its.idle]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.given(limits=Limits(room_deadline_ms=60_000))
async def test_bodies_that_wait_to_be_read_are_bounded_together(site: Site) -> None:
    process = await idle(site.router.readers)
    frozen(process)
    site.router.open_requests.bodies_bytes = 256 << 20
    site.router.open_requests.bodies_bytes -= 300_000
    body = {"prompt": "a" * 200_000, "max_tokens": 1}
    first = asyncio.create_task(site.post(**body))
    await until(lambda: site.router.readers.under_way)
    for path in ("/v1/completions", "/tokenize"):
        status, refused, _ = await site.post(path, **body)
        assert (status, refused["error"]["code"]) == (429, "full")
    first.cancel()
    os.kill(process.pid, signal.SIGCONT)
    await until(lambda: site.router.open_requests.bodies_bytes == (256 << 20) - 300_000)


def test_another_process_knows_each_reading() -> None:
    assert {reading.function for reading, _ in EQUAL.values()} == {*body_child.READINGS.values()}
    assert Servers.inline_bytes_max < 64 << 10
