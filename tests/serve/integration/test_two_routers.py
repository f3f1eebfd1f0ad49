"""Two routers before one fleet: neither's requests depend on the other, however it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.support.fleets import ENGINE, Gates, Site, equal, fleet, generated, prompts

TOKENS = 32  # more than steps that pass the gate, one for each room that is admitted


@pytest.mark.parametrize("signal", [pytest.param("SIGTERM", marks=pytest.mark.full), "SIGKILL"])
async def test_a_router_that_ends_takes_no_room_of_the_other_with_it(tmp_path: Path, signal: str) -> None:
    gates = Gates(tmp_path / "gates")
    gates.directory.mkdir()
    daemon = {"engine": ENGINE, "engine_option": ("layers=2", f"gates={gates.directory}")}
    async with fleet(tmp_path, prefills=[daemon], decodes=[daemon]) as first, first.beside("r1") as second:
        await _one_ends(first, second, gates, signal)


async def _one_ends(first: Site, second: Site, gates: Gates, signal: str) -> None:
    theirs, ours = prompts(4, 80, 140), prompts(3, 90, 150, 200)
    with gates.closed("decode"):
        ending = [asyncio.create_task(_answered(first, each)) for each in theirs]
        kept = [asyncio.create_task(second.complete(each, max_tokens=TOKENS)) for each in ours]
        await second.until(second.decode, "pdtransfer_rooms", lambda rooms: rooms == len(ours) + len(theirs))
        if signal == "SIGTERM":
            first.router.process.terminate()
        else:
            first.router.process.kill()
    for prompt, task in zip(ours, kept, strict=True):
        assert equal(await task, generated(prompt, TOKENS))
    # A router that is asked to end lets its requests run to their end.
    assert [await each for each in ending] == [signal == "SIGTERM"] * len(theirs)
    assert equal(await second.complete(ours[0]), generated(ours[0]))
    # The workers stop the rooms of a router that is silent.
    await second.until(second.decode, "pdtransfer_rooms", lambda rooms: not rooms)


async def _answered(site: Site, prompt: str) -> bool:
    try:
        return (await site.complete(prompt, max_tokens=TOKENS)).status == 200
    except aiohttp.ClientError:
        return False
