"""Whole fleets in storms of SIGKILL and SIGSTOP: every answer against a single process, and how soon all is right."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np

from pdtransfer.errors import WorldError
from pdtransfer.serve.engine_api import EngineConfig
from pdtransfer.serve.engines.stamp.factory import generate_many
from pdtransfer.transports.mooncake.host import why_not
from pdtransfer.wire import Sampling

from ..report import load, print_tables
from .storm_fleet import DEADLINE_MS, KINDS, OPTIONS, SLOTS, StormFleet, StormKind, StormNode, strikes

HEAD = [
    "fleet", "storms", "faults", "right", "with an error", "wrong", "hung", "recovery s", "of it starting", "else",
    "last error",
]  # fmt: skip
CLIENTS = 4
ROW = 20  # right answers in a row, after which all is right
SLACK_S = 3.0  # beyond its deadline, for a request to come to its end
RECOVERY_S_MAX = 90.0  # a fleet that takes longer is given up: the storm counts as hung
STORM_S = 4.0, 10.0
FREEZE_S = 0.3, 4.0
DOWN_S = 0.0, 2.0
PAUSE_S = 0.05  # of a client after an error
DIGESTS = "tokens_digest", "logits_digest", "kv_digest"


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt, and what a single process makes of it."""

    prompt: str
    tokens: int
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class StormAnswer:
    """One request: when it was sent and ended, by CLOCK_MONOTONIC, and what came of it."""

    asked: float
    ended: float
    verdict: str  # right, error, wrong or hung
    text: str = ""
    served: frozenset[str] = frozenset()  # workers


@dataclass(slots=True)
class StormOutcome:
    """What one storm has shown. Times in seconds from the moment when everything is continued or being started."""

    kind: str
    seed: int
    faults: Counter[str] = field(default_factory=Counter[str])
    answers: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])
    recovery_s: float = 0.0
    starting_s: float = 0.0  # of it, some process was being started
    failing_s: float = 0.0  # until the last request failed
    slowest_s: float = 0.0  # the slowest right answer to a request after healing

    @property
    def waiting_s(self) -> float:
        """What of the recovery no start explains."""
        return self.recovery_s - self.starting_s

    @property
    def line(self) -> str:
        """For people."""
        text = f"{self.kind}, seed {self.seed}: {dict(self.faults)}, {dict(self.answers)}, right after "
        text += f"{self.recovery_s:.1f} s, {self.starting_s:.1f} s of it starting, last error after "
        text += f"{self.failing_s:.1f} s, slowest answer {self.slowest_s:.1f} s"
        return "; ".join((text, *self.failures))


def known() -> list[Known]:
    """Prompts of many lengths, and their answers by a single process."""
    random_ = np.random.default_rng(1)
    texts = [
        "".join(map(chr, random_.integers(97, 123, size))) for size in (1, 17, 48, 49, 64, 130, 190, 300, 300, 600)
    ]
    counts = [int(random_.integers(4, 24)) for _ in texts]
    config = EngineConfig(role="decode", slots=SLOTS, page_size=64, host_layout="layer_first", options=OPTIONS)
    asked = [
        (np.frombuffer(text.encode(), np.uint8).astype(np.int64), Sampling(max_tokens=count, ignore_eos=True))
        for text, count in zip(texts, counts, strict=True)
    ]
    outcomes = generate_many(config, asked)
    return [
        Known(text, count, {name: getattr(outcome, name).hex() for name in DIGESTS})
        for text, count, outcome in zip(texts, counts, outcomes, strict=True)
    ]


