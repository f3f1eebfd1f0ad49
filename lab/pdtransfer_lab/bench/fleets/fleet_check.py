"""The fleet model beside a real fleet of this host: the same requests to both, with rates measured in the same run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from pdtransfer.errors import WorldError
from pdtransfer.limits import Limits
from pdtransfer.serve.process.fleet import Fleet
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig

from ...plan.fleet_model import FleetShape, modelled
from ...plan.rates import Curve, Rates
from ...plan.serving_figures import Slo
from ...plan.trace import Trace, TraceRequest, copies, cut_trace, parse_trace, scale_tokens, speed_up
from ...replay.replay import ReplayOutcome, replay
from ...replay.replay_target import ReplayTarget
from ..report import load, print_tables

ENGINE = "pdtransfer_lab.bench.fleets.paced_engine:create"
ROUNDS = 3  # of each measured rate, of which the median counts
SHORT = 8  # tokens of a prompt that takes hardly any computing
START_SECONDS = 60.0
STEPS = 24  # tokens of an answer whose steps are measured
LIMITS = Limits(room_deadline_ms=600_000)
COMPARED = (  # what is held against the model: its name, and where it stands in a report
    ("first token, p50", ("ttft_ms", "p50")),
    ("first token, p90", ("ttft_ms", "p90")),
    ("between tokens, p50", ("mean_itl_ms", "p50")),
    ("whole answer, p50", ("total_ms", "p50")),
    ("requests/s", ("requests_per_s",)),
    ("output tokens/s", ("output_tokens_per_s",)),
    ("cached prompt tokens", ("cached_tokens",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFleet:
    """The fleet that is started: this many workers of one engine, or of a checkpoint."""

    prefill: int = 2
    decode: int = 2
    model: str = ""
    engine: str = ENGINE
    options: tuple[str, ...] = ()
    chunk_tokens: int = 256
    slots: int = 16_384
    bytes_per_token: int = 1_024
    page_size: int = 16

    def fleet(self, logs: Path, limits: Limits) -> Fleet:
        """Its daemons, not started."""
        same: dict[str, Any] = {
            "bind": "tcp://127.0.0.1:0", "http": "127.0.0.1:0", "slots": self.slots, "page_size": self.page_size,
            "limits": limits, "engine_option": self.options, "transport": "shm",
        }  # fmt: skip
        same |= {"model": self.model} if self.model else {"engine": self.engine}
        prefills = [
            PrefillConfig(node=f"prefill-{index}", chunk_tokens=self.chunk_tokens, **same)
            for index in range(self.prefill)
        ]
        decodes = [
            DecodeConfig(node=f"decode-{index}", socket_directory=logs / "sockets", **same)
            for index in range(self.decode)
        ]
        router: dict[str, Any] = {"model": self.model} if self.model else {}
        return Fleet(
            prefills, decodes, RouterConfig(listen="127.0.0.1:0", node="router", limits=limits, **router), logs
        )


class Probes:
    """Measures the rates of a fleet by requests of their own."""

    def __init__(self, target: ReplayTarget, workers: CheckedFleet) -> None:
        self._target, self._workers = target, workers
        self._block = count(1 << 40)

    async def rates(self, longest: int, progress: Callable[[str], None]) -> Rates:
        """Prefill by the length of prompts, one at a time; steps by the requests of a batch, all of them short."""
        steps: dict[float, float] = {}
        for batch in (1, 4, 12):
            progress(f"steps of {batch}")
            rounds = [await self._asked([SHORT] * batch * self._workers.decode, STEPS) for _ in range(ROUNDS)]
            steps[batch] = median(median(outcome.figures.itl_s) for outcome in rounds)
        # Each request of these answers has one step; what is short has hardly more.
        bare_s = await self._first_token_s(SHORT)
        computed: dict[float, float] = {}
        for tokens in sorted({max(SHORT * 4, longest >> shift) for shift in range(5)}):
            progress(f"prompts of {tokens}")
            computed[tokens] = max(1e-6, await self._first_token_s(tokens) - bare_s)
        return Rates(
            prefill=Curve.of(_rising(computed)), decode=Curve.of(_rising(steps)), link_bytes_s=1e9, handoff_s=0.0,
            overhead_s=max(0.0, bare_s - steps[1]), first_step_tokens=2,
        )  # fmt: skip

    async def _first_token_s(self, tokens: int) -> float:
        return median([(await self._asked([tokens], 2)).figures.ttft_s[0] for _ in range(ROUNDS)])

    async def _asked(self, lengths: Sequence[int], output: int) -> ReplayOutcome:
        """Requests at the same time that share nothing."""
        size = max(lengths)
        requests = tuple(TraceRequest(0.0, tokens, output, (next(self._block),)) for tokens in lengths)
        outcome = await replay(Trace(requests, block_tokens=size), self._target, Slo())
        if outcome.figures.statuses["200"] != len(requests):
            raise WorldError(f"a request of the measurement failed: {dict(outcome.figures.statuses)}")
        return outcome


def _rising(points: dict[float, float]) -> dict[float, float]:
    """The same without noise that would make a larger one quicker."""
    highest, rising = 0.0, dict[float, float]()
    for size in sorted(points):
        highest = rising[size] = max(highest, points[size])
    return rising


def mean_rates(before: Rates, after: Rates) -> Rates:
    """Between what was measured before and after."""

    def between(before: Curve, after: Curve) -> Curve:
        return Curve.of({size: (before(size) + after(size)) / 2 for size in before.sizes})

    return replace(
        before, prefill=between(before.prefill, after.prefill), decode=between(before.decode, after.decode),
        overhead_s=(before.overhead_s + after.overhead_s) / 2,
    )  # fmt: skip


async def _serving(url: str) -> None:
    """Waits until the router has workers. Raises TimeoutError."""
    async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession(url) as session:
        while not (await session.get("/health")).ok:  # noqa: ASYNC110 (it is another process)
            await asyncio.sleep(0.05)


async def _check(
    path: Path, workers: CheckedFleet, requests: int, speed: float, scale: float, progress: Callable[[str], None]
) -> dict[str, Any]:
    with path.open() as lines:
        trace = speed_up(scale_tokens(cut_trace(parse_trace(lines), limit=requests), scale), speed)
    # Blocks of the fleet are those of the trace, so that both share the same.
    block_tokens = -(-trace.block_tokens // workers.page_size) * workers.page_size
    limits = replace(LIMITS, prefix_block_tokens=block_tokens)
    trace = replace(trace, block_tokens=block_tokens)
    trace = replace(trace, requests=tuple(_in_blocks(request, block_tokens) for request in trace.requests))
    longest = max(request.input_tokens for request in trace.requests)
    with tempfile.TemporaryDirectory(prefix="pdtransfer-check-") as logs:
        fleet = workers.fleet(Path(logs), limits)
        async with fleet:
            target = ReplayTarget(url=fleet.url, metrics=tuple(fleet.metrics))
            probes = Probes(target, workers)
            progress("warm up")
            await _serving(fleet.url)
            await probes.rates(SHORT * 4, lambda _: None)
            before, load_before = await probes.rates(longest, progress), load()
            progress(f"{len(trace.requests)} requests to the fleet")
            real = (await replay(trace, target, Slo())).report()
            load_after, after = load(), await probes.rates(longest, progress)
    shape = FleetShape(
        prefill=workers.prefill, decode=workers.decode, prefill_slots=workers.slots, decode_slots=workers.slots,
        page_size=workers.page_size, chunk_tokens=workers.chunk_tokens, bytes_per_token=workers.bytes_per_token,
    )  # fmt: skip
    rates = mean_rates(before, after)
    model = modelled(copies(trace, 1), shape, rates, limits, block_tokens=block_tokens).report()
    return {
        "requests": len(trace.requests), "seconds": real["seconds"], "errors": real["errors"],
        "late_ms": real["sender"]["late_ms"], "load_before": load_before, "load_after": load_after,
        "drift": {
            "prefill": round(after.prefill(longest) / before.prefill(longest), 3),
            "decode": round(after.decode(4) / before.decode(4), 3),
        },
        "rates": {
            "prefill_s": dict(zip(rates.prefill.sizes, rates.prefill.seconds, strict=True)),
            "decode_step_s": dict(zip(rates.decode.sizes, rates.decode.seconds, strict=True)),
            "overhead_s": rates.overhead_s,
        },
        "compared": {name: _compared(real, model, path) for name, path in COMPARED},
        "real": real, "model": model,
    }  # fmt: skip


def _in_blocks(request: TraceRequest, block_tokens: int) -> TraceRequest:
    """The request with the blocks that its length has."""
    blocks = -(-request.input_tokens // block_tokens)
    return replace(request, blocks=request.blocks[:blocks])


def _compared(real: dict[str, Any], model: dict[str, Any], path: Sequence[str]) -> dict[str, float]:
    values: list[float] = []
    for report in (real, model):
        value: Any = report
        for field in path:
            value = value[field]
        values.append(float(value))
    return {"real": values[0], "model": values[1], "ratio": round(values[1] / max(values[0], 1e-9), 3)}


def measure(
    path: Path, *, workers: CheckedFleet, requests: int = 300, speed: float = 1.0, scale: float = 0.05,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """The first requests of a trace, lengths scaled down, to daemons of this host and to the model of such a fleet.

    Rates are measured through the router before and after: prompts alone by their length, steps by the requests of a
    batch. The model gets their mean. A ratio is the model's figure over the fleet's.
    """
    return asyncio.run(_check(path, workers, requests, speed, scale, progress))


def show(result: dict[str, Any]) -> None:
    """Prints it."""
    rows = [
        [name, f"{compared['real']:,.2f}", f"{compared['model']:,.2f}", f"{compared['ratio']:.2f}"]
        for name, compared in result["compared"].items()
    ]
    title = f"{result['requests']} requests in {result['seconds']:.0f} s, load {result['load_before']} to "
    title += f"{result['load_after']}; rates after / before: {result['drift']}; errors {result['errors'] or 'none'}"
    print_tables([[["", "fleet", "model", "model / fleet"], *rows]], width=110, title=title, names=("",))
