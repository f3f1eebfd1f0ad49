"""A router over HTTP, with workers made of Service on a real bus that compute nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pdtransfer.bus import Bus
from pdtransfer.client.core_driver import EffectRunner, LoopClock, Ticker
from pdtransfer.handoff.peers import Send
from pdtransfer.limits import Limits
from pdtransfer.serve.router.backends.daemons.backend import Daemons
from pdtransfer.serve.router.backends.daemons.completions import Completion, completion_of, read_body
from pdtransfer.serve.router.front.router import Router
from pdtransfer.serve.router.front.text import BytesText
from pdtransfer.serve.router.process import router_of
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.tracing.ended_request import EndedRequest, EndedRequests
from pdtransfer.serve.worker.service import Service, StartRoom, StopRoom
from pdtransfer.wire import Begin, End, Load, Logprobs, unpack_ids
from tests.support.routing_world import identity
from tests.support.vllm_servers import ServerSite
from tests.support.waiting import until

LIMITS = Limits(resend_ms=50, resend_ms_max=200, ping_ms=100, silence_ms=10_000, room_deadline_ms=60_000)
TIMES = {"queue_us": 1_000, "compute_us": 2_000, "transfer_us": 3_000}, {"queue_us": 9, "admission_us": 4_000}
LOAD = Load(True, False, 0, 0, 10_000, 10_000)


def parse(body: bytes, *, seed: int, chat: bool = False) -> Completion:
    """The rooms of a body, whatever models are served."""
    text = BytesText()
    return completion_of(read_body(body, chat=chat, text=text), seed=seed, text=text, served={})


def generated(begin: Begin) -> list[int]:
    """The prompt backwards, again and again."""
    ids, before = unpack_ids("prompt", begin.prompt).tolist(), begin.sampling.generated
    prompt = ids[: len(ids) - before][::-1]
    return [prompt[place % len(prompt)] for place in range(before, before + begin.sampling.max_tokens)]


def scored(begin: Begin, ids: list[int]) -> bytes:
    """Logprobs for these ids, as many as the request asks for: each id is half as likely as all others together."""
    top = tuple((index, -1.0 - index) for index in range(begin.sampling.top_logprobs))
    return b"".join(Logprobs(-0.5, top).pack() for _ in ids) if begin.sampling.logprobs else b""


class Worker:
    """A daemon whose engine gives the prompt back. `gate` holds its rooms, `more` what follows the first piece of
    each, and `failure` ends them."""

    def __init__(self, node: str, role: str, *, model: str = "m", context_tokens: int = 0) -> None:
        self.node, self.role, self.model, self.clock = node, role, model, b"c"
        self.gate, self.more, self.failure, self.piece = asyncio.Event(), asyncio.Event(), "", 3
        self.gate.set()
        self.more.set()
        self.begun: list[Begin] = []
        self.stopped: list[StopRoom] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop, self._clock = asyncio.get_running_loop(), LoopClock.among_peers(LIMITS.ping_ms)
        who = identity(node, role, 7, model=model, context_tokens=context_tokens)
        self.service = Service(who, LIMITS)
        self.bus = Bus(node=node, keys=None, allowed=None, receive=self._receive, refused=lambda *_: None)
        self.perform = EffectRunner(self._perform, Ticker(self.service.next_tick, self._tick, self._clock))

    async def open(self) -> str:
        self.load(LOAD)
        return await self.bus.bind("tcp://127.0.0.1:0")

    def load(self, load: Load) -> None:
        self.perform(self.service.load(load, self._clock.now()))

    async def close(self) -> None:
        self.perform.ticker.stop()
        for task in self._tasks.values():
            task.cancel()
        await self.bus.close()

    def _receive(self, peer: str, message) -> None:
        self.perform(self.service.receive(peer, message, self._clock.now()))

    def _tick(self) -> None:
        self.perform(self.service.tick(self._clock.now()))

    def _perform(self, effect) -> None:
        match effect:
            case Send(peer, message):
                self.bus.send(peer, message)
            case StartRoom(_, begin):
                self.begun.append(begin)
                self._tasks[begin.room] = self._loop.create_task(self._work(begin))
            case StopRoom(room):
                self.stopped.append(effect)
                self._tasks.pop(room).cancel()
                self.end(End(room, "aborted", "", 0))

    def end(self, end: End) -> None:
        self.perform(self.service.end(end, self._clock.now()))

    async def _work(self, begin: Begin) -> None:
        room = begin.room
        if self.role == "prefill":
            await self.gate.wait()
            reason, stamp = self.failure or "done", {"stamp_ns": 1_000, "clock": self.clock}
            self.end(End(room, reason, "as told", 0, retry_ms=2_500, kv_bytes=640, copy_us=12, **stamp, **TIMES[0]))
            return
        ids = generated(begin)
        for place in range(0, len(ids), self.piece):
            await (self.more if place else self.gate).wait()
            some = ids[place : place + self.piece]
            self.perform(self.service.tokens(room, some, self._clock.now(), logprobs=scored(begin, some)))
            await asyncio.sleep(0)
            if self.failure:
                self.end(End(room, self.failure, "as told", 0))
                return
        digests = {"tokens_digest": b"\x01", "logits_digest": b"\x02", "kv_digest": b"\x03"}
        self.end(
            End(room, "length", "", 0, kv_bytes=640, stamp_ns=43_500, prefix=2, clock=self.clock, **digests, **TIMES[1])
        )


@dataclass
class Site:
    """One router with its workers, and a client."""

    router: Router
    backend: Daemons
    prefill: list[Worker]
    decode: list[Worker]
    http: aiohttp.ClientSession
    url: str
    ended: list[EndedRequest] = field(default_factory=list[EndedRequest])  # records, as they came

    @property
    def at_decode(self) -> int:
        """How many rooms its first decode worker has begun."""
        return len(self.decode[0].begun)

    async def post(self, path: str = "/v1/completions", /, **body) -> tuple[int, dict, Mapping[str, str]]:
        """Returns status, JSON and headers."""
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json(), response.headers

    get = ServerSite.get


@asynccontextmanager
async def site(
    *, prefill: int = 1, decode: int = 1, limits: Limits = LIMITS, context_tokens: int = 0, **more: Any
) -> AsyncIterator[Site]:
    """`more` are settings of the router."""
    workers = [Worker(f"p{i}", "prefill", context_tokens=context_tokens) for i in range(prefill)]
    workers += [Worker(f"d{i}", "decode", context_tokens=context_tokens) for i in range(decode)]
    endpoints = [await worker.open() for worker in workers]
    ended, records = EndedRequests(), list[EndedRequest]()
    ended.subscribe(records.append)
    router = router_of(
        RouterConfig(
            listen="127.0.0.1:0", prefill=(*endpoints[:prefill],), decode=(*endpoints[prefill:],), limits=limits, **more
        ),
        ended=ended,
    )
    backend = router.backend
    assert isinstance(backend, Daemons)
    url = "http://" + await router.open()
    async with aiohttp.ClientSession() as http:
        try:
            await until(lambda: sum(each.usable for each in backend.routing.workers.by_peer.values()) == len(workers))
            yield Site(router, backend, workers[:prefill], workers[prefill:], http, url, records)
        finally:
            await router.close()
            for worker in workers:
                await worker.close()
