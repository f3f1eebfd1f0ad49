"""The demo: runs daemons as processes, sends prompts, and checks each answer against a single process."""

from __future__ import annotations

import asyncio
import errno
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from importlib.util import find_spec
from math import ceil
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...environment import pip_install, socket_directory
from ...errors import ConfigError, PDTransferError, WorldError
from ...kernels import driver
from ...limits import Limits
from ..process.fleet import Fleet
from ..process.signals import end_with_parent, until_signalled
from ..settings.node import BUILT_IN, REFERENCE
from ..settings.router import RouterConfig
from ..settings.worker import SOCKET_DIRECTORY_LENGTH_MAX, DecodeConfig, PrefillConfig
from .demo_config import DemoConfig
from .demo_model import DemoModel

SETTLE_S = 10.0  # every slot must be free by then
REFERENCE_ENDS_S = 10.0  # after its answers; later it is killed
WARNING = re.compile(r" (WARNING|ERROR|CRITICAL) ")
WARNINGS_MAX = 20  # log lines of the daemons that a failed demo shows
RETRIES = 100  # of one request, while the fleet is full
SLOTS_MAX = 131_072
BUILT_IN_SLOTS, CHECKPOINT_SLOTS = 65_536, 4_096  # the fewest, and the step; a checkpoint's tokens take more memory
HOT_TOKENS = 128  # with --hisparse: the fewest that the device holds of a long request
HOT_REQUESTS = 3  # such requests on the device at once; the others wait and take turns
# The last prompt waits for all others, on a slow host for long. Decode computes no rest itself: each is handed over.
LIMITS = Limits(room_deadline_ms=600_000, turn_tokens_max=0)


@dataclass(slots=True)
class DemoAnswer:
    """The answer to one prompt."""

    prompt: str
    prompt_tokens: int = 0
    text: str = ""
    seconds: float = 0.0
    tokens: int = 0
    cached: int = 0  # prompt tokens that decode had cached
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])  # the router's `pdtransfer` object
    differs: tuple[str, ...] = ()  # digests that differ from the single process's

    @property
    def identical(self) -> bool:
        """True if it came, and is that of the single process."""
        return not self.error and not self.differs


def run(config: DemoConfig) -> int:
    """The command `pdtransfer demo`; returns 1 when an answer is not identical, or a slot is leaked."""
    if config.model == REFERENCE and find_spec("pdtransfer_lab") is None:
        raise ConfigError("model = 'reference': comes with pdtransfer-lab: pip install ./lab")
    if config.model not in BUILT_IN and find_spec("transformers") is None:
        raise ConfigError(f"the demo's engine needs transformers: {pip_install('transformers')}")
    for number in config.cards:
        if number is not None:
            driver.check(number)
    return uvloop.run(until_signalled(_run(config)))


async def _run(config: DemoConfig) -> int:
    with tempfile.TemporaryDirectory(prefix="pdtransfer-demo-") as folder:
        logs = Path(folder)
        try:
            if status := await _show(config, logs):
                _print_warnings(logs)
            return status
        except PDTransferError:
            _print_warnings(logs)
            raise


async def _show(config: DemoConfig, logs: Path) -> int:
    """Starts the fleet, sends, compares, prints; returns the exit status."""
    console = Console(stderr=True, quiet=config.json)
    model = DemoModel(config)
    texts = model.prompts()
    slots = _slots(model, texts)
    text = f"starting {config.prefill} prefill, {config.decode} decode and a router"
    async with AsyncExitStack() as stack:
        url, decodes = config.router, config.metrics
        with _stage(console, f"using the router at {url}" if url else text):
            if not url:
                fleet = await stack.enter_async_context(_fleet(config, model, slots, logs))
                url, decodes = fleet.url, fleet.metrics
        counting = decodes if config.verify or config.hisparse else ()
        before = await _metrics(counting)  # a fleet that runs already has counted before
        answers, seconds = await _ask(model, url, texts, console)
        leaked = await _leaked(decodes)
        (metrics := await _metrics(counting)).subtract(before)
    with _stage(console, "the same prompts in a single process, nothing transferred"):
        digests = await single_process(config, texts)
    for answer, expected in zip(answers, digests, strict=True):
        # An empty digest is of nothing: an engine's options may switch digests off.
        answer.differs = tuple(name for name, value in expected.items() if not value or answer.facts.get(name) != value)
    report = make_report(config, answers, seconds, leaked)
    if config.verify:
        report |= {name: metrics[f"pdtransfer_{name}"] for name in ("grants_verified", "grants_mismatched")}
    if config.hisparse:
        report |= hot_report(metrics, ranks=len(decodes), hot_tokens=_hot_tokens(model), answers=answers)
    if config.json:
        print(json.dumps(report))
    else:
        show(answers, report, speaks=model.speaks)
    return 0 if succeeded(report) else 1