class Storm:
    """One storm over a fleet, and the requests meanwhile."""

    def __init__(self, fleet: StormFleet, kind: StormKind, prompts: Sequence[Known], seed: int) -> None:
        self._fleet, self._kind, self._prompts = fleet, kind, prompts
        self.outcome = StormOutcome(kind.name, seed)
        self._chance, self._asking = random.Random(seed), random.Random(seed)  # noqa: S311 -- faults, and requests
        self.router_frozen = deque[tuple[float, float]]()
        self.answers: list[StormAnswer] = []
        self._over = False

    async def run(self) -> StormOutcome:
        """The storm, the healing, and requests until all is right again."""
        # A connection that is kept may be a dead router's.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=RECOVERY_S_MAX)
        async with aiohttp.ClientSession(self._fleet.url, connector=connector, timeout=timeout) as http:
            clients = [asyncio.create_task(self._client(http)) for _ in range(CLIENTS)]
            await self._strike()
            self._fleet.heal()
            healed = time.monotonic()
            for node in self._fleet.nodes:
                self._thawed(node)
            while not (recovered := self.recovered_at(healed)) and time.monotonic() < healed + RECOVERY_S_MAX:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            self._over = True
            await asyncio.gather(*clients)
        outcome = self.outcome
        outcome.answers.update(answer.verdict for answer in self.answers)
        outcome.failures += [answer.text for answer in self.answers if answer.verdict in ("wrong", "hung")][:5]
        if not recovered:
            outcome.answers["hung"] += 1
            outcome.failures.append(f"not all right within {RECOVERY_S_MAX:.0f} s: {self._lacking(healed)}")
        outcome.recovery_s = (recovered or time.monotonic()) - healed
        outcome.starting_s = self._fleet.starting(healed, healed + outcome.recovery_s)
        after = [
            answer.ended - answer.asked
            for answer in self.answers
            if answer.asked >= healed and answer.verdict == "right"
        ]
        outcome.slowest_s = max(after, default=0.0)
        failed_at = [answer.ended for answer in self.answers if answer.verdict != "right"]
        outcome.failing_s = max(0.0, max(failed_at, default=healed) - healed)
        return outcome

    async def _strike(self) -> None:
        began, tasks = time.monotonic(), list[asyncio.Task[None]]()
        seconds = self._chance.uniform(*STORM_S)
        for moment, node, how in strikes(self._chance, self._fleet.nodes, seconds):
            await asyncio.sleep(max(0.0, began + moment - time.monotonic()))
            if not (pids := node.pids) or node.frozen:
                continue
            if len(pids) > 1 and self._chance.random() < 0.5:  # one rank, the leader or another
                pids = [self._chance.choice(pids)]
            if how == "kill":
                self._fleet.kill(node, pids)
                tasks.append(asyncio.create_task(self._later(self._chance.uniform(*DOWN_S), self._fleet.release, node)))
            else:
                node.freeze(pids)
                self._froze(node)
                if self._chance.random() < 0.7:  # else until the storm is over
                    tasks.append(asyncio.create_task(self._later(self._chance.uniform(*FREEZE_S), self._thaw, node)))
            self.outcome.faults[f"{how} {node.config.role}"] += 1
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        for task in tasks:
            task.cancel()

    async def _later(self, seconds: float, call: Callable[[StormNode], None], node: StormNode) -> None:
        await asyncio.sleep(seconds)
        call(node)

    def _thaw(self, node: StormNode) -> None:
        node.thaw()
        self._thawed(node)

    def _froze(self, node: StormNode) -> None:
        if node.config.role == "router":
            self.router_frozen.append((time.monotonic(), float("inf")))

    def _thawed(self, node: StormNode) -> None:
        if node.config.role == "router" and self.router_frozen and self.router_frozen[-1][1] == float("inf"):
            self.router_frozen.append((self.router_frozen.pop()[0], time.monotonic()))

    async def _client(self, http: aiohttp.ClientSession) -> None:
        while not self._over:
            answer = await self.asked(http, self._asking.choice(self._prompts))
            self.answers.append(answer)
            if answer.verdict != "right":
                await asyncio.sleep(PAUSE_S)

    async def asked(self, http: aiohttp.ClientSession, expected: Known) -> StormAnswer:
        body: dict[str, Any] = {
            "prompt": expected.prompt, "max_tokens": expected.tokens, "temperature": 0, "ignore_eos": True,
            "enable_hisparse": self._kind.hisparse and self._asking.random() < 0.5,
        }  # fmt: skip
        asked, served = time.monotonic(), frozenset[str]()
        try:
            async with http.post("/v1/completions", json=body) as response:
                status, answer = response.status, await response.json()
            verdict, text = judged(expected, status, answer)
            if verdict == "right":
                served = frozenset((answer["pdtransfer"]["prefill"], answer["pdtransfer"]["decode"]))
        except TimeoutError:
            verdict, text = "hung", f"no end within {RECOVERY_S_MAX:.0f} s"
        except (aiohttp.ClientError, ConnectionError) as error:  # the router is dead
            verdict, text = "error", type(error).__name__
        ended = time.monotonic()
        frozen_s = sum(max(0.0, min(end, ended) - max(begin, asked)) for begin, end in self.router_frozen)
        took_s = ended - asked - frozen_s
        if took_s > DEADLINE_MS / 1e3 + SLACK_S:
            verdict, text = "hung", f"a request ended after {took_s:.1f} s: {verdict} {text}"
        return StormAnswer(asked, ended, verdict, text, served)

    def recovered_at(self, healed: float) -> float | None:
        """The moment from which every request is right, once enough are in a row. It is the end of the last one that
        failed, or of the first that each worker served."""
        row: list[StormAnswer] = []
        since = healed
        for answer in reversed(self.answers):
            if answer.ended < healed:
                break
            if answer.verdict != "right":
                since = answer.ended
                break
            row.append(answer)
        row.reverse()
        if len(row) < ROW:
            return None
        for name in self._workers:
            first = next((answer.ended for answer in row if name in answer.served and answer.asked >= healed), None)
            if first is None:
                return None
            since = max(since, first)
        return since if sum(answer.ended >= since for answer in row) >= ROW else None

    @property
    def _workers(self) -> set[str]:
        return self._fleet.workers("prefill") | self._fleet.workers("decode")

    def _lacking(self, healed: float) -> str:
        served = {name for answer in self.answers if answer.asked >= healed for name in answer.served}
        latest = next((answer.text for answer in reversed(self.answers) if answer.verdict != "right"), "no error")
        return f"{', '.join(sorted(self._workers - served)) or 'nobody'} serves nothing; latest error: {latest}"


