"""A checkpoint behind the daemons, computed by transformers: times and tokens a second, beside its own `generate`."""

# pyright: basic

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from pdtransfer.errors import ConfigError, WorldError
from pdtransfer.limits import Limits
from pdtransfer.serve.process.fleet import Fleet
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.serve.tracing.merge_traces import files, merge, rooms_of
from pdtransfer.serve.tracing.trace import read
from pdtransfer.serve.tracing.ttft import Split

from ..report import about, print_tables
from ..shapes import make_model
from .requests import drive, figure, middle, p99, prompts_of

PAGE_SIZE = 64
ANSWER_S = 400.0
SETTLE_S = 1.5  # timelines are written in batches
_WARM = 2  # requests before each cell
_LIMITS = Limits(room_deadline_ms=600_000, silence_ms=20_000)  # requests are what is measured here


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is served and how much is asked of it."""

    model: Path
    options: Mapping[str, str]  # of the engine
    devices: tuple[str, str]  # prefill's and decode's
    logs: Path
    prompts: tuple[int, ...]  # tokens of a prompt
    clients: tuple[int, ...]
    requests: int  # of each client
    tokens: int
    chunk_tokens: int
    slots: int
    check: int  # prompts whose tokens are compared with those of `generate`

    @property
    def vocabulary(self) -> int:
        return int(json.loads((self.model / "config.json").read_text())["vocab_size"])


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneTimes:
    """`generate` of one process, for one length of a prompt. Times in ms."""

    prompt: int
    ttft_ms: float
    gap_ms: float
    tokens_s: float
    identical: int  # of the fleet's answers to the same prompts
    checked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCell:
    """What the daemons did for one length and number of clients. Times in ms; NaN where there are none."""

    prompt: int
    clients: int
    requests: int
    failed: int
    ttft_ms: float
    ttft_ms_p99: float
    gap_ms: float
    gap_ms_p99: float
    tokens_s: float
    compute_ms: float
    exposed_ms: float
    exposed_percent: float  # of compute
    tail_ms: float
    step_ms: float
    error: str


@dataclass(slots=True)
class CheckpointFigures:
    """All rows."""

    alone: list[AloneTimes] = field(default_factory=list[AloneTimes])
    served: list[ServedCell] = field(default_factory=list[ServedCell])
    start_s: float = nan


@dataclass(slots=True)
class _Asked:
    """One request: when it was asked, when its tokens came, and what the router reports of it."""

    asked_s: float
    chunks_s: list[float] = field(default_factory=list[float])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""


def model_of(model: str, logs: Path) -> Path:
    """A model's directory, made in `logs` where only its dimensions are named. Raises ConfigError."""
    path = Path(model)
    return path if path.is_dir() else make_model(model, logs / model)


def measure(wanted: Measured, *, progress: Callable[[str], None]) -> CheckpointFigures:
    """Daemons and a router on this host, as a user starts them; clients are in this process and take streams, greedily,
    with EOS ignored. Prompts are random token ids, each asked once, so no prefix is cached. Before each cell two
    requests run at once, uncounted.

    *Alone* is `generate` of transformers in one process on prefill's device, one request at a time. It has the time of
    one token, of all, and of each further one; medians of three. *Identical* counts the daemons' answers with
    `generate`'s tokens, for some prompts of each length that are asked one by one.

    *ITL* is between chunks of a stream. *Tokens a second* are all generated ones of a cell over its whole time, prompts
    included. The timelines give medians over a cell's requests. *Compute* is from a prompt's first layer to its first
    token, *exposed* from there to READY, *tail* from the last layer's end to READY. *Step* is decode's.
    """
    figures = CheckpointFigures()
    alone, digests = _alone(wanted, progress)
    asyncio.run(_served(wanted, figures, alone, digests, progress))
    return figures


def _checked(wanted: Measured, prompt: int) -> list[list[int]]:
    return prompts_of(wanted.check, prompt, wanted.vocabulary, "check")


