"""A router whose loop comes too late to everything refuses what is new, and serves what it has accepted."""

from __future__ import annotations

import asyncio
import json
import re
import time
from types import SimpleNamespace

import pytest

from pdtransfer.bus import Bus
from pdtransfer.limits import Limits
from pdtransfer.serve.router.front import loop_delay
from pdtransfer.serve.router.front.loop_delay import LATE_S, LATE_TURNS, LOOK_S, LoopDelay
from tests.serve.router.router_site import site
from tests.support.waiting import until


class Clock:
    """In the place of a loop, with one timer."""

    def __init__(self) -> None:
        self.now, self._fire = 0.0, (lambda: None)

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call, *args) -> SimpleNamespace:
        self.due, self._fire = self.now + seconds, lambda: call(*args)
        return SimpleNamespace(cancel=lambda: setattr(self, "due", None))

    def turn(self, late: float) -> None:
        self.now = self.due + late
        self._fire()


def test_a_router_is_overloaded_after_late_turns_in_a_row_until_one_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, delay = Clock(), LoopDelay()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    delay.start()
    assert clock.due == LOOK_S
    states: list[bool] = []
    with caplog.at_level("INFO"):
        for late in (*[LATE_S] * (LATE_TURNS - 1), LATE_S / 2, *[LATE_S] * (LATE_TURNS + 1), 0.0):
            clock.turn(late)
            assert delay.seconds == pytest.approx(late)
            states.append(delay.overloaded)
    assert states == [False] * (2 * LATE_TURNS - 1) + [True, True, False]
    ends = [(record.levelname, record.message.rpartition(" requests ")[2]) for record in caplog.records]
    assert ends == [("WARNING", "are refused"), ("INFO", "are accepted again")]
    delay.stop()
    assert clock.due is None


async def test_an_overloaded_router_refuses_what_is_new_and_ends_what_it_has_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_delay, "LOOK_S", 0.02)
    monkeypatch.setattr(loop_delay, "LATE_S", 0.2)

    async def turn() -> None:
        time.sleep(loop_delay.LATE_S + 2 * loop_delay.LOOK_S)  # noqa: ASYNC251 - the loop has this much to do
        await asyncio.sleep(0)

    async with site() as served:
        decode = served.decode[0]
        decode.more.clear()
        accepted = asyncio.create_task(served.post(prompt="abcdef", max_tokens=6))
        await until(lambda: bool(decode.begun))
        while not served.router.delay.overloaded:
            await turn()
        refused = asyncio.create_task(served.post(prompt="abcdef", max_tokens=6))
        looks = [asyncio.create_task(served.get(path)) for path in ("/health", "/status", "/metrics")]
        while not all(task.done() for task in (refused, *looks)):
            await turn()
        status, answer, headers = refused.result()
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "full", "1")
        assert "the router is overloaded: its loop is 0." in answer["error"]["message"]
        health, page, metrics = (task.result()[1] for task in looks)
        assert json.loads(health)["overloaded"] is True
        assert json.loads(page)["router"]["overloaded"] is True
        (line,) = re.findall(r"^pdtransfer_loop_delay_seconds (.*)$", metrics, re.MULTILINE)
        assert float(line) >= loop_delay.LATE_S
        assert len(decode.begun) == 1, "it was refused before it started"
        await until(lambda: not served.router.delay.overloaded)
        decode.more.set()
        assert (await served.post(prompt="abcdef", max_tokens=3))[0] == 200
        status, answer, _ = await accepted
        assert (status, answer["usage"]["completion_tokens"]) == (200, 6)


async def test_a_router_that_is_behind_with_a_workers_messages_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(resend_ms=50, resend_ms_max=200, ping_ms=50, slow_ms=100, silence_ms=300)
    behind = set[str]()
    monkeypatch.setattr(Bus, "behind", lambda _, peer: peer in behind)
    async with site(limits=limits) as served:
        workers = served.backend.routing.workers.by_peer
        behind.update(peer for peer, worker in workers.items() if worker.role == "decode")
        for worker in (*served.prefill, *served.decode):
            monkeypatch.setattr(worker.bus, "send", lambda *_: True)
        await until(lambda: {peer for peer, worker in workers.items() if worker.connected} == behind)
        await asyncio.sleep(2 * limits.silence_ms / 1e3)
        assert {peer for peer, worker in workers.items() if worker.connected} == behind
        behind.clear()
        await until(lambda: not any(worker.connected for worker in workers.values()))
