"""Ranks that meet: a rank that dies on the way, or an order to end, is not waited out."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from pdtransfer.errors import WorldError
from pdtransfer.serve.engine_api import EngineDescription
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.serve.worker.group import meeting
from pdtransfer.serve.worker.group.leader import GroupLeader
from pdtransfer.serve.worker.group.meeting import StoppedError, after_leader, connected
from pdtransfer.wire import Ranks
from tests.support.paths import REPO
from tests.support.waiting import PATIENCE_S

# Ranks may differ in these: addresses, keys and logs of a process; where and how its own memory lies; what the leader
# alone decides. A new setting has to be on this list or in `common`.
RANKS_OWN = {
    *("node", "key", "allow", "insecure", "log_level", "log_format", "log_file", "timeline", "otlp", "allowed_hosts"),
    *("json", "limits", "bind", "advertise", "transport", "transport_ports", "transport_protocol", "firewall"),
    *("firewall_admit", "http", "engine", "host_layout", "device", "tp_size", "tp_rank", "pp_size", "pp_rank", "group"),
    *("listen", "copy_threads", "huge_pages", "host_buffer_gib", "socket_directory", "retract_policy"),
}
DESCRIPTION = EngineDescription(model="m", weights=bytes(32), components=(), memory_bytes=0)


@pytest.mark.parametrize("role", [PrefillConfig, DecodeConfig])
def test_each_setting_is_the_same_on_all_ranks_or_known_to_be_a_ranks_own(
    role: type[PrefillConfig | DecodeConfig],
) -> None:
    names = {field.name for field in fields(role)}
    assert names == (names & RANKS_OWN) ^ (names & set(meeting.common(role(), DESCRIPTION)))


async def never() -> None:
    await asyncio.Event().wait()


async def test_a_rank_that_dies_while_they_meet_ends_the_meeting() -> None:
    group = GroupLeader(Ranks(0, 2))
    group.fail("rank tp1 has ended")
    with pytest.raises(WorldError, match="the ranks cannot connect to each other: rank tp1 has ended"):
        await connected(never(), group, asyncio.Event())


async def test_who_is_asked_to_end_ends_while_they_meet() -> None:
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(StoppedError):
        await connected(never(), GroupLeader(Ranks(0, 2)), asyncio.Event(), stop)


async def test_ranks_that_have_met_go_on_and_a_failed_meeting_has_its_reason() -> None:
    async def fails() -> None:
        raise WorldError("rank tp1 did not connect within 60 s")

    await connected(asyncio.sleep(0), GroupLeader(Ranks(0, 2)), asyncio.Event())
    with pytest.raises(WorldError, match="cannot connect to each other: rank tp1 did not connect within 60 s"):
        await connected(fails(), GroupLeader(Ranks(0, 2)), asyncio.Event())


@pytest.mark.parametrize(("word", "found"), [(b"\n", ValueError), (b"", StoppedError)])
async def test_a_rank_reports_its_error_once_its_leader_has_found_none(
    word: bytes, found: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr("sys.stdin", os.fdopen(reading))
    monkeypatch.setattr(meeting, "led", lambda: True)

    async def fails() -> None:
        async with after_leader():
            raise ValueError("slots: too few")

    failing = asyncio.ensure_future(fails())
    await asyncio.sleep(0.05)
    assert not failing.done(), "the leader has said nothing"
    os.write(writing, word)
    os.close(writing)
    with pytest.raises(found):
        await failing


async def test_a_rank_that_others_have_started_reports_its_error_at_once() -> None:
    with pytest.raises(ValueError, match="too few"):
        async with after_leader():
            raise ValueError("slots: too few")


def test_ranks_of_one_host_make_their_engines_at_the_same_time_and_report_what_all_find_once(tmp_path: Path) -> None:
    ran = subprocess.run(
        [
            sys.executable, "-m", "pdtransfer", "decode", "--tp-size=2", "--bind=tcp://127.0.0.1:0", "--listen=",
            "--engine=tests.support.engines.met:create", f"--engine-option=at={tmp_path}",
        ],
        cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True, timeout=6 * PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr.count("both ranks were here") == 1, ran.stderr
