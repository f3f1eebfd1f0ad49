"""Ranks that meet: a rank that dies on the way, or an order to end, is not waited out."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdtransfer.errors import WorldError
from pdtransfer.serve.worker.group import meeting
from pdtransfer.serve.worker.group.meeting import StoppedError, after_leader, wait_met
from pdtransfer.threads import apart
from tests.support.paths import REPO
from tests.support.waiting import PATIENCE_S, on_loop


class Meeting:
    """A rendezvous that waits for a rank which never comes, until it is released."""

    def __init__(self) -> None:
        self.stop, self.lost, self.over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.released = threading.Event()
        self.error: Exception | None = None
        self.met = apart(self._meet)

    def _meet(self) -> None:
        self.released.wait()
        if self.error is not None:
            raise self.error

    async def ends(self) -> None:
        await wait_met(self.met, stop=self.stop, lost=self.lost, over=self.over, why=lambda: "rank tp1 has ended")


@on_loop
async def test_a_rank_that_dies_while_they_meet_ends_the_meeting() -> None:
    meeting = Meeting()
    meeting.lost.set()
    with pytest.raises(WorldError, match="the ranks do not find each other: rank tp1 has ended"):
        await meeting.ends()
    meeting.released.set()


@pytest.mark.parametrize("asked", ["stop", "over"])
@on_loop
async def test_who_is_asked_to_end_ends_while_they_meet(asked: str) -> None:
    meeting = Meeting()
    getattr(meeting, asked).set()
    with pytest.raises(StoppedError):
        await meeting.ends()
    meeting.released.set()


@on_loop
async def test_ranks_that_have_met_go_on_and_a_failed_meeting_has_its_reason() -> None:
    meeting, failed = Meeting(), Meeting()
    meeting.released.set()
    await meeting.ends()
    failed.error = RuntimeError("timed out after 60 s\nframes")
    failed.released.set()
    with pytest.raises(WorldError, match=r"do not find each other: timed out after 60 s$"):
        await failed.ends()


@pytest.mark.parametrize(("word", "found"), [(b"\n", ValueError), (b"", StoppedError)])
@on_loop
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


@on_loop
async def test_a_rank_that_others_have_started_reports_its_error_at_once() -> None:
    with pytest.raises(ValueError, match="too few"):
        async with after_leader():
            raise ValueError("slots: too few")


def test_ranks_of_one_host_make_their_engines_at_the_same_time_and_report_what_all_find_once(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="ranks meet by torch")
    ran = subprocess.run(
        [
            sys.executable, "-m", "pdtransfer", "decode", "--tp-size=2", "--bind=tcp://127.0.0.1:0", "--http=",
            "--engine=tests.support.engines.met:create", f"--engine-option=at={tmp_path}",
        ],
        cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True, timeout=6 * PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr.count("both ranks were here") == 1, ran.stderr
