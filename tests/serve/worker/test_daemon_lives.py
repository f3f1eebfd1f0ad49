"""Daemons from their start to their end, on the loop of the test: what their starter, /health and a router get."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from dataclasses import replace as altered
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import aiohttp
import pytest
from msgspec.structs import replace

from pdtransfer.errors import ConfigError, WorldError
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.serve.tracing.ended_request import EndedRequests
from pdtransfer.serve.tracing.timeline import Journeys
from pdtransfer.serve.worker import daemon
from pdtransfer.wire import Begin, Cancel, End, Ended, Goodbye, Hello, Load, Sampling, pack_ids
from tests.serve.worker.daemon_pair import OPTIONS
from tests.support.bus_peers import ANY_PORT, Context, Raw
from tests.support.bus_peers import context as context  # noqa: PLC0414
from tests.support.fleets import free_address
from tests.support.routing_world import identity
from tests.support.waiting import until

BEGIN = Begin(1, pack_ids([97]), Sampling(1), ("tcp://127.0.0.1:9",), 30_000)  # no prefill answers


class Started:
    """A daemon with events in place of its signals. `over` is its status."""

    def __init__(self, patch: pytest.MonkeyPatch, config: DecodeConfig | PrefillConfig) -> None:
        self.asked, self.hurried, self.close = asyncio.Event(), asyncio.Event(), lambda: None

        async def served() -> int:
            patch.setattr(daemon, "StopSignal", lambda *_: self)
            return await daemon._served(config, Journeys(), EndedRequests())

        self.over = asyncio.create_task(served())


def router_of(context: Context, endpoint: str) -> Raw:
    """It has begun a room."""
    router = Raw(context, endpoint)
    router.send(Hello(1, 1, identity("r", "router", 1)), BEGIN)
    return router


async def health_of(http: str) -> Any:
    """Status and document; None where nothing listens."""
    with suppress(aiohttp.ClientConnectorError):
        async with aiohttp.ClientSession() as session, session.get(f"http://{http}/health") as response:
            return response.status, await response.json()
    return None


def engines() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


@pytest.fixture
def config(directory: Path) -> DecodeConfig:
    options: dict[str, Any] = OPTIONS | {"listen": free_address(), "bind": ANY_PORT, "json": True}
    return DecodeConfig(**options, node="d", huge_pages="never", socket_directory=directory)


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    lines = list[dict[str, Any]]()
    monkeypatch.setattr(daemon, "print", lambda line, **_: lines.append(json.loads(line)), raising=False)
    return lines


@pytest.mark.parametrize("way", ["cancelled", "hurried"])
async def test_a_daemon_that_is_asked_to_end_refuses_what_is_new_and_ends_with_what_is_under_way(
    way: str, config: DecodeConfig, context: Context, monkeypatch: pytest.MonkeyPatch, ready: list[Any]
) -> None:
    table = MagicMock(report={"state": "on"}, close=AsyncMock())
    guard = (None, "no nft") if way == "hurried" else (table, "")
    monkeypatch.setattr(daemon, "native", lambda: SimpleNamespace(used=False, text="no native copy"))
    monkeypatch.setattr(daemon, "firewall_for", AsyncMock(return_value=guard))
    monkeypatch.setattr(daemon, "needs_no_guard", lambda *_, **__: False)
    before, started = engines(), Started(monkeypatch, config)
    (line,) = await until(lambda: ready)
    own = {"node": "d", "endpoint": line["endpoint"], "http": config.listen}
    assert line == {"ready": True, "role": "decode", **own, "ranks": [own]}
    router = router_of(context, line["endpoint"])
    await router.got(Load, rooms_running=1)
    health = await health_of(config.listen)
    assert health[1].pop("identity")["model"] == "stamp-mla"
    firewall = {"state": "off", "why": "no nft"} if way == "hurried" else {"state": "on"}
    detail = {"role": "decode", "node": "d", "draining": False, "rooms": 1, "slots_free": 1_024}
    assert health == (200, {"ready": True, **detail, "slow": ["no native copy"], "firewall": firewall})
    started.asked.set()
    await router.got(Load, draining=True)
    router.send(replace(BEGIN, room=2))
    await router.got(End, room=2, reason="shutdown", detail="d is draining")
    assert (await health_of(config.listen))[0] == 503
    if way == "cancelled":
        router.send(Cancel(1, "aborted"))
        await router.got(End, room=1, reason="aborted")
        assert not started.over.done()
        router.send(Ended(1))
    else:
        started.hurried.set()
        await router.got(End, room=1, reason="shutdown", detail="a second signal ended it at once")
    await router.got(Goodbye, reason="shutdown")
    assert (await started.over, engines()) == (0, before)
    assert table.close.await_count == (way == "cancelled")
    assert [await health_of(each) for each in (config.listen, line["endpoint"].removeprefix("tcp://"))] == [None] * 2


@pytest.mark.parametrize(("role", "survives"), [("prefill", True), ("decode", False)])
async def test_a_daemon_is_ready_once_its_engine_has_warmed_up_and_ends_with_1_if_it_dies(
    role: str, survives: bool, config: DecodeConfig, context: Context, monkeypatch: pytest.MonkeyPatch,
    ready: list[Any], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def warm_up() -> None:
        assert warm.wait(60)
        if not survives:
            raise WorldError("card 0: CUBLAS_STATUS_ALLOC_FAILED")

    def create(*given: Any) -> Any:
        engine = create_engine(*given)
        monkeypatch.setattr(engine, "warm_up", warm_up)
        monkeypatch.setattr(engine, "step", lambda: 1 / 0)
        return engine

    create_engine, warm = daemon.create_engine, threading.Event()
    monkeypatch.setattr(daemon, "create_engine", create)
    prefill = PrefillConfig(node="p", slots=256, listen=config.listen, bind=ANY_PORT, json=True)
    started = Started(monkeypatch, prefill if role == "prefill" else config)
    starting = {"ready": False, "role": role, "node": role[0], "starting": True}
    assert await until(lambda: health_of(config.listen)) == (503, starting)
    assert not ready
    warm.set()
    if survives:
        await until(lambda: ready)
        await router_of(context, ready.pop()["endpoint"]).got(Goodbye, reason="engine")
    assert await started.over == 1
    assert not ready
    text = "engine broke down" if survives else "engine stops: card 0: CUBLAS_STATUS_ALLOC_FAILED"
    assert (text in caplog.text, caplog.text.count("Traceback")) == (True, survives)


@pytest.mark.parametrize("way", ["asked", "hurried", "gone"])
async def test_ranks_are_ready_together_and_end_together(
    way: str, config: DecodeConfig, context: Context, monkeypatch: pytest.MonkeyPatch, ready: list[Any]
) -> None:
    config = altered(config, tp_size=2, group=free_address())
    of_follower = altered(config, tp_rank=1, node="d-tp1", listen=free_address())
    before, leader = engines(), Started(monkeypatch, config)
    with pytest.raises(ConfigError, match="the leader refuses this rank: slots: '2048' on rank tp1, '1024' on its le"):
        await Started(monkeypatch, altered(of_follower, slots=2_048)).over
    follower = Started(monkeypatch, of_follower)
    await until(lambda: len(ready) == 2)
    own, follows = ({name: line[name] for name in ("node", "endpoint", "http")} for line in reversed(ready))
    assert ready == [
        {"ready": True, "role": "decode", **follows},
        {"ready": True, "role": "decode", **own, "ranks": [own, follows]},
    ]
    assert await health_of(follows["http"]) == (
        200,
        {"ready": True, "role": "decode", "node": "d-tp1", "follows": True},
    )
    router = router_of(context, own["endpoint"])
    await router.got(Load, rooms_running=1)
    if way == "gone":
        follower.over.cancel()
    else:
        follower.asked.set()
    await router.got(Load, draining=True)
    if way == "asked":
        router.send(Cancel(1, "aborted"), Ended(1))
    else:
        follower.hurried.set()
        await router.got(End, reason="engine", detail="rank tp1 (d-tp1) of this worker is lost: gone")
    await router.got(Goodbye, reason="shutdown" if way == "asked" else "engine")
    assert await leader.over == (way != "asked")
    assert way == "gone" or await follower.over == (way != "asked")
    assert way != "asked" or engines() == before
