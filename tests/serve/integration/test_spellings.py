"""One worker under several names: routers that spell its address differently share it, and nobody's room is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pdtransfer.bus.keys import generate
from pdtransfer.serve.process.fleet import Daemon
from tests.support.fleets import Site, equal, fleet, free_address, generated, prompts
from tests.support.waiting import until

NODES = ("router", "prefill-0", "decode-0")


@pytest.mark.parametrize(
    "keyed",
    [pytest.param(False, id="without keys", marks=pytest.mark.full), pytest.param(True, id="with keys")],
)
async def test_routers_that_spell_a_worker_differently_lose_no_request(tmp_path: Path, keyed: bool) -> None:
    """One calls both workers localhost, one lists them under both names."""

    keys = _keys(tmp_path) if keyed else {node: {} for node in NODES}
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(
            fleet(tmp_path, prefills=[keys["prefill-0"]], decodes=[keys["decode-0"]], router=keys["router"])
        )
        prefill, decode = site.prefill.ready["endpoint"], site.decode.ready["endpoint"]
        router = await _router(stack, site, tmp_path, "r1", (_local(prefill),), (_local(decode),))
        both = await _router(stack, site, tmp_path, "r2", (prefill, _local(prefill)), (_local(decode), decode))
        texts = prompts(5, *[40] * 36)
        asked = [_complete(each, text) for each, text in zip((site.http, router, both) * 12, texts, strict=True)]
        statuses = Counter[int]()
        for first in range(0, len(asked), 6):
            statuses.update(await asyncio.gather(*asked[first : first + 6]))
        assert statuses == {200: len(texts)}, statuses
        assert (await site.metrics(site.prefill))["pdtransfer_sessions"] == 1
        workers = (await _health(both))["workers"]
        assert sorted(worker["usable"] for worker in workers) == [False, False, True, True]
        second = [worker["why"] for worker in workers if not worker["usable"]]
        assert all(why.startswith("the same worker as ") for why in second), second
        await site.settled()
        assert equal(await site.complete(texts[0]), generated(texts[0]))
    logs = tmp_path.glob("*.log")  # noqa: ASYNC240
    assert "superseded" not in "".join(log.read_text() for log in logs)


def _keys(directory: Path) -> dict[str, dict[str, Any]]:
    (directory / "keys").mkdir()
    lines = [generate(directory / "keys" / node) for node in (*NODES, "r1", "r2")]
    (allow := directory / "keys" / "allow").write_text("\n".join(lines) + "\n")
    return {node: {"key": directory / "keys" / f"{node}.key", "allow": allow} for node in NODES}


def _local(endpoint: str) -> str:
    return endpoint.replace("127.0.0.1", "localhost")


async def _router(
    stack: AsyncExitStack, site: Site, directory: Path, node: str, prefill: tuple[str, ...], decode: tuple[str, ...]
) -> aiohttp.ClientSession:
    """Another router before the same workers, once it has a worker of each role; a client of it."""
    config = replace(site.configs["router"], node=node, listen=free_address(), prefill=prefill, decode=decode)
    if config.key is not None:
        config = replace(config, key=config.key.with_name(f"{node}.key"))
    daemon = await Daemon.start(config, directory / f"{node}.log")
    stack.push_async_callback(daemon.stop)
    await daemon.wait_ready()
    http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{daemon.ready['http']}"))

    async def ready() -> bool:
        return {each["role"] for each in (await _health(http))["workers"] if each["usable"]} == {"prefill", "decode"}

    await until(ready)
    return http


async def _health(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/health") as response:
        return await response.json()


async def _complete(http: aiohttp.ClientSession, prompt: str) -> int:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with http.post("/v1/completions", json=body) as response:
        await response.read()
        return response.status
