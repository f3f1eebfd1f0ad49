"""Sessions that are there before the first request: of every pair of workers, all ranks, workers that come and go."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fleets import GQA, LIMITS, Answer, Site, prompts, running
from tests.support.waiting import until

PLAIN = {"engine": "tests.support.engines.plain:create", "engine_option": ()}


async def up(site: Site, count: int, rank: int = 0) -> None:
    """Each decode worker has this many sessions, on this rank, that may be granted on."""

    async def there() -> bool:
        each = [await site.metrics(daemon, rank) for daemon in site.fleet.of("decode")]
        return all(metrics["pdtransfer_sessions{up}"] == metrics["pdtransfer_sessions"] == count for metrics in each)

    await until(there, f"{count} sessions")


async def sessions_of(site: Site, role: str) -> list[float]:
    """How many each of these workers has."""
    living = [each for each in site.fleet.of(role) if each.process.returncode is None]
    return [(await site.metrics(each))["pdtransfer_sessions"] for each in living]


async def begun(site: Site) -> list[float]:
    """Rooms that each decode worker has been asked for."""
    return [(await site.metrics(each))["pdtransfer_rooms_begun_total"] for each in site.fleet.of("decode")]


def right(answer: Answer) -> bool:
    """The engines look at every row."""
    return answer.status == 200


async def test_every_pair_has_its_session_before_a_request_and_prefills_may_leave_and_come_back(tmp_path: Path) -> None:
    async with running(tmp_path, prefills=[PLAIN] * 3, decodes=[PLAIN] * 2) as site:
        await up(site, 3)
        assert await begun(site) == [0, 0]
        assert right(await site.complete("all are there"))
        leaves = site.fleet.of("prefill")[1]
        await leaves.stop()
        await up(site, 2)
        assert right(await site.complete("two are left"))
        known = await begun(site)
        await site.restart(leaves)
        await up(site, 3)
        assert await begun(site) == known
        assert all(map(right, await asyncio.gather(*map(site.complete, prompts(5, 20, 70, 90, 130)))))
        await site.settled()


@pytest.mark.full
async def test_every_rank_of_a_decode_worker_has_its_sessions_before_a_request(tmp_path: Path) -> None:
    own = {"engine_option": GQA, "tp_size": 2}
    async with running(tmp_path, prefills=[own], decodes=[own]) as site:
        for rank in range(2):
            await up(site, 2, rank)
        assert await begun(site) == [0]
        await site.served(options=GQA)


async def test_a_prefill_of_one_place_serves_the_decode_that_has_it_and_then_the_other(tmp_path: Path) -> None:
    one = PLAIN | {"limits": replace(LIMITS, sessions_max=1)}
    async with running(tmp_path, prefills=[one], decodes=[PLAIN] * 2) as site:

        async def one_has_it() -> bool:
            return await sessions_of(site, "prefill") == [1] and sum(await sessions_of(site, "decode")) == 1

        await until(one_has_it)
        assert all(map(right, await asyncio.gather(*map(site.complete, prompts(7, 20, 30, 40, 50)))))
        has = (await sessions_of(site, "decode")).index(1)
        await site.fleet.of("decode")[has].stop()
        await until(one_has_it)
        assert right(await site.complete("the other has it"))
