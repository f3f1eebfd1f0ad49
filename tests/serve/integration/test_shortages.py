"""What a host may run out of, and what a client may do: descriptors, disk, the right time, a reader that keeps up."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from pdtransfer.serve.process.fleet import Daemon
from tests.support.engines import plain
from tests.support.fleets import Site, prompts, running
from tests.support.healing import QUICK, Rest, decode, healed, met, prefill, right, text_of
from tests.support.loads import killed
from tests.support.paths import REPO
from tests.support.waiting import Running, standing, until

DAY_S = 86_400
FOUNDING = 10  # descriptors that a daemon opens first, for its loop, and keeps


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Site]]:
    each = {"prefills": [prefill(row_bytes=8)], "decodes": [decode(slots=8_192, row_bytes=8)]}
    yield from standing(running(tmp_path_factory.mktemp("f"), ends_as=(-signal.SIGKILL,), **each))


async def all_served(site: Site, seed: int) -> None:
    texts = prompts(seed, *[40] * 8)
    answers = await asyncio.gather(*(site.complete(text) for text in texts))
    assert all(map(right, texts, answers)), answers


async def served_on_retry(site: Site) -> bool:
    """Whether a request is served; if not, the answer has when to try again."""
    answer = await site.complete("once more")
    if answer.status == 503:
        assert answer.retry_after, answer
        return False
    assert right("once more", answer), answer
    return True


# Descriptors


@contextmanager
def without_descriptors(daemon: Daemon) -> Iterator[None]:
    """The daemon can open nothing more, for so long, whatever else it closes: the numbers it may use are all taken."""
    pid = daemon.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert set(map(str, range(FOUNDING))) <= set(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (FOUNDING, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


async def test_a_router_without_descriptors_finishes_what_it_has_and_serves_again_with_them(
    site: Site, before: Rest
) -> None:
    events = site.events("under way", max_tokens=3_000)
    first = await anext(events)
    with without_descriptors(site.router):
        for _ in range(3):
            with pytest.raises((aiohttp.ClientError, TimeoutError)):
                async with asyncio.timeout(0.5):  # nobody can take the connection: it is closed, or waits
                    await site.complete("comes too late")
        assert text_of([first, *[event async for event in events]]) == plain.text("under way", 3_000)
    await healed(site, before)


@pytest.mark.parametrize("starved", ["prefill", "decode"])
async def test_a_worker_without_descriptors_fails_requests_clearly_and_comes_back_with_them(
    site: Site, before: Rest, starved: str
) -> None:
    other = site.fleet.of("decode" if starved == "prefill" else "prefill")[0]
    with without_descriptors(site.fleet.of(starved)[0]):
        await all_served(site, seed=1)  # what is connected goes on
        await killed(other)  # and what has to be connected anew cannot be
        await site.restart(other)
        answers = await asyncio.gather(*(site.complete(text) for text in prompts(2, 20, 20, 20)))
        assert {answer.status for answer in answers} == {503}, answers
        assert {answer.error["code"] for answer in answers} <= {"peer_lost", "peer_restarted"}, answers
    await until(lambda: served_on_retry(site), "the two workers find each other")
    await healed(site, before)


# Disk


@pytest.mark.full
async def test_daemons_whose_logs_go_to_a_full_disk_serve_and_drain(tmp_path: Path) -> None:
    logs = tmp_path
    # Before there are daemons that open them: what they say is lost, on standard error and in their log files.
    for name in ("prefill-0", "decode-1", "router"):
        (logs / f"{name}.log").symlink_to("/dev/full")
    full = {"log_file": Path("/dev/full"), "log_level": "debug"}
    async with running(
        logs, prefills=[prefill() | full], decodes=[decode() | full], router={"limits": QUICK, **full}
    ) as site:
        before = await met(site)
        await all_served(site, seed=3)
        for daemon in site.fleet.daemons:
            async with site.http.post(f"http://{daemon.ready['http']}/none") as response:
                assert response.status in (404, 405)
        await healed(site, before)


# Time


@pytest.fixture(scope="module")
def stepped_clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Processes started while this is in force read a wall clock that is ahead by the seconds in this file."""
    directory = tmp_path_factory.mktemp("clock")
    library, step = directory / "stepped_clock.so", directory / "step"
    source = REPO / "tests" / "support" / "stepped_clock.c"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    step.write_bytes(struct.pack("q", 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("CLOCK_STEP", str(step))
        yield step


@pytest.mark.full
async def test_a_wall_clock_that_steps_changes_nothing(stepped_clock: Path, tmp_path: Path) -> None:
    slow = {"step_ms": 5}
    async with running(tmp_path, prefills=[prefill(**slow)], decodes=[decode(**slow)]) as site:
        before = await met(site)
        for number, days in enumerate((1, -1, 400, 0)):
            asked = prompts(number, *[60] * 6)
            under_way = [asyncio.ensure_future(site.complete(text, max_tokens=60)) for text in asked]
            events = site.events("stream", max_tokens=60)
            first = await anext(events)
            with stepped_clock.open("r+b") as at:
                at.write(struct.pack("q", days * DAY_S))
            assert text_of([first, *[event async for event in events]]) == plain.text("stream", 60)
            answers = await asyncio.gather(*under_way)
            assert all(right(text, answer, 60) for text, answer in zip(asked, answers, strict=True)), answers
            created = (await site.complete("when")).body["created"]
            assert abs(created - time.time() - days * DAY_S) < 60  # so it was stepped
            await healed(site, before)
        lost = [await site.metrics(daemon) for daemon in (site.prefill, site.decode)]
        ended = {name for each in lost for name in each if name.startswith("pdtransfer_rooms_ended_total{")}
        assert ended == {"pdtransfer_rooms_ended_total{done}", "pdtransfer_rooms_ended_total{length}"}


# Readers


async def test_a_client_that_does_not_read_its_stream_holds_up_nobody_and_misses_nothing(
    site: Site, before: Rest
) -> None:
    tokens = 6_000  # some 500 KB of events: more than what lies between the router and a client
    generated = (await site.metrics(site.router))["pdtransfer_generated_tokens_total"]
    answered = (await site.metrics(site.router))["pdtransfer_requests_total"]
    reader, writer = await lazy(site)
    body = json.dumps(site._body("slow", {"stream": True, "max_tokens": tokens})).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await site.until(site.router, "pdtransfer_generated_tokens_total", lambda count: count >= generated + tokens)
    await all_served(site, seed=4)
    # All of the others; what the slow one has not read may lie here, or in the kernel's buffers as a whole.
    assert (await site.metrics(site.router))["pdtransfer_requests_total"] >= answered + 8
    lines = (await reader.read()).split(b"data: ")[1:-1]
    writer.close()
    events = [json.loads(line[: line.rindex(b"}") + 1]) for line in lines]
    assert text_of(events) == plain.text("slow", tokens)
    await healed(site, before)


async def lazy(site: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the router that holds little of what was not read."""
    host, _, port = site.router.ready["http"].rpartition(":")
    made = socket.socket()
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    await asyncio.get_running_loop().sock_connect(made, (host, int(port)))
    return await asyncio.open_connection(sock=made, limit=1_024)
