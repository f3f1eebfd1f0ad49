"""Real engines, vLLM's or SGLang's: one, beside prefill and decode engines with KV transfer, ours and theirs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from json import dumps
from math import nan
from pathlib import Path
from typing import Any

import aiohttp

from pdtransfer.errors import ConfigError, PDTransferError

from ..report import about, print_tables
from ..shapes import make_model
from .requests import drive, figure, middle, option, p99, prompts_of
from .servers import Answer, Engine, Fleet, Setup, running
from .sglang_fleet import Sglang
from .vllm_fleet import Vllm

ENGINES: dict[str, Engine] = {"vllm": Vllm(), "sglang": Sglang()}

ONE = "one engine"
STREAMS = 8  # of decode, beside which prompts are handed over
STREAM_PROMPT, STREAM_TOKENS = 256, 2_000
BESIDE_PROMPTS, BESIDE_TOKENS = 12, 64 << 10  # prompts of a round: this many, or with this many tokens if that is more
BESIDE_CLIENTS, BESIDE_ROUNDS = 2, 2
SHORT_PROMPT = 1  # computed as any step of decode is
FEWEST, WARM = 5, 2  # requests of a cell, if their tokens fit at once; and before it


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests of one kind: `clients` send `requests` prompts of `prompt` tokens, each the next one after its last."""

    prompt: int
    clients: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a fleet did in one cell. Times in ms; NaN where there are none."""

    fleet: str
    prompt: int
    clients: int
    requests: int
    failed: int
    identical: int | None  # requests whose tokens are those of the one engine, if that was measured
    ttft_ms: float
    ttft_ms_p99: float
    gap_ms: float
    gap_ms_p99: float
    tokens_s: float
    cpu_ms: float  # of prefill's threads but the main ones, a request
    prefill_ms: float  # from asking until prefill has computed the prompt
    handoff_ms: float
    handoff_ms_p99: float
    exposed_ms: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The first requests of a fresh fleet, one after the other. Times in ms."""

    fleet: str
    prompt: int
    requests: int
    failed: int
    ttft_ms: float
    ttft_ms_p99: float
    slowest_ms: float
    slowest_at: int  # its number, from 1
    handoff_ms: float
    handoff_ms_p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the processes of a server hold of the host's memory once requests have run, in GiB."""

    fleet: str
    role: str
    anonymous: float
    shared: float  # memfds, and what is pinned for a GPU
    start_s: float  # until it answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Decode's streams while prefill computes prompts: that stay there, and that are handed over. Times in ms."""

    fleet: str
    prompt: int
    gap_ms: float
    gap_ms_p99: float
    gap_beside_ms: float
    gap_beside_ms_p99: float
    prefill_s: float  # of all prompts that stay
    prefill_beside_s: float
    failed: int


@dataclass(slots=True)
class Result:
    """All rows, in the order in which they were measured."""

    rows: list[Row] = field(default_factory=list[Row])
    first: list[First] = field(default_factory=list[First])
    memory: list[Memory] = field(default_factory=list[Memory])
    beside: list[Beside] = field(default_factory=list[Beside])
    metrics: dict[str, float] = field(default_factory=dict[str, float])  # of our link, on decode
    broken: dict[str, str] = field(default_factory=dict[str, str])  # fleets that did not run, or not to the end


def setup_of(
    model: str, options: Sequence[str], python: Path, cards: Sequence[str], settings: Sequence[str],
    environment: Sequence[str], logs: Path, *, prefill_options: Sequence[str] = (), decode_options: Sequence[str] = (),
    hisparse_gib: float = 0.0,
) -> Setup:  # fmt: skip
    """A run's setup, from a command line; `logs` is made, and a model that is only dimensions in it. Raises
    ConfigError."""
    logs.mkdir(parents=True, exist_ok=True)
    path = Path(model)
    if not path.is_dir():
        path = make_model(model, logs / model)
        options = ("--load-format", "dummy", *options)
    if not python.exists():
        raise ConfigError(f"python = {str(python)!r}: is not there; make venv-vllm or venv-sglang makes one")
    try:
        extra = {name: json.loads(value) for name, value in map(option, settings)}
    except ValueError as error:
        raise ConfigError(f"setting: {error}") from None
    vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
    return Setup(
        python=python, model=path, options=tuple(options), cards=tuple(cards), extra=extra, logs=logs,
        environment=dict(map(option, environment)), vocabulary=vocabulary, prefill_options=tuple(prefill_options),
        decode_options=tuple(decode_options), hisparse_gib=hisparse_gib,
    )  # fmt: skip