def _alone(
    wanted: Measured, progress: Callable[[str], None]
) -> tuple[dict[int, tuple[float, float, float]], dict[int, list[str]]]:
    """By the prompt's length: ms to the first token, ms to each further one, tokens/s; and digests of tokens. In a
    process of its own, whose memory on a GPU is free afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_generate, args=(wanted, theirs), daemon=True)
    child.start()
    theirs.close()
    times: dict[int, tuple[float, float, float]] = {}
    digests: dict[int, list[str]] = {}
    try:
        for prompt in wanted.prompts:
            times[prompt], digests[prompt] = ours.recv()
            progress(f"generate, {prompt:,} tokens: {times[prompt]}")
    except EOFError:
        raise WorldError("generate: its process ended; its error stands above") from None
    finally:
        child.join()
    return times, digests


def _generate(wanted: Measured, to: Connection) -> None:
    """The child's whole life."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pdtransfer.serve.sampling import tokens_digest

    device: Any = torch.device(wanted.devices[0])
    options = wanted.options
    if options.get("threads", "0") != "0":
        torch.set_num_threads(int(options["threads"]))
    config = AutoConfig.from_pretrained(wanted.model)
    kind = options.get("dtype", "auto")
    dtype = config.dtype if kind == "auto" else getattr(torch, kind)
    if options.get("weights") == "random":
        torch.manual_seed(int(options.get("seed", "0")))
        with device:
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(wanted.model, dtype=dtype).to(device)
    model.eval()
    model.generation_config.eos_token_id = None  # as requests ignore it

    def timed(prompt: Sequence[int], count: int) -> tuple[float, list[int]]:
        ids = torch.tensor([prompt], device=device)
        began = time.perf_counter()
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0,
        )  # fmt: skip
        tokens = output[0, len(prompt) :].tolist()  # waits for the GPU
        return time.perf_counter() - began, tokens

    with torch.inference_mode():
        for length in wanted.prompts:
            prompts = prompts_of(3, length, wanted.vocabulary, "alone")
            timed(prompts[0], 4)
            firsts, wholes = ([timed(prompt, count)[0] for prompt in prompts] for count in (1, wanted.tokens))
            first, whole = median(firsts), median(wholes)
            gap = (whole - first) / max(1, wanted.tokens - 1)
            digests = [tokens_digest(timed(prompt, wanted.tokens)[1]).hex() for prompt in _checked(wanted, length)]
            to.send(((1e3 * first, 1e3 * gap, wanted.tokens / whole), digests))


async def _served(
    wanted: Measured, figures: CheckpointFigures, alone: Mapping[int, tuple[float, float, float]],
    digests: Mapping[int, Sequence[str]], progress: Callable[[str], None],
) -> None:  # fmt: skip
    traces = wanted.logs / "timelines"
    traces.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    async with _fleet(wanted, traces) as fleet:
        figures.start_s = time.monotonic() - began
        progress(f"daemons started in {figures.start_s:.0f} s")
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            for prompt, (ttft, gap, rate) in alone.items():
                answers = await drive(
                    _checked(wanted, prompt), 1, lambda prompt: _ask(session, fleet.url, prompt, wanted.tokens)
                )
                pairs = zip(answers, digests[prompt], strict=True)
                same = sum(not answer.error and answer.facts.get("tokens_digest") == digest for answer, digest in pairs)
                times = AloneTimes(
                    prompt=prompt, ttft_ms=ttft, gap_ms=gap, tokens_s=rate, identical=same, checked=len(answers)
                )
                figures.alone.append(times)
                progress(f"{times}")
            for prompt in wanted.prompts:
                for clients in wanted.clients:
                    if clients * (prompt + wanted.tokens) > wanted.slots:
                        continue
                    cell, answers, seconds = await _cell(session, fleet.url, wanted, prompt, clients)
                    figures.served.append(_row(cell, clients, answers, seconds, await _splits(traces)))
                    progress(f"{figures.served[-1]}")


def _fleet(wanted: Measured, traces: Path) -> Fleet:
    options = tuple(f"{name}={value}" for name, value in wanted.options.items())
    model, limits = str(wanted.model), _LIMITS
    prefill = PrefillConfig(
        bind="tcp://127.0.0.1:0", listen="127.0.0.1:0", node="prefill", model=model, engine_option=options,
        slots=wanted.slots, page_size=PAGE_SIZE, device=wanted.devices[0], chunk_tokens=wanted.chunk_tokens,
        timeline=traces, limits=limits,
    )  # fmt: skip
    decode = DecodeConfig(
        bind="tcp://127.0.0.1:0", listen="127.0.0.1:0", node="decode", model=model, engine_option=options,
        slots=wanted.slots, host_layout="layer_first", device=wanted.devices[1], batch_max=max(wanted.clients),
        timeline=traces, limits=limits, socket_directory=wanted.logs / "sockets",
    )  # fmt: skip
    router = RouterConfig(listen="127.0.0.1:0", node="router", model=model, limits=limits, timeline=traces)
    return Fleet([prefill], [decode], router, wanted.logs)


async def _cell(
    session: aiohttp.ClientSession, url: str, wanted: Measured, prompt: int, clients: int
) -> tuple[int, list[_Asked], float]:
    warm = prompts_of(_WARM, prompt, wanted.vocabulary, f"warm {clients}")
    await drive(warm, _WARM, lambda prompt: _ask(session, url, prompt, min(wanted.tokens, 8)))
    prompts = prompts_of(clients * wanted.requests, prompt, wanted.vocabulary, f"cell {clients}")
    began = time.monotonic()
    answers = await drive(prompts, clients, lambda prompt: _ask(session, url, prompt, wanted.tokens))
    return prompt, answers, time.monotonic() - began


