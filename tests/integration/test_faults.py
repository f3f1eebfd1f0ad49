"""Processes that are killed, frozen and started again: every request ends, every slot comes back, others are served."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from pdtransfer.fleet import Daemon
from tests.integration.fleets import (
    ENGINE,
    Answer,
    Running,
    Site,
    equal,
    generated,
    open_files,
    prompts,
    running,
    until,
)

SLOW = {"engine": ENGINE, "engine_option": ("layers=2", "step_ms=25")}
LOST = {"peer_lost", "peer_restarted", "transfer", "shutdown", "deadline", "aborted"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two prefills that take their time, one decode."""
    prefill = SLOW | {"chunk_tokens": 8}
    with running(
        tmp_path_factory.mktemp("f"), ends_as=(-signal.SIGKILL,), prefills=[prefill, prefill], decodes=[SLOW]
    ) as made:
        yield made


def named(site: Site, node: str) -> Daemon:
    return next(each for each in site.fleet.daemons if each.ready["node"] == node)


async def ask(site: Site, texts: list[str]) -> list[asyncio.Task[Answer]]:
    return [asyncio.ensure_future(site.complete(text)) for text in texts]


async def granted(site: Site, node: str) -> None:
    """This prefill has grants to write to."""

    async def some() -> bool:
        return bool((await site.metrics(named(site, node)))["pdtransfer_grants"])

    await until(some, f"{node} has grants")


def each_ended_well_or_says_why(texts: list[str], answers: list[Answer]) -> None:
    for text, answer in zip(texts, answers, strict=True):
        if answer.status != 200:
            assert answer.status in (502, 503, 504), answer
            assert answer.error["code"] in LOST, answer
            assert answer.error["message"]
        else:
            assert equal(answer, generated("mla", text)), answer


async def killed(daemon: Daemon) -> None:
    daemon.process.kill()
    await daemon.process.wait()


def test_a_prefill_that_is_killed_costs_no_request_where_another_can_take_over(two: Running) -> None:
    texts = prompts(1, *[90] * 16)

    async def case(site: Site) -> None:
        asked = await ask(site, texts)
        await granted(site, "prefill-0")
        await killed(named(site, "prefill-0"))
        answers = await asyncio.gather(*asked)
        each_ended_well_or_says_why(texts, answers)
        assert all(answer.status == 200 for answer in answers)
        assert (await site.metrics(site.router))["pdtransfer_retries_total"] >= 1
        await site.settled()
        await site.restart(named(site, "prefill-0"))
        await site.usable(prefill=2)
        served = await asyncio.gather(*(site.complete(text) for text in prompts(2, *[40] * 6)))
        assert {answer.facts["prefill"] for answer in served} == {"prefill-0", "prefill-1"}
        await site.settled()

    two(case)


def test_a_decode_that_is_killed_ends_every_request_and_serves_again_once_it_is_back(two: Running) -> None:
    texts = prompts(3, *[60] * 12)

    async def case(site: Site) -> None:
        asked = await ask(site, texts)
        await granted(site, "prefill-1")
        await killed(site.decode)
        answers = await asyncio.gather(*asked)
        each_ended_well_or_says_why(texts, answers)
        assert any(answer.status == 503 for answer in answers)
        refused = await site.complete("nobody there")
        assert (refused.status, refused.error["code"]) == (503, "peer_lost")
        assert int(refused.retry_after or 0) >= 1
        await site.restart(site.decode)
        await site.usable(prefill=2)
        answers = await asyncio.gather(*(site.complete(text) for text in texts))
        assert all(equal(answer, generated("mla", text)) for text, answer in zip(texts, answers, strict=True))
        await site.settled()

    two(case)


def test_a_frozen_prefill_loses_its_rooms_and_its_slots_come_back_when_it_thaws(two: Running) -> None:
    texts = prompts(4, *[90] * 12)

    async def quarantined(site: Site) -> bool:
        return bool((await site.metrics(site.decode))["pdtransfer_quarantined_bytes"])

    async def case(site: Site) -> None:
        asked = await ask(site, texts)
        await granted(site, "prefill-0")
        frozen = named(site, "prefill-0")
        frozen.process.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: quarantined(site), "its slots are quarantined")
            answers = await asyncio.gather(*asked)
            each_ended_well_or_says_why(texts, answers)
            assert all(answer.status == 200 for answer in answers)
            for text in prompts(5, 30, 30):
                answer = await site.complete(text)
                assert equal(answer, generated("mla", text))
                assert answer.facts["prefill"] == "prefill-1"
            assert await quarantined(site)  # no timeout has freed them
        finally:
            frozen.process.send_signal(signal.SIGCONT)
        await site.settled()
        await site.usable(prefill=2)
        await site.settled()

    two(case)


def test_a_prefill_that_dies_frozen_gives_its_slots_back(two: Running) -> None:
    async def case(site: Site) -> None:
        texts = prompts(6, *[90] * 6)
        asked = await ask(site, texts)
        await granted(site, "prefill-1")
        frozen = named(site, "prefill-1")
        frozen.process.send_signal(signal.SIGSTOP)
        await until(lambda: quarantine_of(site), "its slots are quarantined")
        await killed(frozen)
        each_ended_well_or_says_why(texts, await asyncio.gather(*asked))
        await site.settled()
        await site.restart(frozen)
        await site.usable(prefill=2)

    two(case)


async def quarantine_of(site: Site) -> float:
    return (await site.metrics(site.decode))["pdtransfer_quarantined_bytes"]


def test_a_frozen_decode_fails_its_requests_in_time_and_goes_on_where_it_thaws(two: Running) -> None:
    texts = prompts(7, *[60] * 6)

    async def case(site: Site) -> None:
        asked = await ask(site, texts)
        await granted(site, "prefill-0")
        site.decode.process.send_signal(signal.SIGSTOP)
        try:
            answers = await asyncio.gather(*asked)
            each_ended_well_or_says_why(texts, answers)
            assert any(answer.status == 503 for answer in answers)
        finally:
            site.decode.process.send_signal(signal.SIGCONT)
        await site.usable(prefill=2)
        await site.settled()
        await site.served()

    two(case)


def test_prefills_that_are_killed_again_and_again_leave_no_slot_and_no_descriptor_behind(two: Running) -> None:
    async def case(site: Site) -> None:
        await site.served()
        await site.settled()
        before = open_files(site.decode)
        for seed in (8, 9):
            texts = prompts(seed, *[60] * 6)
            asked = await ask(site, texts)
            await granted(site, "prefill-0")
            await killed(named(site, "prefill-0"))
            each_ended_well_or_says_why(texts, await asyncio.gather(*asked))
            await site.restart(named(site, "prefill-0"))
            await site.usable(prefill=2)
            await site.settled()
        served = await asyncio.gather(*(site.complete(text) for text in prompts(2, *[40] * 6)))
        assert {answer.facts["prefill"] for answer in served} == {"prefill-0", "prefill-1"}
        await site.settled()

        async def same() -> bool:
            return open_files(site.decode) <= before

        await until(same, f"{before} descriptors, as before")

    two(case)
