"""What a demo ends with: one row a prompt, and whether all of it went as it has to."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from .demo_config import DemoConfig


@dataclass(slots=True)
class Answer:
    """What came back for one prompt."""

    prompt: str
    seconds: float = 0.0
    tokens: int = 0
    cached: int = 0  # tokens of the prompt that decode had already
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])  # the router's `pdtransfer` object
    differs: tuple[str, ...] = ()  # digests that are not the single process's
    identical: bool = False


def report_of(config: DemoConfig, answers: Sequence[Answer], seconds: float, leaked: int | None) -> dict[str, Any]:
    """What the run comes to, as `--json` prints it."""
    done = [answer for answer in answers if answer.facts]
    handoffs_ms = sorted(a.facts["handoff_us"] / 1e3 for a in done if a.facts.get("handoff_us") is not None)
    copied = [(a.facts["kv_bytes"], a.facts["copy_us"]) for a in done]
    copy_us = sum(us for _, us in copied)
    tokens = sum(answer.tokens for answer in answers)
    return {
        "requests": len(answers),
        "identical": sum(answer.identical for answer in answers),
        "all_identical": all(answer.identical for answer in answers),
        "differ": sorted({name for answer in answers for name in answer.differs}),
        "failed": sum(bool(answer.error) for answer in answers),
        "attention": config.attention,
        "prefill": config.prefill,
        "decode": config.decode,
        "prefill_tp": config.prefill_tp,
        "prefill_pp": config.prefill_pp,
        "decode_tp": config.decode_tp,
        "bytes": sum(byte_count for byte_count, _ in copied),
        "prompt_tokens": sum(len(answer.prompt) for answer in done),
        "cached_tokens": sum(answer.cached for answer in done),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(done) / seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        "handoff_ms_p50": round(median(handoffs_ms), 3) if handoffs_ms else None,
        "handoff_ms_p99": round(handoffs_ms[ceil(0.99 * (len(handoffs_ms) - 1))], 3) if handoffs_ms else None,
        "copy_gb_s": round(sum(b for b, _ in copied) / copy_us / 1e3, 3) if copy_us else None,
        "slots_leaked": leaked,
    }


def hot_report(
    figures: Mapping[str, int], *, ranks: int, hot_tokens: int, answers: Sequence[Answer]
) -> dict[str, Any]:  # fmt: skip
    """What HiSparse adds to the report: `figures` are sums over `ranks` decode ranks, by the names of their metrics.
    Ranks of a group swap in the same tokens, each its own heads of them."""
    hits, misses = (figures.get(f"pdtransfer_hot_{name}", 0) for name in ("hits", "misses"))
    others = ("swapped_bytes", "retracts", "staging_copies", "index_copies")
    return {
        "hot_tokens": hot_tokens,
        "longer_than_hot": sum(len(answer.prompt) > hot_tokens for answer in answers),
        "hot_ranks": ranks,
        "hot_hits": hits,
        "hot_misses": misses,
        "hit_rate": round(hits / (hits + misses), 4) if hits + misses else None,
    } | {name: figures.get(f"pdtransfer_{name}", 0) for name in others}


def good(report: dict[str, Any]) -> bool:
    """Whether it went as it has to. A mismatch fails its room, which is prefilled once more: the answer hides it."""
    wrong = ("slots_leaked", "grants_mismatched", "staging_copies")
    verified = report.get("grants_verified", report["requests"]) >= report["requests"]
    return report["all_identical"] and verified and not any(report.get(name) for name in wrong)


def show(answers: Sequence[Answer], report: dict[str, Any]) -> None:
    """The table of answers, and below it the sum."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("prompt", "was there", "KV bytes", "GB/s", "hand-off", "tokens", "total", "identical"):
        table.add_column(name, justify="right")
    for answer in sorted(answers, key=lambda each: len(each.prompt)):
        facts = answer.facts
        if answer.error:
            table.add_row(f"{len(answer.prompt)} B", "", "", "", "", "", "", f"[red]failed: {answer.error}")
            continue
        handoff_us, copy_us = facts.get("handoff_us"), facts["copy_us"]
        table.add_row(
            f"{len(answer.prompt):,} B",
            f"{answer.cached:,}" if answer.cached else "-",
            f"{facts['kv_bytes']:,}",
            f"{facts['kv_bytes'] / copy_us / 1e3:.2f}" if copy_us else "-",
            f"{handoff_us / 1e3:.2f} ms" if handoff_us is not None else "-",
            str(answer.tokens),
            f"{answer.seconds:.2f} s",
            "[green]yes" if answer.identical else "[red]NO",
        )
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    leaked = "slots not counted" if report["slots_leaked"] is None else f"{report['slots_leaked']} slots leaked"
    verified, color = "", "green" if good(report) else "red"
    if "grants_verified" in report:
        verified = f"; {report['grants_verified']} grants verified, {report['grants_mismatched']} mismatched"
    console.print(
        f"\n{report['requests']} requests, {report['bytes'] / 1e6:,.1f} MB of KV in {report['seconds']:.1f} s: "
        f"{report['requests_per_s']:.1f} requests/s, {report['tokens_per_s']:.0f} tokens/s, "
        f"copies at {report['copy_gb_s']} GB/s\n"
        f"{report['cached_tokens']:,} of {report['prompt_tokens']:,} prompt tokens were there already\n"
        f"hand-off, last cell written to READY: p50 {report['handoff_ms_p50']} ms, p99 {report['handoff_ms_p99']} ms\n"
        f"[{color}]{report['identical']} of {report['requests']} identical to a single process "
        f"(tokens, logits, KV); {leaked}{verified}{_hot(report)}"
    )


def _hot(report: dict[str, Any]) -> str:
    """A line of its own, where the demo decoded from hot tokens."""
    if "hot_tokens" not in report:
        return ""
    where = f"on {report['hot_ranks']} ranks together, " if report["hot_ranks"] > 1 else ""
    found = "nothing swapped" if report["hit_rate"] is None else f"{report['hit_rate']:.1%} of picks were hot"
    return (
        f"\n{report['longer_than_hot']} prompts are longer than the {report['hot_tokens']} tokens that the device "
        f"holds of each: {found}, {where}{report['hot_misses']:,} swapped in, {report['swapped_bytes'] / 1e6:,.1f} MB; "
        f"{report['retracts']} retracts, {report['staging_copies']} staging copies, "
        f"{report['index_copies']} index copies"
    )