def cells(prompts: Sequence[int], clients: Sequence[int], requests_each: int, at_once_max: int) -> list[Cell]:
    """Every prompt length with every number of clients; a cell with more tokens at once than fit is left out.

    A cell has five requests, or `requests_each` of every client; fewer if they have more tokens, but one of every
    client."""
    return [
        Cell(prompt, number, max(number, min(max(FEWEST, number * requests_each), at_once_max // prompt)))
        for prompt in prompts
        for number in clients
        if prompt * number <= at_once_max
    ]


def measure(
    setup: Setup, *, engine: Engine, fleets: Sequence[str], first: int, cells: Sequence[Cell], tokens: int,
    beside: Sequence[int], out: Path | None, progress: Callable[[str], None],
) -> Result:  # fmt: skip
    """Servers are the engine's own, a process a GPU; clients are in this process and take streams, greedily, with
    EOS ignored. Prompts are random token ids, the same for all fleets; prefix caches are off unless options say
    otherwise. One engine has the first GPU. Of two engines, prefill has the first GPU and decode the second. vLLM's
    prefill is asked for one token. A connector that lets decode be asked before prefill has answered is asked at once,
    the others one after the other, each as its own proxy does. SGLang's servers both get each request at once. Before
    each cell two prompts of its length run at once, uncounted.

    *Hand-off* is from the end of prefill's computation to decode's first token at the client. vLLM's prefill answers
    when it has computed; SGLang's, which answers later, reports the time in its answer.
    *Exposed* is the median time to the first token less that of the one engine, in the same cell. *ITL* is between
    chunks of a stream. *Identical* counts requests with the tokens of the one engine. *Prefill's CPU* is that of
    threads of prefill's processes, or of the one engine's, which are no main thread, over the requests of the cell.

    *First*: before all else, `first` prompts of the first cell's length, one after the other, from the first one on.
    *Memory*: of all processes of a server, from /proc/PID/status, at the end.

    *Beside*: eight streams of decode, while two clients keep prefill busy with prompts. These stay there, and for each
    decode gets a prompt of one token of its own; or they are handed over, for one token. Two rounds each, in turn; gaps
    of both rounds, and the sum of the times that prefill took.
    """
    for name in fleets:
        if name not in (ONE, *engine.links):
            raise ConfigError(f"fleet = {name!r}: must be {ONE!r} or one of {', '.join(engine.links)}")
    return asyncio.run(_measure(setup, engine, fleets, first, cells, tokens, beside, out, progress))


async def _measure(
    setup: Setup, engine: Engine, fleets: Sequence[str], first: int, cells: Sequence[Cell], tokens: int,
    beside: Sequence[int], out: Path | None, progress: Callable[[str], None],
) -> Result:  # fmt: skip
    result = Result()
    expected: dict[Cell, list[list[int]]] = {}
    firsts: dict[Cell, float] = {}

    def keep(kind: str, figures: Any) -> None:
        if out is not None:
            with out.open("a") as file:
                file.write(dumps({"kind": kind, **figures}) + "\n")
        progress(f"{kind}: {figures}")

    for name in fleets:
        began = time.monotonic()
        try:
            async with running(setup, engine, None if name == ONE else name) as fleet:
                progress(f"{name}: started in {time.monotonic() - began:.0f} s")
                if first:
                    result.first.append(
                        first_requests := await _first(name, fleet, setup, cells[0].prompt, first, tokens)
                    )
                    keep("first", asdict(first_requests))
                for cell in cells:
                    result.rows.append(row := await _cell(name, fleet, setup, cell, tokens, expected, firsts))
                    keep("row", asdict(row))
                for prompt in beside if name != ONE else ():
                    result.beside.append(measured := await _beside(name, fleet, setup, prompt))
                    keep("beside", asdict(measured))
                for role, (anonymous, shared, start_s) in fleet.memory().items():
                    memory = Memory(fleet=name, role=role, anonymous=anonymous, shared=shared, start_s=start_s)
                    result.memory.append(memory)
                    keep("memory", asdict(memory))
                if name == engine.our_link:
                    result.metrics = await fleet.metrics(engine.our_metrics)
                    keep("metrics", result.metrics)
        except (PDTransferError, OSError, aiohttp.ClientError, TimeoutError, KeyError) as error:
            result.broken[name] = str(error) or repr(error)
            keep("broken", {"fleet": name, "error": result.broken[name]})
    return result


async def _first(name: str, fleet: Fleet, setup: Setup, prompt: int, requests: int, tokens: int) -> First:
    prompts = prompts_of(requests, prompt, setup.vocabulary, seed=3)
    answers = await drive(prompts, 1, lambda prompt: fleet.ask(prompt, min(tokens, 4)))
    right = [answer for answer in answers if not answer.error]
    ttft = [1e3 * answer.ttft_s for answer in right]
    hand_offs = [1e3 * (answer.chunks_s[0] - answer.prefilled_s) for answer in right if answer.prefilled_s is not None]
    return First(
        fleet=name, prompt=prompt, requests=requests, failed=len(answers) - len(right), ttft_ms=middle(ttft),
        ttft_ms_p99=p99(ttft), slowest_ms=max(ttft, default=nan), handoff_ms=middle(hand_offs),
        slowest_at=1 + ttft.index(max(ttft)) if ttft else 0, handoff_ms_p99=p99(hand_offs),
    )  # fmt: skip


async def _cell(
    name: str, fleet: Fleet, setup: Setup, cell: Cell, tokens: int, expected: dict[Cell, list[list[int]]],
    firsts: dict[Cell, float],
) -> Row:  # fmt: skip
    warm = prompts_of(WARM, cell.prompt, setup.vocabulary, seed=1)
    await drive(warm, WARM, lambda prompt: fleet.ask(prompt, min(tokens, 4)))
    prompts = prompts_of(cell.requests, cell.prompt, setup.vocabulary, seed=2)
    began, cpu_s = time.monotonic(), fleet.threads_cpu_s()
    answers = await drive(prompts, cell.clients, lambda prompt: fleet.ask(prompt, tokens))
    seconds, cpu_s = time.monotonic() - began, fleet.threads_cpu_s() - cpu_s
    right = [answer for answer in answers if not answer.error]
    ttft = [1e3 * answer.ttft_s for answer in right]
    gaps = [1e3 * gap for answer in right for gap in answer.gaps_s]
    hand_offs = [1e3 * (answer.chunks_s[0] - answer.prefilled_s) for answer in right if answer.prefilled_s is not None]
    prefills = [1e3 * (answer.prefilled_s - answer.asked_s) for answer in right if answer.prefilled_s is not None]
    if name == ONE:
        expected[cell], firsts[cell] = [answer.tokens for answer in answers], middle(ttft)
    same = None
    if cell in expected:
        same = sum(
            not answer.error and answer.tokens == tokens for answer, tokens in zip(answers, expected[cell], strict=True)
        )
    return Row(
        fleet=name, prompt=cell.prompt, clients=cell.clients, requests=cell.requests, failed=len(answers) - len(right),
        identical=same, ttft_ms=middle(ttft), ttft_ms_p99=p99(ttft),
        gap_ms=middle(gaps), gap_ms_p99=p99(gaps), tokens_s=sum(len(answer.tokens) for answer in right) / seconds,
        cpu_ms=1e3 * cpu_s / cell.requests, prefill_ms=middle(prefills), handoff_ms=middle(hand_offs),
        handoff_ms_p99=p99(hand_offs),
        exposed_ms=middle(ttft) - firsts.get(cell, nan) if name != ONE else nan,
        error=next((answer.error for answer in answers if answer.error), ""),
    )  # fmt: skip


async def _beside(name: str, fleet: Fleet, setup: Setup, prompt: int) -> Beside:
    gaps: dict[bool, list[float]] = {False: [], True: []}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    failed = 0
    for number in range(BESIDE_ROUNDS):
        for handed in (False, True):
            round_gaps, took, errors = await _beside_round(fleet, setup, prompt, handed=handed, seed=10 + number)
            gaps[handed] += round_gaps
            seconds[handed].append(took)
            failed += errors
    return Beside(
        fleet=name, prompt=prompt, gap_ms=middle(gaps[False]), gap_ms_p99=p99(gaps[False]),
        gap_beside_ms=middle(gaps[True]), gap_beside_ms_p99=p99(gaps[True]), prefill_s=sum(seconds[False]),
        prefill_beside_s=sum(seconds[True]), failed=failed,
    )  # fmt: skip


async def _beside_round(
    fleet: Fleet, setup: Setup, prompt: int, *, handed: bool, seed: int
) -> tuple[list[float], float, int]:
    """The gaps of decode's streams in ms, the time that prefill took in s, and how many prompts failed."""
    streams = [Answer(time.monotonic()) for _ in range(STREAMS)]
    texts = prompts_of(STREAMS, STREAM_PROMPT, setup.vocabulary, seed)
    background = [
        asyncio.create_task(fleet.decode_alone(text, STREAM_TOKENS, into))
        for text, into in zip(texts, streams, strict=True)
    ]
    while not all(stream.chunks_s or stream.error for stream in streams):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    left = iter(prompts_of(max(BESIDE_PROMPTS, BESIDE_TOKENS // prompt), prompt, setup.vocabulary, seed))
    short = prompts_of(1, SHORT_PROMPT, setup.vocabulary, seed)[0]
    rests: list[asyncio.Task[Any]] = []
    answers: list[Answer] = []

    async def client() -> None:
        for prompt in left:
            if handed:
                answer, rest = await fleet.hand_over(prompt, 1)
                answers.append(answer)
                rests.append(rest)
            else:
                await fleet.prefill_alone(prompt)
                rests.append(asyncio.create_task(fleet.decode_alone(short, 1)))

    await asyncio.sleep(0.2)
    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(BESIDE_CLIENTS)))
    took = time.monotonic() - began
    await asyncio.gather(*rests)
    ended = time.monotonic()
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    gaps = [
        1e3 * (after - before)
        for stream in streams
        for before, after in zip(stream.chunks_s, stream.chunks_s[1:], strict=False)
        if before >= began and after <= ended
    ]
    await asyncio.sleep(0.5)  # both engines are idle again
    return gaps, took, sum(bool(answer.error) for answer in (*answers, *streams))


def tables(result: Result) -> list[list[list[str]]]:
    """The tables that have rows, each with its head first."""
    rows = [["fleet", "prompt", "clients", "requests", "failed", "identical", "TTFT p50, ms", "p99", "ITL p50, ms",
             "p99", "tokens/s", "prefill's CPU, ms", "prefill p50, ms", "hand-off p50, ms", "p99",
             "exposed, ms"]]  # fmt: skip
    rows += [
        [row.fleet, f"{row.prompt:,}", str(row.clients), str(row.requests), str(row.failed),
         "-" if row.identical is None else str(row.identical),
         *map(figure, (row.ttft_ms, row.ttft_ms_p99, row.gap_ms, row.gap_ms_p99, row.tokens_s, row.cpu_ms,
                        row.prefill_ms, row.handoff_ms, row.handoff_ms_p99, row.exposed_ms))]
        for row in result.rows
    ]  # fmt: skip
    first = [["fleet", "prompts of", "first requests", "failed", "TTFT p50, ms", "p99", "slowest", "its number",
              "hand-off p50, ms", "p99"]]  # fmt: skip
    first += [
        [first.fleet, f"{first.prompt:,}", str(first.requests), str(first.failed),
         *map(figure, (first.ttft_ms, first.ttft_ms_p99, first.slowest_ms)), str(first.slowest_at),
         *map(figure, (first.handoff_ms, first.handoff_ms_p99))]
        for first in result.first
    ]  # fmt: skip
    memory = [["fleet", "server", "anonymous, GiB", "shared or pinned, GiB", "answered after, s"]]
    memory += [
        [usage.fleet, usage.role, f"{usage.anonymous:.2f}", f"{usage.shared:.2f}", f"{usage.start_s:.1f}"]
        for usage in result.memory
    ]
    beside = [["fleet", "prompts of", "ITL p50, ms", "beside", "ITL p99, ms", "beside", "slowed", "prefill, s",
               "beside", "slowed", "failed"]]  # fmt: skip
    beside += [
        [pair.fleet, f"{pair.prompt:,}", *map(figure, (pair.gap_ms, pair.gap_beside_ms, pair.gap_ms_p99,
         pair.gap_beside_ms_p99)), f"{pair.gap_beside_ms_p99 / pair.gap_ms_p99 - 1:+.1%}",
         *map(figure, (pair.prefill_s, pair.prefill_beside_s)), f"{pair.prefill_beside_s / pair.prefill_s - 1:+.1%}",
         str(pair.failed)]
        for pair in result.beside
    ]  # fmt: skip
    broken = [["fleet", "did not run to its end"], *([name, text] for name, text in result.broken.items())]
    ours = [["decode's metric", "value"], *([name, f"{value:g}"] for name, value in sorted(result.metrics.items()))]
    return [table for table in (rows, first, memory, beside, broken, ours) if len(table) > 1]


def show(result: Result, *, as_json: bool) -> int:
    """Prints it. Returns a command's status: 1 if nothing was measured."""
    shown = tables(result)
    if as_json:
        print(json.dumps({"tables": shown} | about(measure)))
        return 0 if result.rows else 1
    print_tables(shown, width=180)
    return 0 if result.rows else 1
