"""The main job, shown and checked: daemons as processes, prompts, each answer held against a single process."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..config.config import DecodeConfig, PrefillConfig, RouterConfig
from ..errors import PDTransferError, WorldError
from ..kernels import driver
from ..limits import Limits
from ..process.fleet import Fleet, Standing
from ..process.signals import end_with_parent
from .demo_config import DemoConfig
from .demo_report import Answer, good, hot_report, report_of, show

TEXT = (
    "the cache of a prefill worker crosses once and lands where decode will read it no copy between them "
    "a slot is free when its last lease has ended and not before because a timeout proves nothing about what is still "
    "in flight"
)
CONTEXT_TOKENS = 16_384  # the reference model's own, unless a prompt is longer
SETTLE_S = 10.0  # by then every slot is back
COMPLAINT = re.compile(r" (WARNING|ERROR|CRITICAL) ")
COMPLAINTS_MAX = 20  # lines of the daemons' logs that are shown where the demo fails
RETRIES = 100  # of one request that meets a full fleet
SLOTS_MAX = 131_072
TOP_K = 64  # of --hisparse: what a step reads of a request, and the least that the device holds of a long one, ...
HOT_TOKENS = 128
HOT_REQUESTS = 3  # ... of so many at once: the others wait, and take turns
LIMITS = Limits(room_deadline_ms=600_000)  # the last of 32 prompts waits for the others, on a slow host for long


def prompts(config: DemoConfig) -> list[str]:
    """Text of 1 to prompt_bytes_max bytes, spaced log-uniformly, in random order; the same for the same seed.

    Before each come shared_prefix bytes that are the same in all.
    """
    rng = random.Random(config.seed)  # noqa: S311 (text to look at, not a secret)
    sizes = [round(config.prompt_bytes_max ** (at / max(1, config.requests - 1))) for at in range(config.requests)]
    rng.shuffle(sizes)
    words = TEXT.split()
    texts = [" ".join(rng.choices(words, k=size)) for size in sizes]
    shared = (" ".join(rng.choices(words, k=config.shared_prefix)) + " ")[: config.shared_prefix]
    return [shared + text[:size] for text, size in zip(texts, sizes, strict=True)]


def run(config: DemoConfig, *, router: str = "", metrics: Sequence[str] = ()) -> int:
    """The command `pdtransfer demo`; exit status 1 when an answer is not identical, or a slot is lost.

    With `router`, the URL of one that runs, nothing is started; `metrics` is host:port of each decode rank behind it.
    """
    for number in config.cards:
        if number is not None:
            driver.check(number)
    return uvloop.run(_until_stopped(config, Standing(router, metrics) if router else None))


async def _until_stopped(config: DemoConfig, standing: Standing | None) -> int:
    """Whoever ends it, by SIGTERM or by closing the terminal, ends the daemons with it, as Ctrl-C does."""
    loop, demo = asyncio.get_running_loop(), asyncio.ensure_future(_run(config, standing))
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        demo.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        return await demo
    except asyncio.CancelledError:
        if not stopped:
            raise
        return 128 + stopped[0]


async def _run(config: DemoConfig, standing: Standing | None) -> int:
    with tempfile.TemporaryDirectory(prefix="pdtransfer-demo-") as logs:
        try:
            status = await _show(config, Path(logs), standing)
        except PDTransferError:
            _complain(Path(logs))
            raise
        if status:
            _complain(Path(logs))
    return status


async def _show(config: DemoConfig, logs: Path, standing: Standing | None) -> int:
    """Starts, asks, compares, prints; the exit status."""
    console = Console(stderr=True, quiet=config.json)
    texts = prompts(config)
    text = f"starting {config.prefill} prefill, {config.decode} decode and a router"
    with _stage(console, f"asking the router at {standing.url}" if standing else text):
        fleet = await (standing or _fleet(config, texts, logs)).__aenter__()
    try:
        answers, seconds = await _ask(config, fleet, texts, console)
        leaked = await _leaked(fleet)
        verified = await _verified(fleet) if config.verify else (0, 0)
        hot = await _counted(fleet) if config.hisparse else {}
    finally:
        await fleet.__aexit__()
    with _stage(console, "the same prompts in a single process, nothing transferred"):
        reference = await _reference(config, texts)
    for answer, expected in zip(answers, reference, strict=True):
        answer.differs = tuple(name for name in expected if answer.facts.get(name) != expected[name])
        answer.identical = not answer.error and not answer.differs
    report = report_of(config, answers, seconds, leaked)
    if config.verify:
        report |= {"grants_verified": verified[0], "grants_mismatched": verified[1]}
    if config.hisparse:
        report |= hot_report(hot, ranks=len(fleet.metrics), hot_tokens=_hot_tokens(config), answers=answers)
    if config.json:
        print(json.dumps(report))
    else:
        show(answers, report)
    return 0 if good(report) else 1


def _complain(logs: Path) -> None:
    """Says what the daemons have complained of: their logs go with the demo."""
    lines = [line for log in sorted(logs.glob("*.log")) for line in log.read_text(errors="replace").splitlines()]
    for line in [line for line in lines if COMPLAINT.search(line)][-COMPLAINTS_MAX:]:
        print(line, file=sys.stderr)


def _stage(console: Console, text: str) -> AbstractContextManager[object]:
    return console.status(text) if console.is_terminal else nullcontext(console.print(text))


def _fleet(config: DemoConfig, texts: Sequence[str], logs: Path) -> Fleet:
    """Pools that hold the whole load, up to a bound: beyond it requests wait their turn."""
    wanted = sum(len(text) + config.max_tokens for text in texts) + max(map(len, texts))
    slots = min(SLOTS_MAX, -(-wanted // 65_536) * 65_536)
    options = tuple(f"{name}={value}" for name, value in _engine_options(config).items())
    prefill = [
        PrefillConfig(
            bind="tcp://127.0.0.1:0", http="127.0.0.1:0", attention=config.attention, slots=slots,
            page_size=config.prefill_page_size, host_layout=config.prefill_layout, node=f"prefill-{number}",
            limits=LIMITS, engine_option=options, device=config.devices[0], tp_size=config.prefill_tp,
            pp_size=config.prefill_pp, transport=config.transport, timeline=config.timeline,
        )
        for number in range(config.prefill)
    ]  # fmt: skip
    limits = replace(LIMITS, hisparse_wait_steps=2, hisparse_quantum_steps=6) if config.hisparse else LIMITS
    decode = [
        DecodeConfig(
            bind="tcp://127.0.0.1:0", http="127.0.0.1:0", attention=config.attention, slots=slots,
            page_size=config.decode_page_size, host_layout=config.decode_layout, node=f"decode-{number}", limits=limits,
            socket_directory=logs / "sockets", engine_option=options, device=config.devices[1], verify=config.verify,
            tp_size=config.decode_tp, transport=config.transport, timeline=config.timeline,
            **(_hisparse(_hot_tokens(config)) if config.hisparse else {}),
        )
        for number in range(config.decode)
    ]  # fmt: skip
    router = RouterConfig(listen="127.0.0.1:0", node="router", limits=LIMITS, timeline=config.timeline)
    return Fleet(prefill, decode, router, logs)


def _engine_options(config: DemoConfig) -> dict[str, str]:
    longest = config.shared_prefix + config.prompt_bytes_max + config.max_tokens
    own = {"context_tokens": str(longest)} if longest > CONTEXT_TOKENS else {}
    own |= {"top_k": str(TOP_K)} if config.hisparse else {}
    return own | {name: value for name, _, value in (option.partition("=") for option in config.engine_option)}


def _hisparse(hot: int) -> dict[str, Any]:
    """Settings of a decode daemon whose device has places for few such requests."""
    return {
        "enable_hisparse": True, "hot_tokens": hot, "device_slots": HOT_REQUESTS * (hot + 1), "dense_slots": 64,
    }  # fmt: skip


def _hot_tokens(config: DemoConfig) -> int:
    top = _engine_options(config).get("top_k", "")
    return max(HOT_TOKENS, int(top) if top.isdecimal() else 0)


async def _ask(
    config: DemoConfig, fleet: Fleet | Standing, texts: Sequence[str], console: Console
) -> tuple[list[Answer], float]:
    """Sends every prompt, some at a time, and streams what comes back."""
    answers = [Answer(text) for text in texts]
    gate = asyncio.Semaphore(config.concurrency)
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with progress:
        requests = progress.add_task("requests", total=len(texts))
        tokens = progress.add_task("tokens", total=len(texts) * config.max_tokens)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=LIMITS.room_deadline_ms / 1e3)
        connector = aiohttp.TCPConnector(limit=config.concurrency)
        async with aiohttp.ClientSession(fleet.url, timeout=timeout, connector=connector) as session:
            await _ready(session)

            async def one(answer: Answer) -> None:
                async with gate:
                    await _complete(config, session, answer, lambda count: progress.advance(tokens, count))
                    progress.advance(requests)

            start = time.perf_counter()
            ahead = 1 if config.shared_prefix else 0  # it leaves the others what they share
            for some in (answers[:ahead], answers[ahead:]):
                await asyncio.gather(*(one(answer) for answer in some))
    return answers, time.perf_counter() - start


async def _ready(session: aiohttp.ClientSession) -> None:
    try:
        for _ in range(200):
            async with session.get("/health") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)
    except aiohttp.ClientError as error:
        raise WorldError(f"no router answers: {error}") from error
    raise WorldError("the router finds no pair of workers")


async def _complete(
    config: DemoConfig, session: aiohttp.ClientSession, answer: Answer, heard: Callable[[int], None]
) -> None:
    try:
        await _attempts(config, session, answer, heard)
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"


async def _attempts(
    config: DemoConfig, session: aiohttp.ClientSession, answer: Answer, heard: Callable[[int], None]
) -> None:
    greedy = {"temperature": 0, "ignore_eos": True}
    body = {"prompt": answer.prompt, "max_tokens": config.max_tokens, "stream": True, **greedy}
    body |= {"enable_hisparse": True} if config.hisparse else {}
    start = time.perf_counter()
    for _ in range(RETRIES):
        async with session.post("/v1/completions", json=body) as response:
            if response.status == 429:
                await asyncio.sleep(float(response.headers.get("Retry-After", "1")))
                continue
            if response.status != 200:
                answer.error = (await response.text())[:200]
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _event(answer, json.loads(line[6:]), heard)
        answer.seconds = time.perf_counter() - start
        return
    answer.error = "the fleet stayed full"


def _event(answer: Answer, event: dict[str, Any], heard: Callable[[int], None]) -> None:
    """A piece holds one token at least; how many there were in all, the last one says."""
    if "error" in event:
        answer.error = str(event["error"].get("message", event["error"]))
        return
    tokens = answer.tokens + 1
    if "pdtransfer" in event:
        answer.facts = event["pdtransfer"]
        tokens = event["usage"]["completion_tokens"]
        answer.cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    heard(tokens - answer.tokens)
    answer.tokens = tokens


async def _figures(fleet: Fleet | Standing, session: aiohttp.ClientSession) -> dict[str, int]:
    """Of all decode ranks together, by name."""
    from prometheus_client.parser import text_string_to_metric_families

    total: dict[str, int] = {}
    for address in fleet.metrics:
        try:
            async with session.get(f"http://{address}/metrics") as response:
                families = text_string_to_metric_families(await response.text())
        except aiohttp.ClientError as error:
            raise WorldError(f"a decode daemon is gone: {error}") from error
        for family in families:
            total[family.name] = total.get(family.name, 0) + int(sum(sample.value for sample in family.samples))
    return total


async def _leaked(fleet: Fleet | Standing) -> int | None:
    """Slots of all decode daemons that have not come back, once nothing runs any more; None where nobody could ask."""
    if not fleet.metrics:
        return None
    deadline = time.monotonic() + SETTLE_S
    async with aiohttp.ClientSession() as session:
        while True:
            figures = await _figures(fleet, session)
            leaked = figures["pdtransfer_slots"] - figures["pdtransfer_slots_free"]
            if not leaked or time.monotonic() >= deadline:
                return leaked
            await asyncio.sleep(0.05)


async def _counted(fleet: Fleet | Standing) -> dict[str, int]:
    async with aiohttp.ClientSession() as session:
        return await _figures(fleet, session)


async def _verified(fleet: Fleet | Standing) -> tuple[int, int]:
    """Grants whose rows were read back and are what was sent, and those that are something else."""
    figures = await _counted(fleet)
    return figures["pdtransfer_grants_verified"], figures["pdtransfer_grants_mismatched"]


async def _reference(config: DemoConfig, texts: Sequence[str]) -> list[dict[str, str]]:
    """In a process of its own: it needs torch, and can be left at any time."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_tell, args=(theirs, config, list(texts)), daemon=True)
    process.start()
    theirs.close()
    try:
        return await asyncio.to_thread(ours.recv)
    except EOFError:
        raise WorldError("the single process that answers are held against has failed") from None
    finally:
        process.kill()
        process.join()
        ours.close()


def _tell(pipe: Connection, config: DemoConfig, texts: list[str]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us hears it, too
    pipe.send(_generate(config, texts))


def _generate(demo: DemoConfig, texts: list[str]) -> list[dict[str, str]]:
    """The digests that each answer has to have."""
    import numpy as np

    from ..config.ranks import device_of
    from ..engine_api import EngineConfig
    from ..reference.factory import generate_many
    from ..wire import Ranks, Sampling

    prompts = [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]
    longest = max(len(prompt) for prompt in prompts) + demo.max_tokens
    config = EngineConfig(
        role="decode",
        attention=demo.attention,
        slots=-(-max(longest, 32_768) // 64) * 64,
        page_size=64,
        host_layout="layer_first",
        device=device_of(demo.devices[1], Ranks()),
        options=_engine_options(demo),
    )
    sampling = Sampling(max_tokens=demo.max_tokens, ignore_eos=True)
    return [
        {
            "tokens_digest": outcome.tokens_digest.hex(),
            "logits_digest": outcome.logits_digest.hex(),
            "kv_digest": outcome.kv_digest.hex(),
        }
        for outcome in generate_many(config, [(prompt, sampling) for prompt in prompts])
    ]
