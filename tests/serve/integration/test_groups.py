"""Workers that are several processes: the same answers as one, and a worker that ends as one when a rank does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdtransfer.serve.process.fleet import Daemon
from tests.support.fleets import ENGINE, Gates, Site, equal, followers, free_address, generated, prompts, running
from tests.support.paths import REPO
from tests.support.processes import mapped_files
from tests.support.waiting import PATIENCE_S, Running, standing, until

OPTIONS = ("layers=2", "kv_heads=1")
GQA = {"engine_option": OPTIONS}
SLOW = {"engine": ENGINE, "engine_option": (*OPTIONS, "step_ms=40")}


def gated(gates: Gates) -> dict[str, Any]:
    """A prefill whose ranks wait at a gate."""
    return SLOW | {"chunk_tokens": 16, "tp_size": 2, "engine_option": (*OPTIONS, f"gates={gates.directory}")}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Iterator[Running[Site]]:
    """Two stages of two ranks, and two ranks of 40 ms a step, that all share one key-value head."""
    yield from standing(
        running(
            tmp_path_factory.mktemp("g"),
            ends_as=(1, -signal.SIGKILL),
            prefills=[gated(gates) | {"pp_size": 2}],
            decodes=[SLOW | {"tp_size": 2}],
        )
    )


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_prompts_through_ranks_are_answered_as_by_one_process_and_no_rank_loads_torch(group: Site) -> None:
    texts = prompts(3, 1, 40, 150, 90)
    answers = await asyncio.gather(*(group.complete(text) for text in texts))
    for text, answer in zip(texts, answers, strict=True):
        assert equal(answer, generated(text, options=OPTIONS)), answer
    await group.settled()
    for daemon in (group.prefill, group.decode):
        for pid in (daemon.process.pid, *followers(daemon)):
            assert "numpy" in mapped_files(pid)
            assert "libtorch" not in mapped_files(pid)


async def test_a_client_that_leaves_is_forgotten_by_every_rank(group: Site, gates: Gates) -> None:
    (long, short) = prompts(4, 300, 20)
    with gates.closed("prefill"):
        asked = asyncio.ensure_future(group.complete(long))
        await group.until(group.decode, "pdtransfer_leases")
        asked.cancel()
    events = group.events(short, max_tokens=200)
    async for _ in events:
        break
    await events.aclose()
    await group.settled()
    answer = await group.complete(short)
    assert equal(answer, generated(short, options=OPTIONS)), answer


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Iterator[Running[Site]]:
    """Two ranks before one that is alone."""
    yield from standing(running(tmp_path_factory.mktemp("t"), ends_as=(1,), prefills=[gated(gates)], decodes=[GQA]))


@pytest.fixture
def either(request: pytest.FixtureRequest) -> Running[Site]:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    ("either", "role"), [("two", "prefill"), ("group", "decode")], ids=["prefill", "decode"], indirect=["either"]
)
async def test_a_killed_rank_ends_its_worker_and_what_it_was_doing_with_its_name(
    either: Site, gates: Gates, role: str
) -> None:
    daemon = either.prefill if role == "prefill" else either.decode
    (text,) = prompts(5, 300)
    with gates.closed("prefill"):
        asked = asyncio.ensure_future(either.complete(text, max_tokens=200))
        await either.until(daemon, "pdtransfer_rooms")
        (pid,) = followers(daemon)
        os.kill(pid, signal.SIGKILL)
    answer = await asyncio.wait_for(asked, PATIENCE_S)
    assert answer.status == 500, answer
    assert f"rank tp1 ({role}-0-tp1) of this worker" in answer.error["message"], answer
    again = await ended_with_1(either, daemon)
    answer = await either.complete(text)
    assert equal(answer, generated(text, options=OPTIONS)), answer
    assert len(followers(again)) == 1


async def ended_with_1(site: Site, daemon: Daemon) -> Daemon:
    """It ends by itself; another one takes its place."""
    assert await asyncio.wait_for(daemon.process.wait(), PATIENCE_S) == 1
    again = await site.restart(daemon)
    await site.usable()
    return again


@pytest.mark.full
@pytest.mark.slow
async def test_a_frozen_rank_ends_its_worker_as_a_dead_one_does(group: Site) -> None:
    events = group.events("goes on for long", max_tokens=1_000)
    async for _ in events:
        break
    daemon, (pid,) = group.decode, followers(group.decode)
    os.kill(pid, signal.SIGSTOP)
    last = [event async for event in events][-1]
    assert "rank tp1 (decode-0-tp1) of this worker is lost: it has been silent" in last["error"]["message"], last
    await ended_with_1(group, daemon)
    assert not alive(pid), "its leader does not leave it behind"


@pytest.mark.full
async def test_a_worker_whose_leader_is_killed_leaves_no_rank_behind(group: Site) -> None:
    daemon = group.decode
    pids = followers(daemon)
    assert len(pids) == 1
    daemon.process.kill()
    await daemon.process.wait()

    async def gone() -> bool:
        return not any(map(alive, pids))

    await until(gone)
    await group.restart(daemon)
    await group.usable()


async def test_a_rank_that_is_asked_to_end_takes_its_worker_through_a_drain(two: Site, gates: Gates) -> None:
    (text,) = prompts(6, 200)
    with gates.closed("prefill"):
        asked = asyncio.ensure_future(two.complete(text))
        await two.until(two.prefill, "pdtransfer_rooms")
        (pid,) = followers(two.prefill)
        os.kill(pid, signal.SIGTERM)
        await two.leaves("prefill")
    answer = await asyncio.wait_for(asked, PATIENCE_S)
    assert equal(answer, generated(text, options=OPTIONS)), "what was under way has its end"
    assert await asyncio.wait_for(two.prefill.process.wait(), PATIENCE_S) == 0
    log = two.log(two.prefill).splitlines()
    assert any(line.endswith(": stopped") for line in log), "the rank that was asked"
    assert any(line.endswith(" drained=1 cut_off=0") for line in log), "its leader, which has the rooms"
    await two.restart(two.prefill)
    await two.usable()


def start(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pdtransfer", *flags], cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_ranks_that_are_started_one_by_one_find_each_other_and_report_where_they_differ() -> None:
    flags = ("--engine-option", "layers=2", "--bind", "tcp://127.0.0.1:0", "--listen", "", "--json", "--slots", "256")
    place = free_address()
    ranks = ("prefill", "--tp-size", "2", "--group", place, *flags)
    follower = start(*ranks, "--tp-rank", "1", "--page-size", "32")
    leader = start(*ranks)
    other = None
    try:
        _, output = follower.communicate(timeout=3 * PATIENCE_S)
        assert follower.returncode == 2
        assert "the leader refuses this rank: page_size: '32' on rank tp1, '64' on its leader" in output
        other = start(*ranks, "--tp-rank", "1")
        assert leader.stdout is not None
        ready = json.loads(leader.stdout.readline())
        assert ready["ranks"][0]["node"] == ready["node"]
        leader.send_signal(signal.SIGTERM)
        leader.communicate(timeout=PATIENCE_S)
        other.communicate(timeout=PATIENCE_S)
        assert (leader.returncode, other.returncode) == (0, 0)
    finally:
        for each in filter(None, (leader, follower, other)):
            each.kill()
            each.communicate()


def test_what_is_wrong_with_one_rank_alone_is_reported_by_it() -> None:
    flags = ("--engine", ENGINE, "--engine-option", "fault=rank", "--bind", "tcp://127.0.0.1:0", "--listen", "")
    worker = start("prefill", "--tp-size", "2", *flags)
    _, output = worker.communicate(timeout=3 * PATIENCE_S)
    assert worker.returncode == 1
    assert "as the test wants it" in output


@pytest.mark.full
async def test_an_idle_group_costs_next_to_nothing(group: Site) -> None:
    await group.settled()
    pids = [group.prefill.process.pid, *followers(group.prefill), group.decode.process.pid, *followers(group.decode)]

    def ticks() -> int:
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats)

    async def idle() -> bool:
        before, since = ticks(), time.monotonic()
        await asyncio.sleep(1)
        return (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - since) / len(pids) < 0.05

    await until(idle, "a rank that polls would use a tenth of a core, always")
