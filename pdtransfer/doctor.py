"""What this host has and lacks, and the command that mends each; status 1 if something required is missing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from json import dumps

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import PDTransferError
from .probes import PROBES, State, missing

COLORS: dict[State, str] = {"ok": "green", "warn": "yellow", "missing": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: `found` says what is there, `mend` is the command that changes it, empty where nothing is amiss."""

    name: str
    state: State
    found: str
    mend: str


def run(*, json: bool) -> int:
    """Looks at everything, prints a table or one JSON object, and answers 1 if something required is missing."""
    findings = examine()
    lacking = [each.name for each in findings if each.state == "missing"]
    if json:
        print(dumps({"ok": not lacking, "findings": [asdict(each) for each in findings]}))
    else:
        _show(findings, lacking)
    return int(bool(lacking))


def examine() -> list[Finding]:
    """Every finding, in the order of the house: Python first, the network last. Never raises for the host's faults."""
    findings: list[Finding] = []
    for name, (probe, mend) in PROBES.items():
        try:
            seen = probe()
        except (OSError, ImportError, LookupError, ValueError, PDTransferError) as error:
            seen = missing(f"{type(error).__name__}: {error}", mend)
        findings.append(Finding(name=name, state=seen.state, found=seen.found, mend=seen.mend))
    return findings


def _show(findings: list[Finding], lacking: list[str]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in findings:
        table.add_row(Text(each.state, style=COLORS[each.state]), each.name, Text(each.found))
        if each.mend:
            table.add_row("", "", Text(f"-> {each.mend}", style="bold"))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"Missing: {', '.join(lacking)}." if lacking else "Nothing required is missing.")