def _row(
    prompt: int, clients: int, answers: Sequence[_Asked], seconds: float, splits: Mapping[str, Split]
) -> ServedCell:
    right = [answer for answer in answers if not answer.error]
    ttft = [1e3 * (answer.chunks_s[0] - answer.asked_s) for answer in right]
    gaps = [
        1e3 * (after - before)
        for answer in right
        for before, after in zip(answer.chunks_s, answer.chunks_s[1:], strict=False)
    ]
    splits_here = [splits[answer.facts["room"]] for answer in right if answer.facts.get("room") in splits]
    compute, exposed = (
        middle([split.compute_s for split in splits_here]),
        middle([split.exposed_s for split in splits_here]),
    )
    return ServedCell(
        prompt=prompt, clients=clients, requests=len(answers), failed=len(answers) - len(right),
        ttft_ms=middle(ttft), ttft_ms_p99=p99(ttft), gap_ms=middle(gaps), gap_ms_p99=p99(gaps),
        tokens_s=sum(int(answer.facts["completion_tokens"]) for answer in right) / seconds, compute_ms=1e3 * compute,
        exposed_ms=1e3 * exposed, exposed_percent=100 * exposed / compute if splits_here else nan,
        tail_ms=1e3 * middle([split.tail_s for split in splits_here]),
        step_ms=1e3 * middle([split.step_s for split in splits_here]),
        error=next((answer.error for answer in answers if answer.error), ""),
    )  # fmt: skip


async def _splits(traces: Path) -> dict[str, Split]:
    """By the room, as answers have it."""
    await asyncio.sleep(SETTLE_S)
    try:
        spans, _ = merge([read(path) for path in files([traces])])
    except ConfigError:
        return {}
    return {f"{room.label:016x}": room.split for room in rooms_of(spans)}


async def _ask(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], tokens: int) -> _Asked:
    asked = _Asked(time.monotonic())
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body["stream_options"] = {"include_usage": True}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                asked.error = f"{answer.status}: {(await answer.text())[:200]}"
                return asked
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                now, chunk = time.monotonic(), json.loads(line[6:])
                if "error" in chunk:
                    asked.error = str(chunk["error"])[:200]
                    return asked
                asked.facts |= (chunk.get("pdtransfer") or {}) | (chunk.get("usage") or {})
                if chunk["choices"] and chunk["choices"][0].get("text"):
                    asked.chunks_s.append(now)
    except (OSError, aiohttp.ClientError, TimeoutError) as error:
        asked.error = repr(error)
    if not asked.error and not (asked.chunks_s and "completion_tokens" in asked.facts):
        asked.error = "the stream ended early"
    return asked


def tables(figures: CheckpointFigures) -> list[list[list[str]]]:
    """Both tables, each with its head first."""
    alone = [["generate: prompt", "TTFT, ms", "ITL, ms", "tokens/s", "identical"]]
    alone += [
        [f"{times.prompt:,}", *map(figure, (times.ttft_ms, times.gap_ms, times.tokens_s)),
         f"{times.identical} of {times.checked}"]
        for times in figures.alone
    ]  # fmt: skip
    rates = {times.prompt: times.tokens_s for times in figures.alone}
    served = [["daemons: prompt", "clients", "requests", "failed", "TTFT p50, ms", "p99", "ITL p50, ms", "p99",
               "tokens/s", "of generate", "compute, ms", "exposed, ms", "of it", "tail, ms", "step, ms"]]  # fmt: skip
    served += [
        [f"{row.prompt:,}", str(row.clients), str(row.requests), str(row.failed),
         *map(figure, (row.ttft_ms, row.ttft_ms_p99, row.gap_ms, row.gap_ms_p99, row.tokens_s)),
         f"{row.tokens_s / rates[row.prompt]:.1f} x", *map(figure, (row.compute_ms, row.exposed_ms)),
         f"{row.exposed_percent:.1f} %", *map(figure, (row.tail_ms, row.step_ms))]
        for row in figures.served
    ]  # fmt: skip
    errors = [["cell", "error"]]
    errors += [[f"{row.prompt:,}, {row.clients} clients", row.error] for row in figures.served if row.error]
    return [table for table in (alone, served, errors) if len(table) > 1]


def show(figures: CheckpointFigures, *, as_json: bool) -> int:
    """Prints it. Returns a command's status: 1 if a request failed."""
    shown = tables(figures)
    if as_json:
        print(json.dumps({"tables": shown} | about(measure)))
    else:
        print_tables(shown, width=180)
    return 1 if any(row.failed for row in figures.served) else 0
