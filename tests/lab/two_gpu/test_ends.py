"""Clients that leave and ranks that are killed in the middle of a push: all others are answered as usual, and every
slot comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.lab.two_gpu.matrix import TEXTS, Case, expected, fleet_of, single
from tests.support.fleets import ENGINE, Answer, Gates, Site, equal, followers, prompts, running
from tests.support.loads import LOST
from tests.support.waiting import until

CASES = (
    Case(attention="gqa", chunk=48, cell=1, here=True),
    Case(attention="gqa", tp=2, spread=True, chunk=48, cell=1),
    Case(attention="gqa", pp=2, chunk=48, cell=1),
    Case(attention="mla", tp=2, chunk=48, cell=1, target=("page_head", 16)),
    Case(attention="mla", decode_tp=2, chunk=48, cell=1),
)
STEP_MS = 10  # of prefills: layers leave one by one
LONG, LATE, SHORT = prompts(5, *[400] * 4), prompts(6, *[400] * 4), TEXTS[:4]
LOST_WITH_WORKER = LOST | {"engine"}  # of a request that its worker took along


async def pushing(site: Site) -> None:
    """Both prefills are in the middle of prompts for which decode has leased slots, and cells of which are written."""

    async def some() -> bool:
        counts = [await site.metrics(each) for each in site.fleet.of("prefill")]
        leases = (await site.metrics(site.decode))["pdtransfer_leases"]
        return leases >= len(counts) and all(m["pdtransfer_grants"] for m in counts)

    await until(some, "pushes of both prefills")


def right(text: str, answer: Answer, case: Case, devices: tuple[str, str]) -> bool:
    return equal(answer, expected(single(case, devices), [text])[0])


@pytest.mark.full
async def test_others_are_answered_as_if_nobody_had_left_or_died(
    case: Case, devices: tuple[str, str], tmp_path: Path
) -> None:
    settings = fleet_of(case, devices)
    (first,), (decode,) = settings["prefills"], settings["decodes"]
    expected(
        single(case, devices), [*SHORT, *LONG, *LATE]
    )  # which takes long, and not while daemons wait for an answer
    gates = Gates(tmp_path)
    own = (*first["engine_option"], "model=reference", f"step_ms={STEP_MS}", f"gates={gates.directory}")
    slow = {"engine": ENGINE, "engine_option": own}
    alone = first | {"tp_size": 1, "pp_size": 1, "device": devices[0]}

    def ask(site: Site, texts: list[str]) -> dict[str, asyncio.Task[Answer]]:
        """Every second one keeps its KV in DRAM, where decode can do so."""
        kinds = (index % 2 == 1 and case.sparse for index in range(len(texts)))
        return {
            text: asyncio.ensure_future(site.complete(text, enable_hisparse=kind))
            for text, kind in zip(texts, kinds, strict=True)
        }

    async def served(site: Site, texts: list[str]) -> None:
        answers = await asyncio.gather(*ask(site, texts).values())
        wrong = [a for text, a in zip(texts, answers, strict=True) if not right(text, a, case, devices)]
        assert not wrong, wrong

    async def ends(site: Site) -> None:
        with gates.closed("prefill"):
            asked = ask(site, LONG)
            await pushing(site)
            for text in LONG[::2]:  # whoever has these hangs up
                asked.pop(text).cancel()
        await served(site, SHORT)
        for text, answer in asked.items():
            assert right(text, await answer, case, devices), answer
        await site.settled()

        with gates.closed("prefill"):
            asked = ask(site, LATE)
            await pushing(site)
            victim = site.prefill
            os.kill((followers(victim) or [victim.process.pid])[-1], signal.SIGKILL)
        for text, each in asked.items():
            answer = await each
            if answer.status == 200:
                assert right(text, answer, case, devices), answer
            else:
                assert answer.error["code"] in LOST_WITH_WORKER, answer
        await victim.process.wait()
        await served(site, SHORT)
        await site.settled()

    prefills = [first | slow, alone | slow]
    async with running(tmp_path, ends_as=(1, -signal.SIGKILL), prefills=prefills, decodes=[decode]) as site:
        await ends(site)
