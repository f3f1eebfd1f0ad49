"""Prefill on one card, decode on another: where the time to the first token goes, and what the transfer hides of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple

from benchmarks import both_cards

from ..config.config import Attention, DecodeConfig, PrefillConfig
from ..errors import WorldError
from ..kernels import driver
from ..limits import Limits
from ..tracing.ttft import Split
from .pd_pair import Pair, Run
from .pd_rank import Way

ENGINE = "pdtransfer.reference.deep:create"
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
CARDS = 0, 1
LIMITS = Limits(room_deadline_ms=600_000, silence_ms=20_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is to be reached; `value` is None where this host cannot say."""

    name: str
    value: float | None
    aim: float
    at_least: bool = False
    unit: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it is reached."""
        if self.value is None:
            return None
        return self.value >= self.aim if self.at_least else self.value <= self.aim


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Prompts of one size: the median of each part over the rounds, by how rows left, and one run of each for the
    picture."""

    tokens: int
    byte_count: int
    roof_s: float  # the copy engine, or a memcpy, with the same bytes
    splits: dict[Way, Split]
    shown: dict[Way, Run]

    @property
    def tail_aim_s(self) -> float:
        """The last write's bytes at 0.95 of the copy engine's rate, and half a millisecond."""
        return self.splits["auto"].last_bytes / self.byte_count * self.roof_s / 0.95 + 0.5e-3


class Pushed(NamedTuple):
    """Bytes, and the seconds that they take: the writes, from lease to READY, and the roof."""

    byte_count: int
    push_s: float
    ready_s: float
    roof_s: float


@dataclass(slots=True, kw_only=True)
class Series:
    """One kind of attention: prompts by size, and rows with nothing computed, by tokens."""

    attention: Attention
    points: list[Point] = field(default_factory=list[Point])
    pushed: dict[int, Pushed] = field(default_factory=dict[int, Pushed])


@dataclass(slots=True, kw_only=True)
class Result:
    """What was measured, and where."""

    devices: tuple[str, str]
    chunk_tokens: int
    rounds: int
    series: list[Series] = field(default_factory=list[Series])
    both: tuple[tuple[float, float], tuple[float, float]] | None = None  # GB/s of two cards, each alone, and at once


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
    attentions: Sequence[Attention] = ("mla", "gqa"),
    rounds: int = 3,
    chunk_tokens: int = 8_192,
    engine_option: tuple[str, ...] = (),
    hisparse: bool = False,
    on: tuple[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Prompts of each size, one at a time, from a prefill process to a decode process: `on` are their devices.

    Each process has an engine's thread and a node on a loop, as a daemon; a pipe stands for the router. For each size
    and in each round a prompt is computed with rows leaving as `auto` chooses, by layers, all at the end, and without
    any leaving; the first prompts of a size are not counted, and their rows are summed on both sides. What a prompt's
    time went into is by spans: of the card's own events where it computes, of the clock elsewhere. Then rows alone, as
    many as there are of each size, of pages anywhere in the pool. The roof is one copy of as many bytes by the copy
    engine from the same pool into registered memory, in pieces of 256 MiB; without a card a memcpy into shared memory.
    Each figure is the median over rounds. WorldError where rows have landed that are not the same.
    """
    on = on or devices()
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
        say(f"{attention}: starting a prefill process on {on[0]} and a decode process on {on[1]}")
        with tempfile.TemporaryDirectory(prefix="pdtransfer-bench-") as sockets:
            configs = _configs(attention, max(sizes), on, chunk_tokens, options, hot, Path(sockets))
            with Pair(*configs) as pair:
                for size in sizes:
                    say(f"{attention}: prompts of {size:,} tokens")
                    series.points.append(_point(pair, size, rounds, on_card=not small))
                say(f"{attention}: rows alone")
                _push_alone(pair, series, sorted({*(each for each in SWEPT if each <= max(sizes)), *sizes}), rounds)
    if len(set(on)) == len(CARDS) and not small:
        say("both cards at once")
        result.both = both_cards.measure(CARDS)
    return result


def _configs(
    attention: Attention, most: int, on: tuple[str, str], chunk_tokens: int, options: tuple[str, ...],
    hot: dict[str, Any], sockets: Path,
) -> tuple[PrefillConfig, DecodeConfig]:  # fmt: skip
    slots = (most // PAGE_SIZE + 2) * PAGE_SIZE
    prefill = PrefillConfig(
        node="prefill", attention=attention, slots=slots, page_size=PAGE_SIZE, chunk_tokens=chunk_tokens, device=on[0],
        engine=ENGINE, engine_option=options, limits=LIMITS,
    )  # fmt: skip
    decode = DecodeConfig(
        node="decode", attention=attention, slots=slots, device=on[1], engine=ENGINE, engine_option=options,
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
        for at in range(len(ways)):  # in turn, each first once
            way = ways[(at + number) % len(ways)]
            if on_card:
                time.sleep(REST_S)
            runs[way].append(pair.prompt(tokens, way))
    splits: dict[Way, Split] = {way: _median(run.split for run in found) for way, found in runs.items()}
    byte_count = splits["end"].byte_count
    shown: dict[Way, Run] = {
        way: min(found, key=lambda run, way=way: abs(run.split.ttft_s - splits[way].ttft_s))
        for way, found in runs.items()
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
    found = list(splits)
    middle = {each.name: median if each.name.endswith("_s") else median_low for each in fields(Split)}
    return Split(**{name: of(getattr(split, name) for split in found) for name, of in middle.items()})


def goals(result: Result) -> list[Goal]:
    """What the project has set itself, for each size that it is about."""
    found: list[Goal] = []
    for series in result.series:
        for point in series.points:
            auto, serial, alone = (point.splits[way] for way in ("auto", "end", "none"))
            name = f"{series.attention}, {point.tokens:,} tokens: "
            if point.tokens >= 1_024:
                share = auto.exposed_s / serial.exposed_s
                found.append(Goal(name=name + "exposed transfer, of the serial transfer", value=share, aim=0.1))
            if point.tokens >= 8_192:
                share = auto.exposed_s / auto.compute_s
                found.append(Goal(name=name + "exposed transfer, of prefill's compute", value=share, aim=0.01))
            tail = 1e3 * auto.tail_s, 1e3 * point.tail_aim_s
            found.append(Goal(name=name + "last layer computed to READY", value=tail[0], aim=tail[1], unit="ms"))
            slower = auto.compute_s / alone.compute_s - 1
            found.append(Goal(name=name + "prefill slowed by the push", value=slower, aim=0.02))
    alone, together = result.both or ((1.0, 1.0), (0.0, 0.0))
    for number in range(2):
        share = together[number] / alone[number] if result.both else None
        found.append(Goal(name=f"card {number} while both push, of it alone", value=share, aim=0.95, at_least=True))
    return found
