"""What `pdtransfer bench storms` is made of: what counts as right, when all is right again, and its supervisors."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pdtransfer_lab.bench.fleets import storm_fleet, storms
from pdtransfer_lab.bench.fleets.storm_fleet import KINDS, StormFleet, StormKind, StormNode, strikes
from pdtransfer_lab.bench.fleets.storms import ROW, Known, Storm, StormAnswer, StormOutcome, judged
from pdtransfer_lab.commands.comparisons import bench as app

from pdtransfer.transports.mooncake.host import why_not
from tests.support.waiting import until

ONE = Known("abc", 2, {"tokens_digest": "01", "logits_digest": "02", "kv_digest": "03"})
FACTS = {**ONE.digests, "prefill": "prefill-0", "decode": "decode-0"}
RIGHT = {"usage": {"completion_tokens": 2}, "pdtransfer": FACTS}
WORKERS = "prefill-0", "prefill-1", "decode-0", "decode-1"


@pytest.mark.parametrize(
    ("status", "answer", "verdict"),
    [
        (200, RIGHT, "right"),
        (200, RIGHT | {"pdtransfer": FACTS | {"kv_digest": "04"}}, "wrong"),
        (200, RIGHT | {"usage": {"completion_tokens": 1}}, "wrong"),
        (503, {"error": {"message": "no worker", "code": "peer_lost"}}, "error"),
        (503, {"error": {"message": "", "code": "peer_lost"}}, "wrong"),
        (500, {"error": {"message": "no code", "code": None}}, "wrong"),
        (400, {"error": {"message": "the client's fault", "code": "refused"}}, "wrong"),
    ],
)
def test_an_answer_is_right_or_wrong_or_its_absence_is_explained(
    status: int, answer: dict[str, Any], verdict: str
) -> None:
    assert judged(ONE, status, answer)[0] == verdict


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path: sockets lie in it."""
    return tmp_path_factory.mktemp("s")


def storm(here: Path) -> Storm:
    return Storm(StormFleet(KINDS[0], here, lambda _: None), KINDS[0], [ONE], 1)


def answers(verdicts: str, served: Sequence[str] = WORKERS) -> list[StormAnswer]:
    """One each second from 101 on: r is right, by workers in turn, e an error."""
    return [
        StormAnswer(
            index - 0.5, index, {"r": "right", "e": "error"}[verdict], served=frozenset((served[index % len(served)],))
        )
        for index, verdict in enumerate(verdicts, 101)
    ]


@pytest.mark.parametrize(
    ("seen", "since"),
    [
        (answers("r" * 30), 104),  # the last of the four has served
        (answers("rrree" + "r" * 30), 109),
        (answers("rrree" + "r" * (ROW - 1)), None),  # too few in a row
        (answers("e" * 60 + "r" * ROW), None),  # and as many from the moment on when each has served
        (answers("r" * 60, WORKERS[:3]), None),  # the fourth serves nothing
        ([], None),
    ],
)
def test_all_is_right_again_once_no_request_fails_and_every_worker_has_served(
    seen: list[StormAnswer], since: float | None, here: Path
) -> None:
    made = storm(here)
    made.answers = seen
    assert made.recovered_at(100.0) == since


def test_faults_are_the_same_for_the_same_seed(here: Path) -> None:
    nodes = StormFleet(KINDS[0], here, lambda _: None).nodes
    first, again, other = (list(strikes(random.Random(seed), nodes, 5.0)) for seed in (1, 1, 2))
    assert first == again != other
    assert [at for at, *_ in first] == sorted(at for at, *_ in first)


def test_a_request_that_outlasts_its_deadline_hangs_but_for_a_frozen_routers_time(here: Path) -> None:
    async def asked(*frozen: tuple[float, float]) -> StormAnswer:
        async def late(_: web.Request) -> web.Response:
            await asyncio.sleep(0.3)
            return web.json_response(RIGHT)

        application = web.Application()
        application.router.add_post("/v1/completions", late)
        made = storm(here)
        made.router_frozen.extend(frozen)
        async with TestServer(application) as server, aiohttp.ClientSession(str(server.make_url(""))) as http:
            return await made.asked(http, ONE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storms, "SLACK_S", 0.1)
        patch.setattr(storms, "DEADLINE_MS", 0)
        assert asyncio.run(asked()).verdict == "hung"
        assert asyncio.run(asked((0.0, time.monotonic() + 60))).verdict == "right"


