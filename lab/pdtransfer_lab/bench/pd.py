"""Prefill on one card, decode on another: where the time to the first token goes, and what the transfer hides of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from json import dumps
from pathlib import Path
from re import findall
from statistics import median, median_low
from typing import Any, NamedTuple

import msgspec

from pdtransfer.errors import WorldError
from pdtransfer.kernels import driver
from pdtransfer.limits import Limits
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.serve.tracing.spans import TimedSpan
from pdtransfer.serve.tracing.ttft import Split, split_of

from ..models import AttentionKind
from .pd_rank import DecodeSide, PrefillSide, Prompt, Report, Way
from .processes import Processes, answer
from .report import about, print_tables

ENGINE = "pdtransfer_lab.models.deep:create"
TOKENS = (128, 1_024, 8_192, 32_768)
SMALL = (16, 64, 256)  # tokens, where engines compute on the CPU
SMALL_OPTIONS = ("layers=6", "width=128", "mlp_width=256", "heads=4", "kv_heads=2")
# top_k, and the tokens of a request that the device holds: shorter prompts are preloaded, longer ones swap in.
SPARSE, SMALL_SPARSE = (2_048, 4_096), (16, 64)
SWEPT = (1, 16, 64, 256, 1_024, 4_096)  # tokens that are pushed with nothing computed, besides those of the prompts
WAYS: tuple[Way, ...] = ("auto", "layers", "end", "none")
REST_S = 0.25  # before each prompt that is counted: a card that has just computed may compute slower
LONG = 16_384  # tokens, from which on `auto` goes by layers anyway, and a prompt takes its time
PAGE_SIZE = 64
LIMITS = Limits(room_deadline_ms=600_000, silence_ms=20_000)
LATE_S_MAX = 3e-3  # by which a card's clock may be set wrong
_ANSWER_S = 180.0  # weights are drawn and an arena is backed within it
_answer = partial(answer, who="a process of the bench", within_s=_ANSWER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One prompt: when it was asked, what both processes did, and whether its rows were the same where they landed."""

    prompt: Prompt
    asked_s: float
    spans: tuple[TimedSpan, ...]
    same: bool | None  # None: not compared

    def of(self, process: str, *lanes: str) -> list[TimedSpan]:
        """What one process did in these lanes, by when it began."""
        spans = (span for span in self.spans if span.process == process and span.lane in lanes)
        return sorted(spans, key=lambda span: span.begin_s)

    @property
    def split(self) -> Split:
        """Where its time went. Raises WorldError where the engine reports no spans of its layers."""
        if self.prompt.way != "alone" and not self.of("prefill", "compute"):
            raise WorldError("the engine reports no spans of its layers: EngineConfig.spans")
        return split_of(self.spans, self.of("decode", "step"), self.asked_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Prompts of one size: the median of each part over the rounds, by how rows left, and one run of each for the
    picture."""

    tokens: int
    byte_count: int
    roof_s: float  # the copy engine, or a memcpy, with the same bytes
    splits: dict[Way, Split]
    shown: dict[Way, Run]


class Pushed(NamedTuple):
    """Bytes, and the seconds that they take: the writes, from lease to READY, and the roof."""

    byte_count: int
    push_s: float
    ready_s: float
    roof_s: float


@dataclass(slots=True, kw_only=True)
class Series:
    """One kind of attention: prompts by size, and rows with nothing computed, by tokens."""

    attention: AttentionKind
    points: list[Point] = field(default_factory=list[Point])
    pushed: dict[int, Pushed] = field(default_factory=dict[int, Pushed])


@dataclass(slots=True, kw_only=True)
class Result:
    """What was measured, and where."""

    devices: tuple[str, str]
    chunk_tokens: int
    rounds: int
    series: list[Series] = field(default_factory=list[Series])

    @property
    def roof(self) -> str:
        """What no write can beat here."""
        return "memcpy" if "cpu" in self.devices else "DMA"


def devices() -> tuple[str, str]:
    """Prefill's and decode's: two cards, or one for both, or the CPU."""
    match driver.count():
        case 0:
            return "cpu", "cpu"
        case 1:
            return "cuda:0", "cuda:0"
        case _:
            return "cuda:0", "cuda:1"


def measure(
    *,
    tokens: Sequence[int] = (),
    attentions: Sequence[AttentionKind] = ("mla", "gqa"),
    rounds: int = 3,
    chunk_tokens: int = 8_192,
    engine_option: tuple[str, ...] = (),
    hisparse: bool = False,
    on: tuple[str, str] = ("", ""),
    progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """Prompts of each size, one at a time, from a prefill process to a decode process: `on` are their devices.

    Each process has an engine's thread and a node on a loop, as a daemon; a pipe stands for the router. For each size
    and in each round a prompt is computed with rows leaving as `auto` chooses, by layers, all at the end, and without
    any leaving. The first prompts of a size are not counted, and their rows are summed on both sides. What a prompt's
    time went into is by spans: of the card's own events where it computes, of the clock elsewhere. Then rows alone, as
    many as there are of each size, of pages anywhere in the pool. The roof is one copy of as many bytes by the copy
    engine from the same pool into registered memory, in pieces of 256 MiB. Without a card it is a memcpy into shared
    memory. Each figure is the median over rounds. Raises WorldError where rows that landed differ.
    """
    names = devices()
    on = on[0] or names[0], on[1] or names[1]
    small = on == ("cpu", "cpu")
    sizes = tuple(tokens) or (SMALL if small else TOKENS)
    top_k, hot_tokens = SMALL_SPARSE if small else SPARSE
    sparse = (f"top_k={top_k}",) if hisparse else ()
    options = (*(SMALL_OPTIONS if small else ()), *sparse, *engine_option)
    hot = {"enable_hisparse": True, "hot_tokens": hot_tokens} if hisparse else {}
    result = Result(devices=on, chunk_tokens=chunk_tokens, rounds=rounds)
    for attention in attentions:
        series = Series(attention=attention)
        result.series.append(series)
        progress(f"{attention}: starting a prefill process on {on[0]} and a decode process on {on[1]}")
        with tempfile.TemporaryDirectory(prefix="pdtransfer-bench-") as sockets:
            configs = _configs(attention, max(sizes), on, chunk_tokens, options, hot, Path(sockets))
            with Pair(*configs) as pair:
                for size in sizes:
                    progress(f"{attention}: prompts of {size:,} tokens")
                    series.points.append(_point(pair, size, rounds, on_card=not small))
                progress(f"{attention}: rows alone")
                _push_alone(
                    pair,
                    series,
                    sorted({*(byte_count for byte_count in SWEPT if byte_count <= max(sizes)), *sizes}),
                    rounds,
                )
    return result


def _configs(
    attention: AttentionKind, most: int, on: tuple[str, str], chunk_tokens: int, options: tuple[str, ...],
    hot: dict[str, Any], sockets: Path,
) -> tuple[PrefillConfig, DecodeConfig]:  # fmt: skip
    slots, options = (most // PAGE_SIZE + 2) * PAGE_SIZE, (f"attention={attention}", *options)
    prefill = PrefillConfig(
        node="prefill", slots=slots, page_size=PAGE_SIZE, chunk_tokens=chunk_tokens, device=on[0],
        engine=ENGINE, engine_option=options, limits=LIMITS,
    )  # fmt: skip
    decode = DecodeConfig(
        node="decode", slots=slots, device=on[1], engine=ENGINE, engine_option=options,
        limits=LIMITS, socket_directory=sockets, **hot,
    )  # fmt: skip
    return prefill, decode


def _point(pair: Pair, tokens: int, rounds: int, *, on_card: bool) -> Point:
    ways: tuple[Way, ...] = WAYS if tokens < LONG else ("auto", "end", "none")
    for way in ways if tokens < LONG else ways[:1]:
        warm = pair.prompt(tokens, way, check=way != "none")
        if warm.same is False:
            raise WorldError(f"{tokens} tokens, push {way}: rows have landed that are not what was computed")
    runs: dict[Way, list[Run]] = {way: [] for way in ways}
    for number in range(rounds):
        for index in range(len(ways)):  # in turn, each first once
            way = ways[(index + number) % len(ways)]
            if on_card:
                time.sleep(REST_S)
            runs[way].append(pair.prompt(tokens, way))
    splits: dict[Way, Split] = {way: _median(run.split for run in runs_of_way) for way, runs_of_way in runs.items()}
    byte_count = splits["end"].byte_count
    shown: dict[Way, Run] = {
        way: min(runs_of_way, key=lambda run, way=way: abs(run.split.ttft_s - splits[way].ttft_s))
        for way, runs_of_way in runs.items()
    }
    [roof_s] = pair.roof([byte_count])
    return Point(tokens=tokens, byte_count=byte_count, roof_s=roof_s, splits=splits, shown=shown)


def _push_alone(pair: Pair, series: Series, sizes: Sequence[int], rounds: int) -> None:
    splits: dict[int, tuple[Split, float]] = {}
    for tokens in sizes:
        pair.prompt(tokens, "alone")
        runs = [pair.prompt(tokens, "alone") for _ in range(max(3, rounds))]
        ready_s = median(run.of("decode", "landing")[0].seconds for run in runs)
        splits[tokens] = _median(run.split for run in runs), ready_s
    roofs = pair.roof([split.byte_count for split, _ in splits.values()])
    for (tokens, (split, ready_s)), roof_s in zip(splits.items(), roofs, strict=True):
        series.pushed[tokens] = Pushed(split.byte_count, split.push_s, ready_s, roof_s)


def _median(splits: Iterable[Split]) -> Split:
    """Field by field."""
    all_splits = list(splits)
    middle = {field.name: median if field.name.endswith("_s") else median_low for field in fields(Split)}
    return Split(**{name: of(getattr(split, name) for split in all_splits) for name, of in middle.items()})


class Pair(Processes):
    """Both processes, each with its engine. A failure in one of them is raised here as WorldError."""

    def __init__(self, prefill: PrefillConfig, decode: DecodeConfig) -> None:
        super().__init__()
        self._hisparse, self._on_card = decode.enable_hisparse, prefill.device_index is not None
        self._rooms = 0
        try:
            self._prefill = self._start(PrefillSide, prefill)
            self._decode = self._start(DecodeSide, decode)
            self._decode.send(_answer(self._prefill))
            _answer(self._decode)
        except BaseException:
            self.close()
            raise

    def prompt(self, tokens: int, way: Way, *, steps: int = 2, check: bool = False) -> Run:
        """One prompt, from the asking until both sides are done with it."""
        self._rooms += 1
        order = Prompt(self._rooms, tokens, way, steps, check, self._hisparse)
        asked_s = time.monotonic()
        self._prefill.send(("answer_prompt", order))
        self._decode.send(("answer_prompt", order))
        prefill: Report = _answer(self._prefill)
        decode: Report = _answer(self._decode)
        spans = tuple(span for span in (*prefill.spans, *decode.spans) if span.room in (0, order.room))
        if self._on_card:
            spans = _set_right(spans)
        same = _same(prefill, decode) if check else None
        return Run(prompt=order, asked_s=asked_s, spans=spans, same=same)

    def roof(self, byte_counts: Sequence[int], *, repeats: int = 5) -> list[float]:
        """Seconds that each number of bytes takes at least, each the median of several."""
        self._prefill.send(("roof", tuple(byte_counts), repeats))
        return _answer(self._prefill)


def _set_right(spans: tuple[TimedSpan, ...]) -> tuple[TimedSpan, ...]:
    """What a card has computed is timed by its own clock. A thread sets that clock, and may wait for the interpreter in
    between. So it may seem later than it was, but not later than the begin of the write that waited for it.

    Raises WorldError where it is out by more than that can be: rows would have left that were not there yet.
    """
    late_s = 0.0
    for push in (span for span in spans if span.lane == "push"):
        first, end, low, high = map(int, findall(r"\d+", push.name)[:4])
        for span in (span for span in spans if span.lane == "compute" and low <= span.layer < high):
            own_first, own_end = map(int, findall(r"\d+", span.name)[:2])
            if own_first < end and first < own_end:
                late_s = max(late_s, span.end_s - push.begin_s)
    if late_s > LATE_S_MAX:
        raise WorldError(f"rows have left {1e3 * late_s:.1f} ms before they were computed")
    return tuple(
        msgspec.structs.replace(span, begin_s=span.begin_s - late_s, end_s=span.end_s - late_s)
        if span.lane in ("compute", "pick")
        else span
        for span in spans
    )


def _same(prefill: Report, decode: Report) -> bool:
    """What landed in DRAM is what was in the pool; components whose rows went elsewhere are not looked at."""
    return bool(decode.sums) and all(prefill.sums.get(key) == value for key, value in decode.sums.items())


def figures(result: Result) -> dict[str, object]:
    """All of it as plain values, times in milliseconds."""
    return {
        "devices": {"prefill": result.devices[0], "decode": result.devices[1]},
        "chunk_tokens": result.chunk_tokens,
        "rounds": result.rounds,
        "prompts": {
            series.attention: {str(point.tokens): _of_point(point) for point in series.points}
            for series in result.series
        },
        "rows_alone": {
            series.attention: {
                str(tokens): {
                    "bytes": pushed.byte_count,
                    "gb_s": rounded(pushed.byte_count / pushed.push_s / 1e9),
                    "to_ready_gb_s": rounded(pushed.byte_count / pushed.ready_s / 1e9),
                    "roof_gb_s": rounded(pushed.byte_count / pushed.roof_s / 1e9),
                    "share": rounded(pushed.roof_s / pushed.push_s),
                }
                for tokens, pushed in series.pushed.items()
            }
            for series in result.series
        },
    }


def _of_point(point: Point) -> dict[str, object]:
    ways: dict[str, object] = {}
    for way, split in point.splits.items():
        times = {f"{name[:-2]}_ms": rounded(1e3 * value) for name, value in asdict(split).items() if name[-2:] == "_s"}
        ways[way] = {
            "ttft_ms": rounded(1e3 * split.ttft_s),
            "exposed_of_ttft": rounded(split.exposed_s / split.ttft_s),
            **times,
            "writes": split.writes,
            "last_bytes": split.last_bytes,
        }
    return {
        "bytes": point.byte_count,
        "tokens_s": round(point.tokens / point.splits["auto"].compute_s),
        "roof_ms": rounded(1e3 * point.roof_s),
        "roof_gb_s": rounded(point.byte_count / point.roof_s / 1e9),
        **ways,
    }


def rounded(value: float) -> float:
    """To four digits."""
    return float(f"{value:.4g}")


def tables(result: Result) -> list[list[list[str]]]:
    """What prompts' time went into, in ms, and the rates of rows alone; of each table the first row is the head."""
    parts = "ask", "compute", "exposed", "admission", "step"
    splits = [["prompt", "rows leave", "TTFT", *parts, "last layer to READY", "writes", "tokens/s"]]
    rates = [["rows alone", "MB", "writes GB/s", "to READY GB/s", "roof GB/s", "writes of the roof"]]
    for series in result.series:
        for point in series.points:
            for way, split in point.splits.items():
                times = [split.ttft_s, *(getattr(split, f"{part}_s") for part in parts), split.tail_s]
                cells = [*(f"{1e3 * seconds:,.3f}" for seconds in times), str(split.writes)]
                if not split.writes:  # nothing was transferred
                    cells = ["", *cells[1:3], "", "", "", "", ""]
                name = f"{series.attention} {point.tokens:,}"
                splits.append([name, way, *cells, f"{point.tokens / split.compute_s:,.0f}"])
        for tokens, pushed in sorted(series.pushed.items()):
            seconds = pushed.push_s, pushed.ready_s, pushed.roof_s
            columns = [f"{pushed.byte_count / took_s / 1e9:.2f}" for took_s in seconds]
            name, share = f"{series.attention} {tokens:,}", f"{pushed.roof_s / pushed.push_s:.2f}"
            rates.append([name, f"{pushed.byte_count / 1e6:,.2f}", *columns, share])
    return [splits, rates]


def show(result: Result, *, json: bool) -> int:
    """Prints it. Returns 0, a command's status."""
    if json:
        print(dumps(figures(result) | about(measure) | {"tables": tables(result)}))
        return 0
    prefill, decode = result.devices
    title = f"prefill on {prefill}, decode on {decode}; ms, medians of {result.rounds}"
    print_tables(tables(result), width=120, title=title, names=("prompt", "rows leave", "rows alone"))
    return 0
