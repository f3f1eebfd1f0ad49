"""Processes that are killed, frozen and started again: every request ends, every slot comes back, others are served."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import aiohttp
import pytest

from pdtransfer.serve.process.fleet import Daemon
from tests.support.fleets import Gates, Site, prompts, running
from tests.support.healing import QUICK, Rest, decode, healed, prefill, right
from tests.support.loads import Load, killed, mend, metric, named, streams, strike
from tests.support.processes import children, deliver
from tests.support.waiting import PATIENCE_S, Running, standing, until

STEP_MS = 10


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Iterator[Running[Site]]:
    """Two prefills and two decodes that take their time."""
    slow = {"step_ms": STEP_MS, "gates": gates.directory}
    both = {"prefills": [prefill(**slow)] * 2, "decodes": [decode(**slow)] * 2}
    yield from standing(running(tmp_path_factory.mktemp("f"), ends_as=(-signal.SIGKILL,), **both))


async def has_quarantined(site: Site) -> None:
    """Slots of who does not answer: its requests may have been answered by another before it counts as silent."""

    async def some() -> bool:
        return bool(await quarantined(site))

    await until(some, "slots are quarantined")


async def quarantined(site: Site) -> float:
    return sum([await metric(site, f"decode-{number}", "pdtransfer_quarantined_bytes") for number in range(2)])


ROLES = "prefill", "decode"
FAULTS = [
    *(pytest.param(role, signal.SIGKILL) for role in ROLES),
    *(pytest.param(role, signal.SIGSTOP, marks=pytest.mark.full) for role in ROLES),
]


@pytest.mark.parametrize(("role", "number"), FAULTS)
async def test_a_fault_before_a_transfer_costs_no_request_where_another_can_take_over(
    site: Site, before: Rest, role: str, number: signal.Signals
) -> None:
    await strike(site, f"{role}-0", number)
    try:
        await Load(site, seed=1).all_served()  # half of them were sent to who does not answer
    finally:
        await mend(site, f"{role}-0", number)
    await healed(site, before)


@pytest.mark.parametrize(("role", "number"), FAULTS)
async def test_a_fault_during_transfers_costs_no_request_where_another_can_take_over(
    site: Site, before: Rest, gates: Gates, role: str, number: signal.Signals
) -> None:
    with gates.closed("prefill"):
        load = Load(site, seed=2)
        await site.until(named(site, f"{role}-0"), "pdtransfer_grants" if role == "prefill" else "pdtransfer_leases")
        await strike(site, f"{role}-0", number)
    try:
        await load.all_served()
        if (role, number) == ("prefill", signal.SIGSTOP):
            await has_quarantined(site)  # and no timeout frees them
    finally:
        await mend(site, f"{role}-0", number)
    await healed(site, before)


@pytest.mark.parametrize(("role", "number"), FAULTS)
async def test_a_fault_after_the_transfer_costs_what_decodes_there_and_nothing_else(
    site: Site, before: Rest, gates: Gates, role: str, number: signal.Signals
) -> None:
    with gates.closed("decode"):
        opened = await streams(site, f"{role}-0")
        await strike(site, f"{role}-0", number)
    try:
        whole = [await stream.whole() for stream in opened]
    finally:
        await mend(site, f"{role}-0", number)
    assert all(whole) if role == "prefill" else any(whole) and not all(whole)
    await healed(site, before)


async def test_a_prefill_that_dies_frozen_gives_its_slots_back(site: Site, before: Rest, gates: Gates) -> None:
    with gates.closed("prefill"):
        load = Load(site, seed=3)
        await site.until(named(site, "prefill-1"), "pdtransfer_grants")
        frozen = named(site, "prefill-1")
        deliver([frozen.process.pid], signal.SIGSTOP)
    await load.all_served()
    await has_quarantined(site)
    await killed(frozen)
    await site.restart(frozen)
    await healed(site, before)


async def test_slots_of_a_killed_writer_stay_quarantined_until_its_forked_child_is_gone(
    site: Site, before: Rest, gates: Gates
) -> None:
    with gates.closed("prefill"):
        forks = [asyncio.ensure_future(site.complete(f"!{text}")) for text in prompts(4, *[40] * 2)]
        child = await child_of_some(site)
        node = named(site, child.node)
        await killed(node)
    try:
        await Load(site, seed=5).all_served()
        for each in await asyncio.gather(*forks):
            assert each.status in (200, 502, 503), each
        await has_quarantined(site)
        await Load(site, seed=6).all_served()
        assert await quarantined(site), "the child still has the arena mapped"
    finally:
        child.kill()
        for each in site.fleet.of("prefill"):  # which took over, and may have forked as well
            if each is not node:
                Child(each.ready["node"], children(each.process.pid)).kill()
    await site.restart(node)
    await healed(site, before)


class Child:
    """A process that a daemon has forked, once it is there."""

    def __init__(self, node: str, pids: list[int]) -> None:
        self.node, self._pids = node, pids

    def kill(self) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def child_of_some(site: Site) -> Child:
    """Of the first prefill that has one."""
    found: list[Child] = []

    async def some() -> bool:
        found.extend(
            Child(each.ready["node"], pids) for each in site.fleet.of("prefill") if (pids := children(each.process.pid))
        )
        return bool(found)

    await until(some, "a forked child")
    return found[0]


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(site: Site, before: Rest) -> None:
    asked = [asyncio.ensure_future(site.complete(text, max_tokens=40)) for text in prompts(7, *[60] * 24)]
    for each in asked:
        await asyncio.sleep(STEP_MS / 1e3)  # some are computed, some cross, some decode by then
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await healed(site, before)


async def test_a_router_that_is_killed_has_its_rooms_stopped_and_serves_again_once_it_is_back(
    site: Site, before: Rest, gates: Gates
) -> None:
    with gates.closed("prefill"):
        asked = [asyncio.ensure_future(site.complete(text)) for text in prompts(8, *[80] * 8)]
        await site.until(named(site, "prefill-0"), "pdtransfer_grants")
        await killed(site.router)
    for each in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(each, aiohttp.ClientError), each
    await site.restart(site.router)
    await healed(site, before)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_drains_under_load_loses_no_request(site: Site, before: Rest, role: str) -> None:
    over = asyncio.Event()

    async def keep_asking(number: int) -> int:
        served = 0
        while not over.is_set():
            text = f"{number} asks for the {served}th time"
            answer = await site.complete(text)
            assert right(text, answer), answer
            served += 1
        return served

    asking = [asyncio.ensure_future(keep_asking(number)) for number in range(8)]
    node = named(site, f"{role}-0")
    await site.until(named(site, f"{role}-0"), "pdtransfer_rooms")
    node.process.terminate()
    assert await asyncio.wait_for(node.process.wait(), PATIENCE_S) == 0
    await site.restart(node)
    await site.usable(prefill=2, decode=2)
    begun = await metric(site, f"{role}-0", "pdtransfer_rooms_begun_total")

    async def takes_part() -> bool:
        return await metric(site, f"{role}-0", "pdtransfer_rooms_begun_total") > begun

    await until(takes_part, "the new process is given rooms")
    over.set()
    assert min(await asyncio.gather(*asking)) > 0
    await healed(site, before)


async def test_a_router_that_drains_under_load_answers_all_that_it_has_taken(
    site: Site, before: Rest, gates: Gates
) -> None:
    async def taken() -> bool:
        return await metric(site, "router", "pdtransfer_requests_open") == 16

    with gates.closed("prefill"):
        load = Load(site, seed=9)
        await until(taken, "all requests are taken")
        site.router.process.terminate()
    await load.all_served()
    assert await asyncio.wait_for(site.router.process.wait(), PATIENCE_S) == 0
    await site.restart(site.router)
    await healed(site, before)


@pytest.mark.full
async def test_a_host_that_stands_still_for_a_while_costs_no_request(site: Site, before: Rest, gates: Gates) -> None:
    """Nobody was silent: each finds that it has not run itself, and lets the others answer first."""

    begun = [await metric(site, worker.ready["node"], "pdtransfer_rooms_begun_total") for worker in workers(site)]
    with gates.closed("prefill"):
        load = Load(site, seed=10)
        for worker in workers(site):
            await site.until(named(site, worker.ready["node"]), "pdtransfer_rooms")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for daemon in site.fleet.daemons:
                daemon.process.send_signal(number)
            await asyncio.sleep(1.3 * QUICK.silence_ms / 1e3)
    await load.all_served()
    after = [await metric(site, worker.ready["node"], "pdtransfer_rooms_begun_total") for worker in workers(site)]
    assert sum(after) - sum(begun) == 2 * 16, "no room was begun again"
    await healed(site, before)


def workers(site: Site) -> list[Daemon]:
    return [daemon for daemon in site.fleet.daemons if daemon.role != "router"]
