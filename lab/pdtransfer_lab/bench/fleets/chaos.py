"""Two vLLM engines whose requests are given up, and that are killed and restarted under load: blocks that stay, and
seconds until answers are right. Our connector runs behind our router, beside one of vLLM's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import aiohttp

from pdtransfer.errors import ConfigError, WorldError

from ..report import about, load, print_tables
from .requests import prompts_of
from .servers import HOST, Params, Role, Setup, free_port, healthy, server_process
from .vllm_fleet import CONNECTORS, Vllm, body_of

FAULTS: dict[str, tuple[Role, signal.Signals] | None] = {
    "aborts": None,
    "kill decode": ("decode", signal.SIGKILL),
    "kill prefill": ("prefill", signal.SIGKILL),
    "restart decode": ("decode", signal.SIGTERM),
    "restart prefill": ("prefill", signal.SIGTERM),
}
"""Which server ends, by what."""
SIDES: tuple[Role, Role] = ("prefill", "decode")
CLIENTS = 4
LENGTHS, TOKENS = (65, 129, 300, 512, 700), 16  # of prompts, and tokens to generate
LOAD_S = 5.0  # of load before a fault
GIVEN_UP = 60  # requests, half of which are given up
ROW = 20  # right answers in a row, after which all is right
PAUSE_S = 0.05  # of a client after an error
LOOK_S = 0.25  # between two looks at an engine's blocks
ENDED_S_MAX = 45.0  # a request that has no end so long after a fault counts as hung; our router ends all after 60 s
FREE_S_MAX = 180.0  # blocks that are held so long after a fault count as leaked
RIGHT_S_MAX = 120.0

_BLOCKS = re.compile(r'^vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', re.MULTILINE)
_USED = re.compile(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it ended, by CLOCK_MONOTONIC, and what came of it."""

    ended: float
    verdict: str  # right, error, wrong, given up or hung
    text: str = ""


@dataclass(slots=True)
class Outcome:
    """What one fault has shown. Times in seconds."""

    link: str
    fault: str
    load: float = 0.0  # of the host, when the fault struck
    answers: Counter[str] = field(default_factory=Counter[str])
    ended_s: float = 0.0  # from the fault until no request was under way
    held: int = 0  # blocks that the engines, or the one that lived on, then held
    free_s: float = 0.0  # from the fault until they held none
    leaked: int = 0  # blocks that they held at the end of the wait
    right_s: float | None = 0.0  # from when both engines were healthy until the last answer that was not right
    failures: list[str] = field(default_factory=list[str])


