"""What this host has and lacks, and the command that mends each; status 1 if something required is missing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .probes import PROBES, Probe, Seen, State, missing, told, warn

COLORS: dict[State, str] = {"ok": "green", "warn": "yellow", "missing": "red"}
FOUND_COLUMNS_MIN = 30  # of a narrow terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: `found` says what is there, `mend` is the command that changes it, empty where nothing is amiss."""

    name: str
    state: State
    found: str
    mend: str


def run(*, json: bool, transport_ports: Sequence[str] = ()) -> int:
    """Looks at everything, prints a table or one JSON object, and answers 1 if something required is missing.

    `transport_ports` are the ranges that daemons of this host are told, first-last.
    """
    findings = examine(transport_ports=transport_ports)
    lacking = [each.name for each in findings if each.state == "missing"]
    if json:
        print(dumps({"ok": not lacking, "findings": [asdict(each) for each in findings]}))
    else:
        _show(findings, lacking)
    return int(bool(lacking))


def examine(root: Path = Path("/"), *, transport_ports: Sequence[str] = ()) -> list[Finding]:
    """Every finding about the host whose files lie below `root`. Whatever the host is like, this never raises."""
    return [_finding(probe, root) for probe in told(PROBES, transport_ports)]


def _finding(probe: Probe, root: Path) -> Finding:
    try:
        seen = probe.look(root)
    except Exception as error:  # noqa: BLE001 (no host, and no bug of one probe, hides what the others see)
        seen = _untried(probe, error)
    return Finding(name=probe.name, state=seen.state, found=seen.found, mend=seen.mend)


def _untried(probe: Probe, error: Exception) -> Seen:
    found = " ".join(f"cannot be tried: {type(error).__name__}: {error}".split())
    mend = probe.mend or "pdtransfer doctor --json, into a report"
    return missing(found, mend) if probe.required else warn(found, mend)


def _show(findings: list[Finding], lacking: list[str]) -> None:
    console = Console(highlight=False)
    states, subjects = (max(map(len, column)) for column in zip(*((f.state, f.name) for f in findings), strict=True))
    indent = " " * (states + subjects + 4)
    for each in findings:
        lines = textwrap.wrap(each.found, max(FOUND_COLUMNS_MIN, console.width - len(indent)), break_on_hyphens=False)
        line = Text(f"{each.state:{states}}", style=COLORS[each.state])
        console.print(
            line.append(f"  {each.name:{subjects}}  ", style="none").append(lines[0], style="none"), soft_wrap=True
        )
        for more in lines[1:]:
            console.print(Text(indent + more), soft_wrap=True)
        if each.mend:
            # In one line, so that it can be copied.
            console.print(Text(f"{indent}-> {each.mend}", style="bold"), soft_wrap=True)
    warned = sum(each.state == "warn" for each in findings)
    rest = f"{warned} warning{'s' * (warned != 1)}." if warned else ""
    console.print(
        f"Missing: {', '.join(lacking)}. {rest}".rstrip()
        if lacking
        else f"Nothing required is missing. {rest}".rstrip()
    )
