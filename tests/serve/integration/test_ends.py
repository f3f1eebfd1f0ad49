"""How things end: clients that leave, signals, engines that break. What is under way ends well, nothing stays held."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pdtransfer.serve.process.fleet import Daemon
from pdtransfer.serve.settings.router import RouterConfig
from tests.support.engines import plain
from tests.support.fleets import ENGINE, Gates, Site, prompts, running
from tests.support.healing import decode, prefill, right, text_of
from tests.support.processes import deliver
from tests.support.waiting import PATIENCE_S, Running, standing, until


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Iterator[Running[Site]]:
    """Prefill takes a step for every 8 tokens, decode one for each, 5 ms each, and both wait at their gates."""
    engine = {"step_ms": 5, "gates": gates.directory}
    yield from standing(running(tmp_path_factory.mktemp("f"), prefills=[prefill(**engine)], decodes=[decode(**engine)]))


async def served(site: Site) -> None:
    """A request is answered as it should be."""
    assert right("does it work", answer := await site.complete("does it work")), answer


# Clients that leave


async def test_a_client_that_leaves_in_mid_stream_gives_everything_back(slow: Site, gates: Gates) -> None:
    before = await slow.metrics(slow.decode)
    with gates.closed("decode"):
        events = slow.events("leaves soon", max_tokens=400)
        async for _ in events:
            break
        await events.aclose()
        await slow.settled()
    after = await slow.metrics(slow.decode)
    name = "pdtransfer_rooms_ended_total{aborted}"
    assert after[name] == before.get(name, 0) + 1
    await served(slow)


# Signals


@asynccontextmanager
async def under_way(
    site: Site, gates: Gates, max_tokens: int = 60
) -> AsyncIterator[asyncio.Task[list[dict[str, Any]]]]:
    """A stream whose first token has come, and no other comes until the context is left."""
    events = list[dict[str, Any]]()

    async def collect() -> list[dict[str, Any]]:
        async for event in site.events("under way", max_tokens=max_tokens):
            events.append(event)
        return events

    with gates.closed("decode"):
        task = asyncio.ensure_future(collect())
        await until(lambda: events or task.done(), "the first token")
        yield task
    await asyncio.gather(task, return_exceptions=True)


def finished(events: list[dict[str, Any]], max_tokens: int = 60) -> bool:
    """The stream came to its end, with all its tokens."""
    return "pdtransfer" in events[-1] and text_of(events) == plain.text("under way", max_tokens)


async def ended(site: Site, daemon: Daemon) -> int:
    """Its exit status, once it has ended; its log tells of no failure."""
    status = await asyncio.wait_for(daemon.process.wait(), PATIENCE_S)
    assert "Traceback" not in site.log(daemon)
    return status


def last_line(site: Site, daemon: Daemon) -> str:
    """Of its log: what became of the work under way."""
    return site.log(daemon).splitlines()[-1]


@pytest.mark.parametrize(
    ("role", "signals"),
    [
        ("decode", [signal.SIGTERM]),
        ("decode", [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]),
        ("prefill", [signal.SIGINT]),
    ],
    ids=["SIGTERM", "two at once", "SIGINT"],
)
async def test_a_signal_drains_what_is_under_way_ends_and_new_requests_get_503(
    slow: Site, gates: Gates, role: str, signals: list[signal.Signals]
) -> None:
    daemon = slow.fleet.of(role)[0]
    async with under_way(slow, gates) as stream:
        deliver([daemon.process.pid], signal.SIGSTOP)  # it finds them all there at once
        for number in (*signals, signal.SIGCONT):
            daemon.process.send_signal(number)
        await slow.leaves(role)
        refused = await slow.complete("too late")
        assert refused.status == 503
        assert refused.retry_after is not None
        if role == "decode":  # prefill has nothing left to do, and may have ended
            assert (await slow.get(daemon, "/health"))[0] == 503
            assert not stream.done()
    assert finished(await stream)
    assert await ended(slow, daemon) == 0
    late = int(role == "decode")  # prefill had landed before
    assert re.search(rf": stopped rooms=[1-9]\d* drained={late} cut_off=0$", last_line(slow, daemon))
    await slow.restart(daemon)
    await slow.usable()
    await served(slow)
    await slow.settled()


async def test_a_prefill_that_drains_computes_the_prompt_that_it_has(slow: Site, gates: Gates) -> None:
    (text,) = prompts(3, 200)
    daemon = slow.prefill
    with gates.closed("prefill"):
        asked = asyncio.ensure_future(slow.complete(text))
        await slow.until(slow.decode, "pdtransfer_leases")
        daemon.process.terminate()
        await slow.leaves("prefill")
    assert right(text, await asked)
    assert await ended(slow, daemon) == 0
    await slow.restart(daemon)
    await slow.usable()
    await served(slow)


async def test_a_second_signal_a_while_later_means_now(slow: Site, gates: Gates) -> None:
    daemon = slow.decode
    async with under_way(slow, gates) as stream:
        daemon.process.terminate()
        while daemon.process.returncode is None:
            await asyncio.sleep(0.2)
            if daemon.process.returncode is None:
                daemon.process.terminate()
        events = await stream
    assert events[-1]["error"]["code"] == "shutdown"
    assert await ended(slow, daemon) == 0
    assert last_line(slow, daemon).endswith(" drained=0 cut_off=1")
    await slow.restart(daemon)
    await slow.usable()
    await served(slow)
    await slow.settled()


async def test_a_router_drains_as_its_workers_do(slow: Site, gates: Gates) -> None:
    async with slow.beside("router-2") as second:
        router = second.router
        async with under_way(second, gates) as stream:
            router.process.terminate()
            await until(lambda: is_draining(second, router), "it drains")
            refused = await second.complete("too late")
            assert (refused.status, refused.error["code"]) == (503, "shutdown")
            assert not stream.done()
        assert finished(await stream)
        assert await ended(slow, router) == 0
        line = last_line(second, router)
        assert line.endswith(": stopped requests=2 drained=1 cut_off=0"), "the refused one was not under way"
    await served(slow)
    await slow.settled()


async def is_draining(site: Site, router: Daemon) -> bool:
    return bool((await site.health(router))["draining"])


async def test_a_router_that_is_killed_has_its_rooms_stopped(slow: Site, gates: Gates) -> None:
    async with slow.beside("router-3") as second:
        with gates.closed("decode"):
            events = second.events("left alone", max_tokens=400)
            async for _ in events:
                break
            second.router.process.kill()
            await second.router.process.wait()
            await slow.settled()
        with pytest.raises(aiohttp.ClientError):
            async for _ in events:  # what it has sent before it died may lie here
                pass
    await served(slow)


# Engines that break


async def test_an_engine_that_breaks_on_a_request_fails_it_alone(tmp_path: Path) -> None:
    breaks = prefill(model="plain", fault="break") | {"engine": ENGINE}
    babbles = decode(model="plain", fault="babble") | {"engine": ENGINE}
    texts = prompts(4, *[50] * 4)
    async with running(tmp_path, prefills=[breaks], decodes=[babbles]) as site:
        answers = await asyncio.gather(*(site.complete(text) for text in [*texts, "?marked"]))
        assert all(map(right, texts, answers)), answers
        assert answers[-1].status == 500
        assert answers[-1].error["code"] == "engine"
        assert "as the test wants it" in answers[-1].error["message"]
        await site.settled()


async def test_an_engine_that_breaks_down_ends_its_daemon_with_a_traceback_and_status_1(tmp_path: Path) -> None:
    logs = tmp_path
    dies = decode(model="plain", fault="die") | {"engine": ENGINE}
    async with running(logs, ends_as=(1,), prefills=[prefill()], decodes=[dies]) as site:
        answer = await site.complete("?marked")
        assert answer.status in (500, 503)
        assert await asyncio.wait_for(site.decode.process.wait(), PATIENCE_S) == 1
        log = site.log(site.decode)
        assert "as the test wants it" in log
        assert log.count("Traceback") == 1
        site.decode.log.write_text("")  # it was expected
        assert (await site.complete("nobody there")).status == 503
        await site.settled()


async def test_the_fleets_processes_inherit_no_descriptors_of_ours(slow: Site) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    daemon = await Daemon.start(
        RouterConfig(listen="127.0.0.1:0", node="router-4", json=True), slow.logs / "router-4.log"
    )
    try:
        await daemon.wait_ready()
        os.close(writing)
        assert os.read(reading, 1) == b""  # the other end is nowhere else
    finally:
        os.close(reading)
        assert await daemon.stop() == 0