class Pair:
    """A prefill and a decode server, and what stands in front of both."""

    def __init__(self, setup: Setup, link: str, session: aiohttp.ClientSession, processes: ExitStack) -> None:
        self._setup, self._link, self._session, self._processes = setup, link, session, processes
        self._ports = {role: (free_port(), free_port()) for role in SIDES}
        self._running = dict[Role, Any]()
        self._starts = Counter[str]()
        self._router = ""

    def start(self, role: Role) -> None:
        """Starts a server."""
        command, environment = Vllm().command(self._setup, self._link, role, self._ports[role])
        self._running[role] = self._process(role, command, environment | dict(self._setup.environment))

    async def healthy(self) -> None:
        """Both servers answer, and the router if there is one. Raises WorldError where one does not start."""
        for role in SIDES:
            await healthy(self._session, self._url(role), *self._running[role])
        if self._link != Vllm.our_link:
            return
        if not self._router:
            self._router = f"http://{HOST}:{free_port()}"
            command = [
                sys.executable, "-m", "pdtransfer", "router", "--engine", "vllm", "--listen",
                self._router.removeprefix("http://"), "--prefill", self._url("prefill"), "--decode",
                self._url("decode"), "--limits.turn-tokens-max", "0",  # prompts come again, and each is handed over
            ]  # fmt: skip
            self._running["one"] = self._process("router", command, {})
        await healthy(self._session, self._router, *self._running["one"])

    def signal(self, role: Role, number: signal.Signals) -> None:
        """Ends a server: all of its processes at once by SIGKILL, or as its operator does by SIGTERM."""
        process, _ = self._running[role]
        if number is signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)

    async def restart(self, role: Role) -> None:
        """Starts a server in the place of one that was ended, once that has."""
        process, _ = self._running[role]
        await asyncio.to_thread(process.wait)
        self.start(role)

    async def ask(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of a prompt that is handed over. Raises WorldError, and as aiohttp does."""
        if self._router:
            return _tokens(await self._post(self._router, body_of(prompt, TOKENS, None)))
        sends: Params = {"do_remote_decode": True, "do_remote_prefill": False}
        prefilled = await self._post(self._url("prefill"), body_of(prompt, 1, sends))
        params = prefilled.get("kv_transfer_params")
        return _tokens(await self._post(self._url("decode"), body_of(prompt, TOKENS, params)))

    async def computed(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of a prompt that decode computes itself."""
        return _tokens(await self._post(self._url("decode"), body_of(prompt, TOKENS, None)))

    async def held(self, roles: Sequence[Role]) -> int:
        """KV blocks of servers on which no request runs. A server counts them with each step, so it gets one to do."""
        count = 0
        for role in roles:
            await self._post(self._url(role), body_of([5], 2, None))
            await asyncio.sleep(LOOK_S)  # the count follows the answer
            async with self._session.get(f"{self._url(role)}/metrics") as answer:
                text = await answer.text()
            blocks, used = _BLOCKS.search(text), _USED.search(text)
            if blocks is None or used is None:
                raise WorldError(f"{self._url(role)}: no count of its blocks among its metrics")
            count += round(float(used[1]) * (int(blocks[1]) - 1))  # one is vLLM's own
        return count

    def _process(self, name: str, command: list[str], environment: dict[str, str]) -> Any:
        self._starts[name] += 1
        log = self._setup.logs / f"{self._link}-{name}-{self._starts[name]}.log"
        return self._processes.enter_context(server_process(command, environment, log)), log

    def _url(self, role: Role) -> str:
        return f"http://{HOST}:{self._ports[role][0]}"

    async def _post(self, url: str, body: Params) -> Params:
        async with self._session.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}) as answer:
            if answer.status != 200:
                raise WorldError(f"{answer.status}: {(await answer.text())[:200]}")
            return await answer.json()


class Load:
    """Clients that ask a pair without a pause while they `run`, and what they got."""

    def __init__(self, pair: Pair, expected: dict[tuple[int, ...], list[int]], seed: int) -> None:
        self._pair, self._expected = pair, expected
        self._draw = random.Random(seed)  # noqa: S311
        self.answers: list[Asked] = []
        self._over = False
        self._clients: list[asyncio.Task[None]] = []

    def begin(self, give_up_s: float | None = None) -> None:
        """Clients begin to ask; with `give_up_s` half of the requests are given up within that time."""
        self._over = False
        self._clients = [asyncio.create_task(self._client(give_up_s)) for _ in range(CLIENTS)]

    async def end(self) -> None:
        """No more requests; returns when those under way have ended, one way or another."""
        self._over = True
        _, hung = await asyncio.wait(self._clients, timeout=ENDED_S_MAX)
        for client in hung:
            client.cancel()
            self.answers.append(Asked(time.monotonic(), "hung", f"no end within {ENDED_S_MAX:.0f} s"))
        await asyncio.gather(*hung, return_exceptions=True)

    async def until(self, count: int) -> None:
        """Waits until this many requests have ended."""
        while len(self.answers) < count:  # noqa: ASYNC110
            await asyncio.sleep(PAUSE_S)

    async def _client(self, give_up_s: float | None) -> None:
        while not self._over:
            prompt = self._draw.choice(list(self._expected))
            limit = None
            if give_up_s is not None and self._draw.random() < 0.5:
                limit = self._draw.uniform(0.0, give_up_s)
            answer = await self._asked(prompt, limit)
            self.answers.append(answer)
            if answer.verdict == "error":
                await asyncio.sleep(PAUSE_S)

    async def _asked(self, prompt: tuple[int, ...], limit_s: float | None) -> Asked:
        try:
            async with asyncio.timeout(limit_s):
                tokens = await self._pair.ask(prompt)
        except TimeoutError:
            return Asked(time.monotonic(), "given up" if limit_s is not None else "error", "TimeoutError")
        except (OSError, aiohttp.ClientError, WorldError) as error:
            return Asked(time.monotonic(), "error", str(error) or type(error).__name__)
        if tokens == self._expected[prompt]:
            return Asked(time.monotonic(), "right")
        return Asked(time.monotonic(), "wrong", f"{tokens} of {len(prompt)} tokens, not {self._expected[prompt]}")