def _print_warnings(logs: Path) -> None:
    """Prints the daemons' warnings and errors, because their logs are deleted with the demo."""
    lines = [line for log in sorted(logs.glob("*.log")) for line in log.read_text(errors="replace").splitlines()]
    for line in [line for line in lines if WARNING.search(line)][-WARNINGS_MAX:]:
        print(line, file=sys.stderr)


def _stage(console: Console, text: str) -> AbstractContextManager[object]:
    return console.status(text) if console.is_terminal else nullcontext(console.print(text))


def _slots(model: DemoModel, texts: Sequence[str]) -> int:
    """Slots of a pool for the whole load, bounded; beyond it requests queue. ConfigError for one that does not fit."""
    config, sizes = model.config, [len(model.ids(text)) for text in texts]
    longest, context = max(sizes) + config.max_tokens, model.context_tokens
    most = context if config.router else min(context, SLOTS_MAX)
    if longest > most:
        text = f"shared_prefix, prompt_bytes_max, max_tokens: the longest request has {longest} tokens"
        raise ConfigError(f"{text}, {'the context' if most == context else 'a worker of the demo'} has {most}")
    wanted = sum(sizes) + max(sizes) + len(sizes) * config.max_tokens
    step = CHECKPOINT_SLOTS if model.speaks else BUILT_IN_SLOTS
    return min(SLOTS_MAX, -(-wanted // step) * step)


def _fleet(config: DemoConfig, model: DemoModel, slots: int, logs: Path) -> Fleet:
    shared: dict[str, Any] = {"limits": LIMITS, "timeline": config.timeline, "model": config.model}
    worker: dict[str, Any] = shared | {
        "bind": "tcp://127.0.0.1:0", "listen": "127.0.0.1:0", "slots": slots, "transport": config.transport,
        "engine_option": tuple(f"{name}={value}" for name, value in model.engine_options().items()),
    }  # fmt: skip
    prefill = [
        PrefillConfig(
            node=f"prefill-{number}", page_size=config.prefill_page_size, host_layout=config.prefill_layout,
            device=config.devices[0], tp_size=config.prefill_tp, pp_size=config.prefill_pp, **worker,
        )
        for number in range(config.prefill)
    ]  # fmt: skip
    if config.hisparse:  # the device has room for few requests
        hot = _hot_tokens(model)
        worker |= {
            "enable_hisparse": True, "hot_tokens": hot, "device_slots": HOT_REQUESTS * (hot + 1), "dense_slots": 64,
            "limits": replace(LIMITS, hisparse_wait_steps=2, hisparse_quantum_steps=6),
        }  # fmt: skip
    folder = logs / "sockets"
    if len(os.fsencode(folder)) > SOCKET_DIRECTORY_LENGTH_MAX:  # TMPDIR may be too long for a socket
        folder = socket_directory()
    decode = [
        DecodeConfig(
            node=f"decode-{number}", page_size=config.decode_page_size, host_layout=config.decode_layout,
            device=config.devices[1], tp_size=config.decode_tp, verify=config.verify, socket_directory=folder, **worker,
        )
        for number in range(config.decode)
    ]  # fmt: skip
    return Fleet(prefill, decode, RouterConfig(listen="127.0.0.1:0", node="router", **shared), logs)


def _hot_tokens(model: DemoModel) -> int:
    top = model.engine_options().get("top_k", "")
    return max(HOT_TOKENS, int(top) if top.isdecimal() else 0)


async def _ask(model: DemoModel, url: str, texts: Sequence[str], console: Console) -> tuple[list[DemoAnswer], float]:
    """Sends every prompt, limited by the concurrency, and streams the answers."""
    config, answers = model.config, [DemoAnswer(text, len(model.ids(text))) for text in texts]
    gate = asyncio.Semaphore(config.concurrency)
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with progress:
        requests = progress.add_task("requests", total=len(texts))
        timeout = aiohttp.ClientTimeout(total=None, sock_read=LIMITS.room_deadline_ms / 1e3)
        connector = aiohttp.TCPConnector(limit=config.concurrency)
        async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
            await _ready(session)

            async def run_one(answer: DemoAnswer) -> None:
                async with gate:
                    try:
                        await _complete(model, session, answer)
                    except (aiohttp.ClientError, TimeoutError) as error:
                        answer.error = f"{type(error).__name__}: {error}"
                    progress.advance(requests)

            start = time.perf_counter()
            first = 1 if config.shared_prefix else 0  # the first request caches the shared prefix
            for batch in (answers[:first], answers[first:]):
                await asyncio.gather(*(run_one(answer) for answer in batch))
    return answers, time.perf_counter() - start


async def _ready(session: aiohttp.ClientSession) -> None:
    try:
        for _ in range(200):
            async with session.get("/health", timeout=aiohttp.ClientTimeout(sock_read=SETTLE_S)) as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)
    except aiohttp.ClientError as error:
        refused = isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED
        raise WorldError(f"no router answers: {'nothing listens there' if refused else error}") from error
    raise WorldError("the router finds no pair of workers")


async def _complete(model: DemoModel, session: aiohttp.ClientSession, answer: DemoAnswer) -> None:
    body = model.body(answer.prompt) | {"stream": True, "stream_options": {"include_usage": True}}
    body |= {"enable_hisparse": True} if model.config.hisparse else {}
    start = time.perf_counter()
    for _ in range(RETRIES):
        async with session.post(model.path, json=body) as response:
            if response.status == 429:
                await asyncio.sleep(float(response.headers.get("Retry-After", "1")))
                continue
            if response.status != 200:
                answer.error = (await response.text())[:200]
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _event(answer, json.loads(line[6:]))
        answer.seconds = time.perf_counter() - start
        if not answer.facts and not answer.error:
            answer.error = "no `pdtransfer` object in the answer: the router must have daemons behind it"
        return
    answer.error = "the fleet stayed full"


def _event(answer: DemoAnswer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = str(event["error"].get("message", event["error"]))
        return
    for choice in event["choices"]:
        answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    answer.facts = event.get("pdtransfer", answer.facts)
    if (usage := event.get("usage")) is not None:
        answer.tokens = usage["completion_tokens"]
        details: dict[str, int | None] = usage.get("prompt_tokens_details") or {}
        answer.cached = details.get("cached_tokens") or 0


async def _metrics(decodes: Sequence[str]) -> Counter[str]:
    """Returns the sums of all decode ranks' metrics, by name."""
    from prometheus_client.parser import text_string_to_metric_families

    total: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session:
        for address in decodes:
            url, families = f"http://{address}/metrics", Counter[str]()
            try:
                async with session.get(url) as response:
                    status, text = response.status, await response.text(errors="replace")
            except (aiohttp.ClientError, TimeoutError) as error:
                raise WorldError(f"{url}: a decode daemon does not answer: {error}") from error
            with suppress(ValueError, OverflowError):
                for family in text_string_to_metric_families(text):
                    families[family.name] += int(sum(sample.value for sample in family.samples))
            if status != HTTPStatus.OK or "pdtransfer_slots" not in families:
                raise WorldError(f"{url}: not a decode daemon's: HTTP {status}: {text[:200]}")
            total.update(families)
    return total


async def _leaked(decodes: Sequence[str]) -> int | None:
    """Returns the slots that decode daemons have not freed once nothing runs; None without metrics addresses."""
    if not decodes:
        return None
    deadline = time.monotonic() + SETTLE_S
    while True:
        metrics = await _metrics(decodes)
        leaked = metrics["pdtransfer_slots"] - metrics["pdtransfer_slots_free"]
        if not leaked or time.monotonic() >= deadline:
            return leaked
        await asyncio.sleep(0.05)


async def single_process(config: DemoConfig, prompts: Sequence[str]) -> list[dict[str, str]]:
    """Generates in a process of its own: it needs torch, and can be killed at any time."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send_reference, args=(sender, config, list(prompts)), daemon=True)
    process.start()
    sender.close()
    try:
        reference = await asyncio.to_thread(receiver.recv)
        # Killed while it ends, it leaves semaphores, of which multiprocessing warns.
        await asyncio.to_thread(process.join, REFERENCE_ENDS_S)
    except EOFError:
        raise WorldError("the single process for comparison has failed") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(reference, str):
        raise WorldError(f"the single process for comparison has failed: {reference}")
    return reference


def _send_reference(pipe: Connection, config: DemoConfig, prompts: list[str]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which kills this process
    try:
        pipe.send(DemoModel(config).generate(prompts))
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent reports it)
        pipe.send(str(error) if isinstance(error, PDTransferError) else f"{type(error).__name__}: {error}")


def make_report(
    config: DemoConfig, answers: Sequence[DemoAnswer], seconds: float, leaked: int | None
) -> dict[str, Any]:
    """Returns the report that `--json` prints."""
    done = [answer for answer in answers if answer.facts]
    handoffs_ms = sorted(a.facts["handoff_us"] / 1e3 for a in done if a.facts.get("handoff_us") is not None)
    kv_bytes, copy_us = (sum(answer.facts[name] for answer in done) for name in ("kv_bytes", "copy_us"))
    tokens = sum(answer.tokens for answer in answers)
    return {
        "requests": len(answers),
        "identical": sum(answer.identical for answer in answers),
        "all_identical": all(answer.identical for answer in answers),
        "differ": sorted({name for answer in answers for name in answer.differs}),
        "failed": sum(bool(answer.error) for answer in answers),
        "handed_over": sum(answer.facts["kv_bytes"] > 0 for answer in done),
        **{name: getattr(config, name) for name in ("prefill", "decode", "prefill_tp", "prefill_pp", "decode_tp")},
        "bytes": kv_bytes,
        "prompt_tokens": sum(answer.prompt_tokens for answer in done),
        "cached_tokens": sum(answer.cached for answer in done),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(done) / seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        "handoff_ms_p50": round(median(handoffs_ms), 3) if handoffs_ms else None,
        "handoff_ms_p99": round(handoffs_ms[ceil(0.99 * (len(handoffs_ms) - 1))], 3) if handoffs_ms else None,
        "copy_gb_s": round(kv_bytes / copy_us / 1e3, 3) if copy_us else None,
        "slots_leaked": leaked,
    }


def hot_report(
    figures: Mapping[str, int], *, ranks: int, hot_tokens: int, answers: Sequence[DemoAnswer]
) -> dict[str, Any]:  # fmt: skip
    """Returns HiSparse's part of the report. `figures` are sums over `ranks` decode ranks, by metric. Ranks of a group
    swap in the same tokens, each its own heads."""
    hits, misses = (figures.get(f"pdtransfer_hot_{name}", 0) for name in ("hits", "misses"))
    others = ("swapped_bytes", "preloaded_bytes", "retracts", "index_copies")
    return {
        "hot_tokens": hot_tokens,
        "longer_than_hot": sum(answer.prompt_tokens > hot_tokens for answer in answers),
        "hot_ranks": ranks,
        "hot_hits": hits,
        "hot_misses": misses,
        "hit_rate": round(hits / (hits + misses), 4) if hits + misses else None,
    } | {name: figures.get(f"pdtransfer_{name}", 0) for name in others}


def succeeded(report: dict[str, Any]) -> bool:
    """True if the run succeeded. A mismatch is a failure, although every answer is identical after a second prefill."""
    wrong = ("slots_leaked", "grants_mismatched")
    verified = report.get("grants_verified", report["handed_over"]) >= report["handed_over"]
    return report["all_identical"] and verified and not any(report.get(name) for name in wrong)


def show(answers: Sequence[DemoAnswer], report: dict[str, Any], *, speaks: bool = False) -> None:
    """Prints the table of answers and the summary; and the prompts and texts where a model answers in words."""
    console = Console(width=None if sys.stdout.isatty() else 120 if speaks else 100)
    every = ("cached", "KV bytes", "GB/s", "hand-off", "tokens", "total", "identical")
    names = every if not speaks or console.width >= 100 else ("KV bytes", "hand-off", "tokens", "identical")
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("prompt, and answer" if speaks else "prompt", justify="left" if speaks else "right")
    for name in names:
        table.add_column(name, justify="right", no_wrap=name != "identical")
    for answer in sorted(answers, key=lambda answer: answer.prompt_tokens):
        words = f"{escape(answer.prompt)}\n[dim]{escape(' '.join(answer.text.split()))}"
        cells = {"identical": f"[red]failed: {escape(answer.error)}"}
        if not answer.error:
            handoff_us, copy_us, kv_bytes = (answer.facts.get(name) for name in ("handoff_us", "copy_us", "kv_bytes"))
            cells = {
                "cached": f"{answer.cached:,}" if answer.cached else "-",
                "KV bytes": f"{kv_bytes:,}",
                "GB/s": f"{kv_bytes / copy_us / 1e3:.2f}" if copy_us else "-",
                "hand-off": f"{handoff_us / 1e3:.2f} ms" if handoff_us is not None else "-",
                "tokens": str(answer.tokens),
                "total": f"{answer.seconds:.2f} s",
                "identical": "[green]yes" if answer.identical else "[red]NO",
            }
        table.add_row(words if speaks else f"{answer.prompt_tokens:,} B", *(cells.get(name, "") for name in names))
    console.print(table)
    leaked = "slots not counted" if report["slots_leaked"] is None else f"{report['slots_leaked']} slots leaked"
    verified, color = "", "green" if succeeded(report) else "red"
    if "grants_verified" in report:
        verified = f"; {report['grants_verified']} grants verified, {report['grants_mismatched']} mismatched"
    console.print(
        f"\n{report['requests']} requests, {report['bytes'] / 1e6:,.1f} MB of KV in {report['seconds']:.1f} s: "
        f"{report['requests_per_s']:.1f} requests/s, {report['tokens_per_s']:.0f} tokens/s, "
        f"copies at {report['copy_gb_s']} GB/s\n"
        f"{report['cached_tokens']:,} of {report['prompt_tokens']:,} prompt tokens were cached\n"
        f"hand-off, last cell written to READY: {_handoff(report)}\n"
        f"[{color}]{report['identical']} of {report['requests']} identical to a single process "
        f"(tokens, logits, KV); {leaked}{verified}{_hot(report)}"
    )


def _handoff(report: dict[str, Any]) -> str:
    """Returns the summary's times of hand-offs; there are none between workers that share no clock."""
    if report["handoff_ms_p50"] is None:
        return "not known, since no prefill and decode read one clock (pdtransfer_handoff_seconds bounds it)"
    return f"p50 {report['handoff_ms_p50']} ms, p99 {report['handoff_ms_p99']} ms"


def _hot(report: dict[str, Any]) -> str:
    """Returns the summary's line for HiSparse."""
    if "hot_tokens" not in report:
        return ""
    where = f"on {report['hot_ranks']} ranks together, " if report["hot_ranks"] > 1 else ""
    hits = "nothing swapped" if report["hit_rate"] is None else f"{report['hit_rate']:.1%} of picks were hot"
    return (
        f"\n{report['longer_than_hot']} prompts are longer than the {report['hot_tokens']} tokens that the device "
        f"holds of each: {hits}, {where}{report['hot_misses']:,} swapped in, {report['swapped_bytes'] / 1e6:,.1f} MB; "
        f"{report['retracts']} retracts, {report['index_copies']} index copies"
    )
