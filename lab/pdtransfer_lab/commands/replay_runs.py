"""The commands `pdtransfer replay` and `pdtransfer plan`."""

from __future__ import annotations

import asyncio
import gc
import json as json_module
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdtransfer.bounds import bound
from pdtransfer.errors import ConfigError
from pdtransfer.limits import Limits

from ..plan.fleet_model import FleetModel, FleetShape, modelled
from ..plan.rates import Rates
from ..plan.serving_figures import Slo
from ..plan.sizing import Evaluate, FleetSize, enlarged, resources, sized, smallest_fleet, work_bounds
from ..plan.trace import Trace, copies
from ..replay.chart import check_chart, write_chart
from ..replay.replay import ReplayOutcome, replay
from ..replay.replay_target import ReplayTarget
from ..replay.show import show_plan, show_replay
from .replay_config import COPIES_MAX, FleetConfig, TraceConfig

COARSE_REQUESTS = 25_000  # of a run while the size is searched for: then the whole load confirms it


def run_replay(
    path: Path, requests: TraceConfig, *, target: ReplayTarget | None, plot: Path | None, as_json: bool,
    fleet: tuple[FleetConfig, int, int] | None = None, users: int = 1,
) -> int:  # fmt: skip
    """Replays against an endpoint, or against the model of a fleet. Returns 0, or 1 where nothing was answered."""
    if plot is not None:
        check_chart(plot)
    bound("users", users, 1, COPIES_MAX)
    trace = requests.read(path)
    console = Console(stderr=True, quiet=as_json)
    began_s = time.monotonic()
    if fleet is not None:
        config, prefill, decode = fleet
        shape, rates = config.shape(prefill=prefill, decode=decode), config.read_rates()
        with _bar(console, "modelled", len(trace.requests) * users) as advance:
            model = _modelled(trace, users, shape, rates, config.limits, requests.slo, advance)
        figures, report = model.figures, model.report()
        title = f"a model of {prefill} prefill and {decode} decode workers"
    else:
        assert target is not None
        if users != 1:
            raise ConfigError("users: only for a modelled fleet; --speed makes a replay denser")
        done = asyncio.run(_replayed(trace, target, requests.slo, console))
        figures, report = done.figures, done.report()
        title = target.url
    report = _about(path, requests, trace, users) | {"against": title} | report
    report["wall_s"] = round(time.monotonic() - began_s, 3)
    if plot is not None:
        write_chart(figures, plot, f"{path.name}: {title}")
    if as_json:
        print(json_module.dumps(report))
    else:
        show_replay(report)
    return 0 if report["answered"] else 1


def run_plan(
    path: Path, requests: TraceConfig, config: FleetConfig, *, users: int, share: float, jobs: int, as_json: bool
) -> int:
    """Finds the smallest fleet that keeps the SLO; returns 0."""
    bound("users", users, 1, COPIES_MAX)
    bound("share", share, 0.01, 1.0)
    bound("jobs", jobs, 1, 256)
    slo = requests.slo
    if slo == Slo():
        raise ConfigError("slo_ttft_ms, slo_itl_ms: at least one says how good an answer has to be")
    trace, rates = requests.read(path), config.read_rates()
    shape = config.shape(prefill=1, decode=1)
    console = Console(stderr=True, quiet=as_json)
    began_s = time.monotonic()
    coarse = max(1, min(users, COARSE_REQUESTS // len(trace.requests)))
    with _evaluator(trace, shape, rates, config.limits, slo, jobs, console) as evaluate:
        bounds = work_bounds(trace, rates, shape, slo, users=coarse)
        size, report = smallest_fleet(evaluate(coarse), bounds, share=share, at_once=jobs)
        if coarse < users:
            # A larger fleet of the same load a worker does no worse: a burst meets more workers.
            size = FleetSize(*(-(-count * users // coarse) for count in size))
            size, report = enlarged(evaluate(users), size, share=share)
    plan = _about(path, requests, trace, users) | {
        "share": share,
        "prefill": size.prefill,
        "decode": size.decode,
        "least_by_work": asdict(work_bounds(trace, rates, shape, slo, users=users)),
        "a_worker": resources(report, sized(shape, size), config.limits),
        "expected": report,
        "wall_s": round(time.monotonic() - began_s, 3),
    }
    if as_json:
        print(json_module.dumps(plan))
    else:
        show_plan(plan)
    return 0


def _about(path: Path, requests: TraceConfig, trace: Trace, users: int) -> dict[str, Any]:
    return {
        "trace": {
            "file": path.name, "requests": len(trace.requests), "skipped": trace.skipped,
            "seconds": round(trace.seconds, 3), "speed": requests.speed, "scale_tokens": requests.scale_tokens,
            "block_tokens": trace.block_tokens, "prompt_tokens": trace.prompt_tokens,
            "output_tokens": trace.output_tokens, "users": users,
        }
    }  # fmt: skip


async def _replayed(trace: Trace, target: ReplayTarget, slo: Slo, console: Console) -> ReplayOutcome:
    with _bar(console, "answered", len(trace.requests)) as advance:

        def progress(done: ReplayOutcome) -> None:
            figures = done.figures
            failed = figures.requests - len(figures.ttft_s)
            advance(figures.requests, f"{done.in_flight} in flight, {failed} failed")

        return await replay(trace, target, slo, progress)


@contextmanager
def _bar(console: Console, title: str, total: int) -> Generator[Callable[[int, str], None]]:
    """A progress bar; its function takes what is done, and a remark."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)

        def advance(done: int, remark: str) -> None:
            bar.update(task, completed=done, description=f"{title} ({remark})")

        yield advance


def _silent(done: int, remark: str) -> None:
    pass


def _modelled(
    trace: Trace, users: int, shape: FleetShape, rates: Rates, limits: Limits, slo: Slo,
    advance: Callable[[int, str], None] = _silent,
) -> FleetModel:  # fmt: skip
    """A run without the garbage collector, which would look through millions of objects in no cycle again and again."""
    collected = gc.isenabled()
    gc.disable()
    try:
        return modelled(
            copies(trace, users), shape, rates, limits, block_tokens=trace.block_tokens, slo=slo,
            progress=lambda arrived, now: advance(arrived, f"{now:,.0f} s"),
        )  # fmt: skip
    finally:
        if collected:
            gc.enable()


def _report_of(
    trace: Trace, users: int, shape: FleetShape, rates: Rates, limits: Limits, slo: Slo
) -> dict[str, Any]:  # in a process of its own
    return _modelled(trace, users, shape, rates, limits, slo).report()


@contextmanager
def _evaluator(
    trace: Trace, shape: FleetShape, rates: Rates, limits: Limits, slo: Slo, jobs: int, console: Console
) -> Generator[Callable[[int], Evaluate]]:
    """For a number of users, what evaluates fleets for them, `jobs` at a time."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as processes:

        def evaluate(users: int) -> Evaluate:
            def reports(sizes: Sequence[FleetSize]) -> list[dict[str, Any]]:
                submitted = [
                    processes.submit(_report_of, trace, users, sized(shape, size), rates, limits, slo) for size in sizes
                ]
                outcomes = [job.result() for job in submitted]
                for size, report in zip(sizes, outcomes, strict=True):
                    load = f"{report['requests']:,} requests"
                    console.print(
                        f"{size.prefill} prefill, {size.decode} decode, {load}: {report['good_share']:.2%} good",
                        highlight=False,
                    )
                return outcomes

            return reports

        yield evaluate
