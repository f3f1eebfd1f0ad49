"""How `bench pd` is told: a table for people, one JSON object for programs; each goal says whether it is met."""

from __future__ import annotations

import os
from dataclasses import fields
from json import dumps

from rich.console import Console
from rich.table import Table

from ..tracing.ttft import Split
from .pd import Goal, Point, Result, goals

TIMES = tuple(each.name for each in fields(Split) if each.name.endswith("_s"))
_COLUMNS = ("TTFT", "compute", "exposed", "admission", "first step", "tokens/s")


def figures(result: Result) -> dict[str, object]:
    """All of it as plain values, times in milliseconds."""
    both = result.both
    return {
        "devices": {"prefill": result.devices[0], "decode": result.devices[1]},
        "chunk_tokens": result.chunk_tokens,
        "rounds": result.rounds,
        "load_1min": round(os.getloadavg()[0], 2),
        "prompts": {
            series.attention: {str(point.tokens): _of_point(point) for point in series.points}
            for series in result.series
        },
        "rows_alone": {
            series.attention: {
                str(tokens): {
                    "bytes": pushed.byte_count,
                    "gb_s": _rounded(pushed.byte_count / pushed.push_s / 1e9),
                    "to_ready_gb_s": _rounded(pushed.byte_count / pushed.ready_s / 1e9),
                    "roof_gb_s": _rounded(pushed.byte_count / pushed.roof_s / 1e9),
                    "share": _rounded(pushed.roof_s / pushed.push_s),
                }
                for tokens, pushed in series.pushed.items()
            }
            for series in result.series
        },
        "both_cards_gb_s": None if both is None else {"alone": both[0], "at_once": both[1]},
        "goals": [_of_goal(goal) for goal in goals(result)],
    }


def _of_goal(goal: Goal) -> dict[str, object]:
    return {
        "name": goal.name,
        "value": _rounded(goal.value),
        "aim": _rounded(goal.aim),
        "at_least": goal.at_least,
        "unit": goal.unit,
        "met": goal.met,
    }


def _of_point(point: Point) -> dict[str, object]:
    ways: dict[str, object] = {}
    for way, split in point.splits.items():
        times = {f"{name[:-2]}_ms": _rounded(1e3 * getattr(split, name)) for name in TIMES}
        writes = {"writes": split.writes, "last_bytes": split.last_bytes}
        share = _rounded(split.exposed_s / split.ttft_s)
        ways[way] = {"ttft_ms": _rounded(1e3 * split.ttft_s), "exposed_of_ttft": share, **times, **writes}
    return {
        "bytes": point.byte_count,
        "tokens_s": round(point.tokens / point.splits["auto"].compute_s),
        "roof_ms": _rounded(1e3 * point.roof_s),
        "roof_gb_s": _rounded(point.byte_count / point.roof_s / 1e9),
        **ways,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def show(result: Result, *, json: bool) -> int:
    """Prints it; 0, a command's status: a goal that is missed is told, and no failure."""
    if json:
        print(dumps(figures(result)))
        return 0
    console = Console(highlight=False)
    prefill, decode = result.devices
    title = f"prefill on {prefill}, decode on {decode}; ms, medians of {result.rounds}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("prompt", "rows leave"):
        table.add_column(name)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for series in result.series:
        for point in series.points:
            for way, split in point.splits.items():
                table.add_row(f"{series.attention} {point.tokens:,}", way, *_row(point, split))
    console.print(table)
    aims = Table(box=None, show_header=False, pad_edge=False)
    for goal in goals(result):
        met = {True: "met", False: "MISSED", None: "not measured here"}[goal.met]
        value = "" if goal.value is None else f"{goal.value:.4f}"
        aims.add_row(goal.name, value, f"{'>=' if goal.at_least else '<='} {goal.aim:.4g} {goal.unit}", met)
    console.print(aims)
    return 0


def _row(point: Point, split: Split) -> list[str]:
    """Of one way; blank where nothing crossed."""
    parts = split.ttft_s, split.compute_s, split.exposed_s, split.admission_s, split.step_s
    told = [f"{1e3 * seconds:,.3f}" for seconds in parts]
    if not split.writes:
        told = ["", told[1], "", "", ""]
    return [*told, f"{point.tokens / split.compute_s:,.0f}"]