def right_after(answers: Sequence[Asked], since: float) -> float | None:
    """The seconds from `since` until the end of the last answer that was not right, once enough were right in a row;
    None before that."""
    row = 0
    for answer in reversed(answers):
        if answer.ended < since:
            break
        if answer.verdict != "right":
            return answer.ended - since if row >= ROW else None
        row += 1
    return 0.0 if row >= ROW else None


def measure(
    setup: Setup, *, links: Sequence[str], faults: Sequence[str], rounds: int, progress: Callable[[str], None]
) -> list[Outcome]:
    """One prefill and one decode server of vLLM on this host, with a failed load recomputed by decode
    (`kv_load_failure_policy`). Four clients ask without a pause for 16 greedy tokens of random prompts of 65 to 700
    tokens, the same for every connector. Ours stands behind our router, the other is asked as its own proxy asks:
    prefill, and then decode with what prefill has returned. All connectors' servers run at the same time, and a fault
    strikes one connector after the other: other load of the host is much the same for all. Tokens are compared
    with those that decode computes alone. An answer whose `finish_reason` is `abort` is an error.

    *Aborts*: of 60 requests half are given up, each within twice the time that one takes in quiet, on average. *Kill*:
    after 5 s of load all processes of a server end by SIGKILL; *restart*: by SIGTERM. No request is sent from then on.
    *Ended* is the time until those under way have ended; one that has no end within 45 s counts as hung. *Held* are KV
    blocks, by vLLM's own metric, of the server that lives on; after aborts, of both. *Free* is the time from the fault
    until it has none. Blocks that are held after 180 s count as leaked. Then a server starts at the same address, and
    clients ask again as soon as it is healthy. *Right* is from then until the last answer that is not right, seen by 20
    right ones in a row."""
    for fault in faults:
        if fault not in FAULTS:
            raise ConfigError(f"fault = {fault!r}: must be one of {', '.join(FAULTS)}")
    for link in links:
        if link not in CONNECTORS:
            raise ConfigError(f"connector = {link!r}: must be one of {', '.join(CONNECTORS)}")
    setup = replace(setup, transfer={"kv_load_failure_policy": "recompute"})
    return asyncio.run(_measured(setup, links, faults, rounds, progress))


