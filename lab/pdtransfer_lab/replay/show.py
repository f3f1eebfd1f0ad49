"""A replay's report and a plan for people: a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_PERCENTS = ("p50", "p90", "p95", "p99", "max")


def show_replay(report: dict[str, Any]) -> None:
    """Prints it."""
    trace = report["trace"]
    scaled = "" if trace["scale_tokens"] == 1 else f", lengths times {trace['scale_tokens']:g}"
    users = "" if trace["users"] == 1 else f" of {trace['users']:,} times as many users"
    print(f"{trace['file']}{users} at {trace['speed']:g} times its speed{scaled}, against {report['against']}")
    times = Table("ms", *_PERCENTS, box=None, pad_edge=False)
    for name, field in (
        ("first token", "ttft_ms"), ("between tokens", "itl_ms"), ("mean between tokens", "mean_itl_ms"),
        ("whole answer", "total_ms"),
    ):  # fmt: skip
        times.add_row(name, *(_number(report[field].get(percent)) for percent in _PERCENTS))
    console = Console(highlight=False)
    console.print(times)
    rows = [
        ("answered", f"{report['answered']:,} of {report['requests']:,} in {report['seconds']:,.1f} s"),
        ("throughput", f"{report['requests_per_s']:,.3g} requests/s, {report['output_tokens_per_s']:,.1f} tokens/s"),
        ("good", f"{report['good_share']:.2%}, {report['goodput_per_s']:,.3g} requests/s ({_slo(report['slo'])})"),
        ("cached", f"{report['cached_tokens']:,} of {report['prompt_tokens']:,} prompt tokens"),
        ("arena, high water", _arena(report)),
        ("errors", ", ".join(f"{count:,} x {name}" for name, count in report["errors"].items()) or "none"),
    ]
    sender = report.get("sender")
    if sender is not None:
        late = sender["late_ms"]
        text = (
            f"p50 {_number(late['p50'])} ms, p99 {_number(late['p99'])} ms, {sender['late_over_100_ms']:,} over 100 ms"
        )
        rows.append(("sender late by", text))
    if report.get("short_answers"):
        rows.append(("short answers", f"{report['short_answers']:,} had fewer tokens than were asked for"))
    if (fleet := report.get("fleet")) is not None:
        rows.append(("busy", f"prefill {fleet['prefill_busy_mean']:.0%}, decode {fleet['decode_busy_mean']:.0%}"))
        links = f"prefill {fleet['prefill_link_gb_s_max']:,.3g}, decode {fleet['decode_link_gb_s_max']:,.3g} GB/s"
        rows.append(("busiest second of a link", links))
    _print(console, rows)


def show_plan(plan: dict[str, Any]) -> None:
    """Prints it."""
    worker, trace, report = plan["a_worker"], plan["trace"], plan["expected"]
    console = Console(highlight=False)
    least = plan["least_by_work"]
    users = "" if trace["users"] == 1 else f", {trace['users']:,} times the users"
    goal = f"{plan['share']:.1%} of {report['requests']:,} requests good ({_slo(report['slo'])})"
    pool = f"{worker['prefill_slots']:,} slots, {worker['prefill_pool_gib']:,.1f} GiB"
    arena = f"{worker['decode_slots']:,} slots in use, {worker['decode_arena_gib']:,.1f} GiB"
    arena += f", a batch of {worker['batch']:,}"
    ports = f"{worker['mooncake_ports_of_a_decode']:,} of a decode worker, {worker['sessions_of_a_decode']:,} sessions"
    ports += "" if worker["mooncake_sessions_fit"] else ": more than a process may have, part the fleet"
    rows = [
        ("for", f"{trace['file']}{users}: {goal}"),
        ("prefill workers", f"{plan['prefill']:,} (the work alone takes {least['prefill']:,})"),
        ("decode workers", f"{plan['decode']:,} (the work alone takes {least['decode']:,})"),
        ("a prefill worker", f"{pool}, {worker['prefill_link_gb_s']:,.3g} GB/s in its busiest second"),
        ("a decode worker", f"{arena}, {worker['decode_link_gb_s']:,.3g} GB/s in its busiest second"),
        ("Mooncake ports", ports),
        ("router", f"--limits.rooms-max {worker['rooms_max']:,} at least"),
    ]
    _print(console, rows)
    show_replay({"trace": trace, "against": f"a model of {plan['prefill']:,} and {plan['decode']:,} workers"} | report)


def _print(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _slo(slo: dict[str, Any]) -> str:
    parts = [
        f"{name} within {slo[field]:g} ms"
        for name, field in (("first token", "ttft_ms"), ("tokens", "itl_ms"))
        if slo[field] is not None
    ]
    return ", ".join(parts) or "no SLO: every answer"


def _arena(report: dict[str, Any]) -> str:
    share, tokens = report["arena_high_water_share"], report["arena_high_water_tokens"]
    return "not read: --metrics host:port" if share is None else f"{share:.1%}, {tokens:,.0f} slots"
