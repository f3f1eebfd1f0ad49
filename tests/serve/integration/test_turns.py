"""The next turn of a chat is computed where its KV is: by decode, behind the blocks that it holds of earlier turns."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pdtransfer.limits import Limits
from tests.serve.integration.rank_hosts import start
from tests.support.fleets import (
    ENGINE,
    GQA,
    LIMITS,
    MLA,
    Answer,
    Gates,
    Site,
    decode_config,
    equal,
    free_address,
    generated,
    prompts,
    running,
)
from tests.support.healing import text_of
from tests.support.loads import named, strike
from tests.support.waiting import PATIENCE_S, Running, standing, until

TURNS, ANSWER = 10, 60
BLOCK = Limits().prefix_block_tokens
QUICK = replace(LIMITS, silence_ms=1_500)


@dataclass
class Chat:
    """One chat, and what one engine with prefix caching would compute of it, in blocks of the same size."""

    prompt: str = ""
    one_engine: int = 0
    cached: int = 0  # tokens of whole blocks that such an engine has

    def asks(self, text: str) -> str:
        """The prompt of the next turn."""
        self.prompt += text
        self.one_engine += len(self.prompt) - min(self.cached, (len(self.prompt) - 1) // BLOCK * BLOCK)
        return self.prompt

    def takes(self, answer: Answer) -> None:
        self.prompt += answer.text
        self.cached = (len(self.prompt) - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Iterator[Running[Site]]:
    option = ("layers=2", f"gates={gates.directory}")
    both = {"engine": ENGINE, "limits": QUICK, "engine_option": option}
    fleet = {"prefills": [both], "decodes": [both] * 2, "router": {"limits": QUICK}}
    yield from standing(running(tmp_path_factory.mktemp("f"), ends_as=(-signal.SIGKILL,), **fleet))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Site]]:
    """A decode worker of two ranks with half of the heads each."""
    both = {"limits": QUICK, "engine_option": GQA}
    fleet = {"prefills": [both], "decodes": [both | {"tp_size": 2}], "router": {"limits": QUICK}}
    yield from standing(running(tmp_path_factory.mktemp("r"), **fleet))


@pytest.fixture
def each(request: pytest.FixtureRequest) -> Running[Site]:
    return request.getfixturevalue(request.param)


async def computed(site: Site) -> int:
    """Prompt tokens that all engines have computed since they were started, by their own counts."""
    workers = [*site.fleet.of("prefill"), *site.fleet.of("decode")]
    return sum([int((await site.metrics(worker))["pdtransfer_computed_tokens_total"]) for worker in workers])


async def kept(site: Site) -> int:
    return int((await site.metrics(site.router))["pdtransfer_requests_kept_total"])


async def turn(site: Site, chat: Chat, text: str, options: tuple[str, ...] = MLA, **more: Any) -> Answer:
    """A turn is answered as a single process answers it."""
    prompt = chat.asks(text)
    answer = await site.complete(prompt, max_tokens=ANSWER, **more)
    assert equal(answer, generated(prompt, ANSWER, options)), answer
    chat.takes(answer)
    return answer


@pytest.mark.parametrize(
    ("each", "options"), [("site", MLA), ("ranks", GQA)], ids=["processes", "ranks"], indirect=["each"]
)
async def test_ten_turns_compute_no_more_prompt_tokens_than_one_engine_with_prefix_caching(
    each: Site, options: tuple[str, ...]
) -> None:
    before, stayed, chat = await computed(each), await kept(each), Chat()
    answers = [await turn(each, chat, text, options) for text in prompts(1, 150, *[20] * (TURNS - 1))]
    assert await computed(each) - before <= 1.05 * chat.one_engine
    assert await kept(each) - stayed == TURNS - 1
    assert [answer.facts["prefill"] for answer in answers] == ["prefill-0", *[""] * (TURNS - 1)]
    assert len({answer.facts["decode"] for answer in answers}) == 1
    assert [answer.facts["kv_bytes"] > 0 for answer in answers] == [True, *[False] * (TURNS - 1)]
    await each.settled()


async def test_two_chats_that_branch_share_the_turns_before_and_no_answer(site: Site) -> None:
    chat = Chat()
    first, *others = prompts(2, 200, 30, 40)
    await turn(site, chat, first)
    stayed = await kept(site)
    branches = [replace(chat) for _ in others]
    await asyncio.gather(*(turn(site, branch, text) for branch, text in zip(branches, others, strict=True)))
    await asyncio.gather(*(turn(site, branch, text) for branch, text in zip(branches, others, strict=True)))
    assert await kept(site) - stayed == 4
    await site.settled()


async def test_another_salt_shares_no_turn(site: Site) -> None:
    chat, stayed = Chat(), await kept(site)
    first, second = prompts(3, 200, 30)
    await turn(site, chat, first, cache_salt="a")
    answer = await turn(site, chat, second, cache_salt="b")
    assert answer.facts["prefill"] == "prefill-0"
    assert await kept(site) == stayed


async def test_a_turn_that_its_client_leaves_gives_everything_back_and_the_next_is_right(
    site: Site, gates: Gates
) -> None:
    chat = Chat()
    first, second, third = prompts(4, 200, 30, 25)
    await turn(site, chat, first)
    stayed, left = await kept(site), chat.prompt
    with gates.closed("decode"):
        async for event in site.events(left + second, max_tokens=ANSWER):
            assert text_of([event])
            break  # the first token is here, others are to come
    await site.settled()
    await turn(site, chat, second + third)
    assert await kept(site) - stayed == 2
    await site.settled()


async def test_a_prompt_whose_blocks_decode_has_given_up_is_handed_over(site: Site) -> None:
    """The router does not know what was evicted: decode refuses the turn, and prefill computes it."""

    chat = Chat()
    first, second, *more = prompts(5, 1_300, 30, *[900] * 8)
    await turn(site, chat, first)
    await asyncio.gather(*(site.complete(text, max_tokens=2) for text in more))
    retries = (await site.metrics(site.router))["pdtransfer_retries_total"]
    answer = await turn(site, chat, second)
    assert answer.facts["prefill"] == "prefill-0"
    assert (await site.metrics(site.router))["pdtransfer_retries_total"] == retries + 1
    await site.settled()


async def test_a_turn_whose_decode_is_killed_goes_on_elsewhere(site: Site, gates: Gates) -> None:
    chat = Chat()
    first, second, third = prompts(6, 200, 30, 25)
    where = (await turn(site, chat, first)).facts["decode"]
    stayed, prompt = await kept(site), chat.asks(second)
    with gates.closed("decode"):
        events = list[dict[str, Any]]()

        async def read() -> None:
            async for event in site.events(prompt, max_tokens=ANSWER, enable_resume=True):
                assert "error" not in event, event
                events.append(event)

        reading = asyncio.ensure_future(read())
        await until(lambda: text_of(events), "the first token")
        assert await kept(site) - stayed == 1
        await strike(site, where, signal.SIGKILL)
    await reading
    whole = generated(prompt, ANSWER)
    assert text_of(events).encode() == bytes(whole.tokens)
    assert events[-1]["pdtransfer"]["resumptions"] == 1
    assert events[-1]["pdtransfer"]["decode"] != where
    await site.restart(named(site, where))
    await site.usable(prefill=1, decode=2)
    chat.prompt += text_of(events)
    await turn(site, chat, third)
    await site.settled()


@asynccontextmanager
async def forgetful(logs: Path, rank: int) -> AsyncIterator[Site]:
    """A decode worker of two ranks, of which this one remembers four blocks."""
    group, few = free_address(), replace(QUICK, prefix_blocks_max=4)
    limits = [few if number == rank else QUICK for number in range(2)]
    engine = {"engine": ENGINE, "engine_option": (*GQA, "step_ms=5"), "slots": 4_096}
    both = engine | {"tp_size": 2, "group": group}
    place = {"limits": limits[1], "tp_rank": 1, "node": "decode-0-tp1", "listen": ""}
    sockets = tempfile.TemporaryDirectory(prefix="pdt-")
    other = decode_config(Path(sockets.name) / "s", **both | place)
    follower = start(other, logs / "decode-0-tp1.log", [])
    try:
        one, ranks = engine | {"limits": QUICK}, both | {"limits": limits[0]}
        async with running(logs, prefills=[one], decodes=[ranks], router={"limits": QUICK}) as site:
            yield site
        assert follower.wait(PATIENCE_S) == 0, "it ends with its leader"
    finally:
        follower.kill()
        follower.wait()
        sockets.cleanup()


@pytest.mark.parametrize("rank", [0, 1], ids=["the leader", "the other"])
async def test_of_a_worker_whose_ranks_remember_unequal_blocks_every_turn_is_right(tmp_path: Path, rank: int) -> None:
    """The leader's blocks count. Where another rank lacks some of them, prefill computes the prompt. Where it has more,
    and would take fewer steps, it computes them all the same: in each step the ranks have to run the same, beside an
    answer that goes on."""
    async with forgetful(tmp_path, rank) as site:
        chat, other = Chat(), Chat()
        *texts, beside = prompts(7, 200, 30, 600, 30, 60)
        events = site.events(beside, max_tokens=1_500)
        assert text_of([await anext(events)])
        answers = [await turn(site, chat, text, GQA) for text in texts]
        await events.aclose()
        assert [answer.facts["prefill"] for answer in answers] == [
            "prefill-0", "", *["" if rank == 0 else "prefill-0"] * 2
        ]  # fmt: skip
        await asyncio.gather(*(turn(site, other, text, GQA) for text in prompts(8, 200)))
        await turn(site, chat, "and then?", GQA)
        await site.settled()