async def _measured(
    setup: Setup, links: Sequence[str], faults: Sequence[str], rounds: int, progress: Callable[[str], None]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    prompts = [prompt for length in LENGTHS for prompt in prompts_of(2, length, setup.vocabulary, "chaos")]
    async with AsyncExitStack() as stack:
        pairs = {link: await stack.enter_async_context(_started(setup, link)) for link in links}
        expected: dict[str, dict[tuple[int, ...], list[int]]] = {}
        quiet_s: dict[str, float] = {}
        for link, pair in pairs.items():
            expected[link] = {tuple(prompt): await pair.computed(prompt) for prompt in prompts}
            await pair.ask(prompts[0])  # with the first one both engines meet
            asked = time.monotonic()
            for prompt in prompts:
                await pair.ask(prompt)
            quiet_s[link] = (time.monotonic() - asked) / len(prompts)
            progress(f"{link}: {quiet_s[link]:.2f} s a request in quiet")
        for number, fault, (link, pair) in product(range(rounds), faults, pairs.items()):
            outcome = Outcome(link, fault)
            await _faulted(pair, outcome, expected[link], quiet_s=quiet_s[link], seed=number)
            outcomes.append(outcome)
            progress(" ".join(_row([outcome])))
            for failure in outcome.failures:
                progress(f"{link}, {fault}: {failure}")
    return outcomes


@contextlib.asynccontextmanager
async def _started(setup: Setup, link: str) -> AsyncGenerator[Pair]:
    async with AsyncExitStack() as stack:
        processes = ExitStack()
        stack.push_async_callback(asyncio.to_thread, processes.close)
        # A connection that is kept may be that of a server which has been killed.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        pair = Pair(setup, link, session, processes)
        for role in SIDES:
            pair.start(role)
        await pair.healthy()
        yield pair


async def _faulted(
    pair: Pair, outcome: Outcome, expected: dict[tuple[int, ...], list[int]], *, quiet_s: float, seed: int
) -> None:
    clients, ending = Load(pair, expected, seed), FAULTS[outcome.fault]
    if ending is None:
        clients.begin(give_up_s=2 * quiet_s)
        await clients.until(GIVEN_UP)
    else:
        clients.begin()
        await asyncio.sleep(LOAD_S)
        pair.signal(*ending)
    struck, outcome.load = time.monotonic(), os.getloadavg()[0]
    await clients.end()
    outcome.ended_s = time.monotonic() - struck
    left: list[Role] = [role for role in SIDES if ending is None or role != ending[0]]
    outcome.held = outcome.leaked = await pair.held(left)
    while outcome.leaked and time.monotonic() < struck + FREE_S_MAX:
        outcome.leaked = await pair.held(left)
    outcome.free_s = time.monotonic() - struck
    if ending is not None:
        await pair.restart(ending[0])
    await pair.healthy()
    healthy_s = time.monotonic()
    clients.begin()
    right_s = None
    while right_s is None and time.monotonic() < healthy_s + RIGHT_S_MAX:
        await asyncio.sleep(PAUSE_S)
        right_s = right_after(clients.answers, healthy_s)
    outcome.right_s = right_s
    await clients.end()
    outcome.answers.update(answer.verdict for answer in clients.answers)
    outcome.failures += [answer.text for answer in clients.answers if answer.verdict in ("wrong", "hung", "error")][:5]


HEAD = [
    "connector", "fault", "times", "load", "right", "with an error", "wrong", "hung", "given up", "ended, s",
    "blocks held", "free after, s", "leaked", "right after, s",
]  # fmt: skip


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A row for each connector and fault; of several times sums of requests and blocks, and the longest time."""
    kinds = list(dict.fromkeys((outcome.link, outcome.fault) for outcome in outcomes))
    return [_row([outcome for outcome in outcomes if (outcome.link, outcome.fault) == kind]) for kind in kinds]


def _row(some: Sequence[Outcome]) -> list[str]:
    answers = sum((outcome.answers for outcome in some), Counter[str]())
    right_s = [outcome.right_s for outcome in some]
    return [
        some[0].link, some[0].fault, str(len(some)), ", ".join(f"{outcome.load:.0f}" for outcome in some),
        *(f"{answers[verdict]:,}" for verdict in ("right", "error", "wrong", "hung", "given up")),
        f"{max(outcome.ended_s for outcome in some):.1f}",
        str(sum(outcome.held for outcome in some)),
        f"{max(outcome.free_s for outcome in some):.1f}",
        str(sum(outcome.leaked for outcome in some)),
        "never" if None in right_s else f"{max(filter(None, right_s), default=0.0):.1f}",
    ]  # fmt: skip


def failed(outcomes: Sequence[Outcome]) -> bool:
    """True if an answer was wrong, or none came."""
    return any(outcome.answers["wrong"] or outcome.answers["hung"] for outcome in outcomes)


def show(outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    """Prints it."""
    table = [HEAD, *rows(outcomes)]
    if as_json:
        print(json.dumps({"tables": [table]} | about(measure)))
    else:
        print_tables([table], width=180, title=f"load {load()}", names=("connector",))


def _tokens(answer: Params) -> list[int]:
    """Raises WorldError for an answer that its server has cut off, as vLLM does when it is stopped."""
    choice = answer["choices"][0]
    if choice.get("finish_reason") == "abort":
        raise WorldError(f"aborted after {len(choice['token_ids'])} tokens")
    return choice["token_ids"]
