"""`pdtransfer bench pd` held against this project's goals, with both GPUs at once, and beside published figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from json import dumps

from .pd import Point, Result, Series, figures, measure, rounded, tables
from .report import about, print_tables

Rates = tuple[tuple[float, float], tuple[float, float]]
"""GB/s of two GPUs, each alone, and at once."""

# What others have published of transfers between hosts, over networks of up to 200 GB/s with all GPUs of a node, and
# larger models. Here rows are sent within one host, from one GPU at most: shares compare in kind, not in size, and how
# much pipelining saves depends on how long the transfer is beside the computing.
PUBLISHED = (
    (
        "transfer, of the time to the first token",
        "2.4 % (SGLang, Mooncake), 4.2 % (vLLM, Mooncake), 32 K tokens, 12.6 GB",
    ),
    ("sent as computed, against all at the end: time to the first token", "-48 to -68 % at 1-8 K tokens, +18 % at 256"),
    ("of the line's rate", "12 % at 49 MB, 50 % at 394 MB, 71-82 % at 12.6 GB"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is to be reached; `value` is None where this host cannot measure it."""

    name: str
    value: float | None
    aim: float
    at_least: bool = False
    unit: str = ""

    @property
    def met(self) -> bool | None:
        """True if it is reached, None without a value."""
        if self.value is None:
            return None
        return self.value >= self.aim if self.at_least else self.value <= self.aim


def goals(result: Result, both: Rates | None) -> list[Goal]:
    """The project's goals, each for the sizes that it is about."""
    reached: list[Goal] = []
    for series in result.series:
        for point in series.points:
            auto, serial, alone = (point.splits[way] for way in ("auto", "end", "none"))
            name = f"{series.attention}, {point.tokens:,} tokens: "
            if point.tokens >= 1_024:
                share = auto.exposed_s / serial.exposed_s
                reached.append(Goal(name=name + "exposed transfer, of the serial transfer", value=share, aim=0.1))
            if point.tokens >= 8_192:
                share = auto.exposed_s / auto.compute_s
                reached.append(Goal(name=name + "exposed transfer, of prefill's compute", value=share, aim=0.01))
            tail = 1e3 * auto.tail_s, 1e3 * _tail_aim_s(point)
            reached.append(Goal(name=name + "last layer computed to READY", value=tail[0], aim=tail[1], unit="ms"))
            slower = auto.compute_s / alone.compute_s - 1
            reached.append(Goal(name=name + "prefill slowed by the push", value=slower, aim=0.02))
    for number in range(2):
        share = both[1][number] / both[0][number] if both else None
        reached.append(Goal(name=f"GPU {number} while both push, of it alone", value=share, aim=0.95, at_least=True))
    return reached


def _tail_aim_s(point: Point) -> float:
    """The last write's bytes at 0.95 of the copy engine's rate, and half a millisecond."""
    return point.splits["auto"].last_bytes / point.byte_count * point.roof_s / 0.95 + 0.5e-3


def beside(series: Series) -> list[list[str]]:
    """Published figures, and those of a run that they may be compared with."""
    shares: list[str] = []
    saved: list[str] = []
    for point in series.points:
        auto, end = point.splits["auto"], point.splits["end"]
        exposed, serial = (f"{100 * split.exposed_s / split.ttft_s:.3g} %" for split in (auto, end))
        shares.append(f"{point.tokens:,} tokens: {exposed} (all at the end {serial})")
        saved.append(f"{point.tokens:,} tokens: {100 * (auto.ttft_s / end.ttft_s - 1):+.3g} %")
    rates = [
        f"{pushed.byte_count / 1e6:,.3g} MB ({tokens:,}): {100 * pushed.roof_s / pushed.push_s:.3g} %"
        for tokens, pushed in sorted(series.pushed.items())
    ]
    return [
        [claim, series.attention, published, "; ".join(measured)]
        for (claim, published), measured in zip(PUBLISHED, (shares, saved, rates), strict=True)
    ]


def show(result: Result, both: Rates | None, *, json: bool) -> int:
    """Prints it. Returns 0, a command's status, also where a goal is missed."""
    reached = goals(result, both)
    aims = [["goal", "measured", "aim", ""]]
    for goal in reached:
        met = {True: "met", False: "MISSED", None: "not measured here"}[goal.met]
        value = "" if goal.value is None else f"{goal.value:.4f}"
        aims.append([goal.name, value, f"{'>=' if goal.at_least else '<='} {goal.aim:.4g} {goal.unit}".strip(), met])
    published = [["", "", "published", "here"], *(row for series in result.series for row in beside(series))]
    all_tables = [*tables(result), aims, published]
    if json:
        as_goals = [
            asdict(goal) | {"value": None if goal.value is None else rounded(goal.value), "met": goal.met}
            for goal in reached
        ]
        cards = None if both is None else {"alone": both[0], "at_once": both[1]}
        document = {"both_cards_gb_s": cards, "goals": as_goals, "tables": all_tables}
        print(dumps(figures(result) | document | about(measure)))
        return 0
    print_tables(all_tables, width=120)
    return 0