async def test_a_supervisor_starts_a_killed_worker_once_it_is_released_and_reports_how_long_that_took(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"engine": "tests.support.engines.plain:create", "page_size": 1}
    monkeypatch.setattr(storm_fleet, "OPTIONS", {})
    configs = [
        type(each)(**{name: getattr(each, name) for name in each.__slots__ if hasattr(each, name)} | plain)
        for each in storm_fleet.configs_of(KINDS[0], here)[:1]
    ]
    monkeypatch.setattr(storm_fleet, "configs_of", lambda *_: configs)
    before = time.monotonic()
    async with StormFleet(KINDS[0], here, lambda _: None) as fleet:
        (node,) = fleet.nodes
        ready = time.monotonic()
        assert 0 < fleet.starting(before, ready) <= ready - before
        first = node.pids
        fleet.kill(node, first)
        await until(lambda: not node.pids)
        await asyncio.sleep(0.1)
        assert fleet.starting(ready, time.monotonic()) == 0.0, "nothing is started before it is released"
        healed = time.monotonic()
        fleet.heal()
        await until(lambda: len(node.starts) == 2)
        assert node.pids != first
        assert fleet.starting(healed, time.monotonic()) > 0
    assert node.ends == [], "a storm's own kill is not an end by itself"


def outcome(kind: StormKind, recovery_s: float, **answers: int) -> StormOutcome:
    return StormOutcome(
        kind.name,
        7,
        Counter({"kill decode": 2}),
        Counter(answers),
        recovery_s=recovery_s,
        starting_s=1.0,
        failing_s=0.5,
    )


def test_the_command_prints_a_row_for_each_fleet_and_fails_for_a_wrong_or_hung_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = [outcome(KINDS[0], 2.0, right=1_500), outcome(KINDS[0], 4.0, right=8, error=3), outcome(KINDS[1], 3.0)]
    seen: list[dict[str, object]] = []
    monkeypatch.setattr(storms, "measure", lambda **given: seen.append(given) or some)
    assert app(["storms", "shm", "--storms=2", "--seed=5", "--json"]) == 0
    assert {name: seen[0][name] for name in ("kinds", "storms", "seed")} == {"kinds": ("shm",), "storms": 2, "seed": 5}
    head, *table = json.loads(capsys.readouterr().out)["tables"][0]
    assert head == storms.HEAD
    assert table[0] == [
        "shm", "2", "4", "1,508", "3", "0", "0", "3.0 (max 4.0)", "1.0 (max 1.0)", "2.0 (max 3.0)", "0.5 (max 0.5)",
    ]  # fmt: skip
    assert [row[0] for row in table] == ["shm", "shm, keys", "all"]
    for verdict in ("wrong", "hung"):
        some[0].answers[verdict] = 1
        some[0].failures = ["what it was"]
        assert app(["storms"]) == 1
        assert "seed 7: what it was" in capsys.readouterr().out
        some[0].answers[verdict] = 0


def test_a_fleet_that_nobody_knows_is_a_misuse() -> None:
    with pytest.raises(storms.WorldError, match="kind = 'x': must be one of shm"):
        storms.measure(kinds=("x",))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["shm", pytest.param("Mooncake", marks=[pytest.mark.full, pytest.mark.skipif(bool(why_not()), reason=why_not())])],
)
def test_a_storm_ends_with_every_answer_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storms, "STORM_S", (3.0, 4.0))
    (found,) = storms.measure(storms=1, seed=3, kinds=(kind,))
    assert found.faults
    assert found.answers["right"] >= ROW
    assert not storms.failed([found]), found.failures


def test_ranks_are_found_under_their_leader_alone() -> None:
    node = StormNode(storm_fleet.configs_of(KINDS[0], Path("/tmp"))[0], Path("log"))
    assert node.pids == []
    assert storm_fleet.ranks_under(1 << 30) == []