def judged(expected: Known, status: int, answer: dict[str, Any]) -> tuple[str, str]:
    """How an answer counts: right, a clear error, or wrong; and why."""
    if status == 200:
        digests = {name: answer["pdtransfer"][name] for name in DIGESTS}
        if digests == expected.digests and answer["usage"]["completion_tokens"] == expected.tokens:
            return "right", ""
        return "wrong", f"{len(expected.prompt)} tokens: {answer}, expected {expected.digests}"
    error: dict[str, Any] = answer.get("error") or {}
    if status < 500 or not error.get("message") or not error.get("code"):
        return "wrong", f"status {status} without a cause of the fault: {answer}"
    return "error", f"{status} {error['code']}: {error['message']}"


def measure(
    *, storms: int = 4, seed: int = 1, kinds: Sequence[str] = (), progress: Callable[[str], None] = lambda _: None
) -> list[StormOutcome]:
    """One router, two prefills and two decodes of the stamp engine, with the limits of an operator who sets none but a
    deadline of 10 s. Four clients ask without a pause. In each storm of 4 to 10 s 3 to 9 faults strike at random, each
    a worker, one rank of it or the router. It is killed, and started again 0 to 2 s later, or is stopped for 0.3 to 4 s
    or until the storm is over. Then all is continued and started at once. Recovery is from then on until no request
    fails any more and every worker has served one, seen by 20 right answers in a row. It is reported with the part of
    it in which a process was starting and not yet ready, and with the time at which the last request failed. Digests of
    tokens, logits and KV are compared with a single process's. A request hangs if it has no end 3 s after its deadline,
    not counting a frozen router's time."""
    names = {kind.name: kind for kind in KINDS}
    if unknown := [name for name in kinds if name not in names]:
        raise WorldError(f"kind = {unknown[0]!r}: must be one of {', '.join(names)}")
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[4]))
    outcomes: list[StormOutcome] = []
    for kind in (names[name] for name in kinds or names):
        if kind.transport == "mooncake" and (why := why_not()):
            progress(f"{kind.name}: left out: {why}")
            continue
        outcomes += asyncio.run(_stormed(kind, storms, seed, progress))
    return outcomes


async def _stormed(kind: StormKind, storms: int, seed: int, progress: Callable[[str], None]) -> list[StormOutcome]:
    outcomes: list[StormOutcome] = []
    prompts = known()
    with tempfile.TemporaryDirectory(prefix="pdt-storm-") as directory:
        path = Path(directory)
        async with StormFleet(kind, path, progress) as fleet:
            for number in range(storms):
                outcomes.append(await Storm(fleet, kind, prompts, seed + number).run())
                progress(outcomes[-1].line)
    return outcomes


def rows(outcomes: Sequence[StormOutcome]) -> list[list[str]]:
    """A table: a row for each kind of fleet, and one for all."""
    kinds = list(dict.fromkeys(outcome.kind for outcome in outcomes))
    groups = [(kind, [outcome for outcome in outcomes if outcome.kind == kind]) for kind in kinds]
    return [_row(*group) for group in [*groups, ("all", list(outcomes))]]


def _row(name: str, storm_outcomes: Sequence[StormOutcome]) -> list[str]:
    answers = sum((outcome.answers for outcome in storm_outcomes), Counter[str]())
    times = [
        [outcome.recovery_s for outcome in storm_outcomes],
        [outcome.starting_s for outcome in storm_outcomes],
        [outcome.waiting_s for outcome in storm_outcomes],
        [outcome.failing_s for outcome in storm_outcomes],
    ]
    return [
        name,
        str(len(storm_outcomes)),
        str(sum(outcome.faults.total() for outcome in storm_outcomes)),
        *(f"{answers[verdict]:,}" for verdict in ("right", "error", "wrong", "hung")),
        *(f"{median(seconds):.1f} (max {max(seconds):.1f})" for seconds in times),
    ]


def failed(outcomes: Sequence[StormOutcome]) -> bool:
    """True if an answer was wrong, or none came."""
    return any(outcome.answers["wrong"] or outcome.answers["hung"] for outcome in outcomes)


def show(outcomes: Sequence[StormOutcome]) -> None:
    """Prints it."""
    print_tables([[HEAD, *rows(outcomes)]], width=150, title=f"load {load()}", names=("fleet",))
    for outcome in outcomes:
        for failure in outcome.failures:
            print(f"{outcome.kind}, seed {outcome.seed}: {failure}")
