"""Ranks that meet: a rank that dies on the way, or an order to end, is not waited out."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pdtransfer.errors import WorldError
from pdtransfer.threads import apart
from pdtransfer.worker.group.meeting import StoppedError, wait_met
from tests.support.waiting import on_loop


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
