"""Two parties that do the same work on a GPU: their bytes are checked, then their launches are timed in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Protocol

from pdtransfer.errors import PDTransferError

from .replays import Seconds
from .report import Figures, Line

_ROUGH_RUNS = 3
_REFUSALS = (PDTransferError, RuntimeError, ValueError, TypeError)


class InTurn(Protocol):
    """What Replays does."""

    def in_turn(self, works: list[Callable[[int], object]], *, nodes: int, runs: int) -> list[Seconds]: ...


class Contender(NamedTuple):
    """One way to do some work. `launch` queues it, with the inputs of a turn, on a stream (a CUstream's address).
    `problem` does it once and returns what is wrong with its bytes, or nothing."""

    name: str
    launch: Callable[[int, int], object]
    problem: Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Our way to do some work and the opponent's, of which the first is its default.

    A graph has as many launches as there are `turns`. One of them carries `byte_count` bytes over the bus, or none
    that count; `roof` queues a plain copy of the same bytes.
    """

    name: str
    what: str
    ours: Contender
    theirs: tuple[Contender, ...]
    turns: int
    byte_count: int = 0
    roof: Callable[[int], object] | None = None


def compare(clock: InTurn, this: Comparison, *, runs: int) -> Figures:
    """Medians in microseconds of `ours`, of the opponent's `best` way and of its `default`, under the comparison's
    name. `ratio` is best / ours, `share` is roof / ours, `ways` are all of the opponent's in the rounds that chose its
    best. `note` names each way with wrong bytes or an error. It has no time, and nothing has one if ours, or all of the
    opponent's, are among them."""
    problems = {contender.name: text for contender in (this.ours, *this.theirs) if (text := _problem(contender))}
    able = [contender for contender in this.theirs if contender.name not in problems]
    figures: Figures = {}
    if this.ours.name not in problems and able:
        try:
            figures = _times(clock, this, able, runs)
        except _REFUSALS as error:
            problems["timing"] = _text(error)
    figures["note"] = "; ".join(f"{name}: {text}" for name, text in problems.items())
    return {f"{this.name}_{name}": value for name, value in figures.items()}


def _times(clock: InTurn, this: Comparison, able: list[Contender], runs: int) -> Figures:
    rough = clock.in_turn([_work(contender, this.turns) for contender in able], nodes=this.turns, runs=_ROUGH_RUNS)
    best = min(zip(rough, able, strict=True), key=lambda timed: timed[0].median)[1]
    chosen = [
        best,
        this.ours,
        *(contender for contender in this.theirs[:1] if contender in able and contender is not best),
    ]
    works = [_work(contender, this.turns) for contender in chosen]
    if this.roof is not None:
        works.append(this.roof)
    times = clock.in_turn(works, nodes=this.turns, runs=runs)
    ways = ", ".join(
        f"{contender.name}: {seconds.median * 1e6:.2f}" for seconds, contender in zip(rough, able, strict=True)
    )
    figures: Figures = {"best": best.name, "ways": ways, "turns": this.turns}
    for name, times_of in (("theirs", times[0]), ("ours", times[1])):
        figures |= {
            f"{name}_us": times_of.median * 1e6,
            f"{name}_low_us": times_of.low * 1e6,
            f"{name}_high_us": times_of.high * 1e6,
        }
    if this.theirs[0] in able:
        figures["default_us"] = times[chosen.index(this.theirs[0])].median * 1e6
    figures["ratio"] = times[0].median / times[1].median
    if this.roof is not None:
        figures["share"] = times[-1].median / times[1].median
    if this.byte_count:
        figures["gb_s"] = this.byte_count / times[1].median / 1e9
    return figures


def _work(contender: Contender, turns: int) -> Callable[[int], object]:
    """Turn after turn, such that the launch that warms up has the last one and a graph begins with the first."""
    turn = count(turns - 1)
    return lambda stream: contender.launch(next(turn) % turns, stream)


def _problem(contender: Contender) -> str:
    try:
        return contender.problem()
    except _REFUSALS as error:
        return _text(error)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def line(this_name: str, what: str, figures: Figures) -> Line:
    """A row of the table: the ratio, above 1 where we are faster, and what it is made of."""

    def named(text: str) -> str:
        return text.replace("{", f"{{{this_name}_")

    if f"{this_name}_ratio" not in figures:
        return Line(what, "-", named("not timed: {note}"))
    beside = "{theirs_us:.2f} us by {best}"
    if f"{this_name}_default_us" in figures:
        beside += ", {default_us:.2f} by default"
    beside += "; ours {ours_us:.2f} us"
    for name, text in (("share", ", {share:.3f} of a plain copy"), ("gb_s", ", {gb_s:.1f} GB/s")):
        if f"{this_name}_{name}" in figures:
            beside += text
    if figures[f"{this_name}_note"]:
        beside += "; {note}"
    return Line(what, named("{ratio:.3f}"), named(beside))
