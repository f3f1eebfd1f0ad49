"""One worker under several names: routers that spell its address differently share it, and nobody's room is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from pdtransfer.bus.keys import generate
from tests.support.fleets import equal, fleet, generated, prompts

NODES = ("router", "prefill-0", "decode-0", "r1", "r2")


@pytest.mark.parametrize(
    "keyed", [pytest.param(False, id="without keys", marks=pytest.mark.full), pytest.param(True, id="with keys")]
)
async def test_routers_that_spell_a_worker_differently_lose_no_request(tmp_path: Path, keyed: bool) -> None:
    """One calls both workers localhost, one lists them under both names."""

    keys = _keys(tmp_path) if keyed else {node: {} for node in NODES}
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(
            fleet(tmp_path, prefills=[keys["prefill-0"]], decodes=[keys["decode-0"]], router=keys["router"])
        )
        prefill, decode = site.prefill.ready["endpoint"], site.decode.ready["endpoint"]
        local = {"prefill": (_local(prefill),), "decode": (_local(decode),)}
        named = {"prefill": (prefill, *local["prefill"]), "decode": (*local["decode"], decode)}
        routers = [site.beside("r1", **keys["r1"], **local), site.beside("r2", **keys["r2"], **named)]
        sites = [site, *[await stack.enter_async_context(each) for each in routers]]
        texts = prompts(5, *[40] * 36)
        asked = [each.complete(text, max_tokens=4) for each, text in zip(sites * 12, texts, strict=True)]
        statuses = Counter[int]()
        for first in range(0, len(asked), 6):
            statuses.update(answer.status for answer in await asyncio.gather(*asked[first : first + 6]))
        assert statuses == {200: len(texts)}, statuses
        assert (await site.metrics(site.prefill))["pdtransfer_sessions"] == 1
        workers = (await sites[-1].health(sites[-1].router))["workers"]
        assert sorted(worker["usable"] for worker in workers) == [False, False, True, True]
        second = [worker["why"] for worker in workers if not worker["usable"]]
        assert all(why.startswith("the same worker as ") for why in second), second
        await site.settled()
        assert equal(await site.complete(texts[0]), generated(texts[0]))
    logs = tmp_path.glob("*.log")  # noqa: ASYNC240
    assert "superseded" not in "".join(log.read_text() for log in logs)


def _keys(directory: Path) -> dict[str, dict[str, Any]]:
    (directory / "keys").mkdir()
    lines = [generate(directory / "keys" / node) for node in NODES]
    (allow := directory / "keys" / "allow").write_text("\n".join(lines) + "\n")
    return {node: {"key": directory / "keys" / f"{node}.key", "allow": allow} for node in NODES}


def _local(endpoint: str) -> str:
    return endpoint.replace("127.0.0.1", "localhost")
