"""Lists what this host has and lacks, with a command to fix each problem."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from json import dumps
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ...bounds import port_range
from ...environment import complete_environment, pip_install
from ...probe import KERNEL, Probe, Seen, State, missing, warn
from ...transports.options import Network
from ...transports.registry import TRANSPORTS
from ..settings.worker import PrefillConfig
from .probes import builds, cards, host, kernel, network

VENV = complete_environment()

COLORS: dict[State, str] = {"ok": "green", "warn": "yellow", "missing": "red"}
FOUND_COLUMNS_MIN = 30  # on a narrow terminal

PROBES = (
    Probe("python", builds.python, required=True),
    Probe("packages", builds.packages, VENV, required=True),
    Probe("torch", builds.torch, pip_install("transformers")),
    Probe("native copy", builds.copy, VENV),
    Probe("kernel cache", builds.cache, "export PDTRANSFER_CACHE=<a directory of this user>"),
    Probe("GPUs", cards.cards, "nvidia-smi"),
    Probe("GPU links", cards.links, "lspci -vv"),
    Probe("GPU kernels", cards.kernels, "pdtransfer kernels build"),
    Probe("MPS", cards.mps, "pgrep -l nvidia-cuda-mps"),
    Probe("sealed memfd", kernel.memfd, KERNEL, required=True),
    Probe("fence lock", kernel.lock, KERNEL, required=True),
    Probe("descriptor passing", kernel.unix_socket, KERNEL, required=True),
    Probe("boot id", kernel.boot_id, "mount -t proc proc /proc", required=True),
    Probe("memory", host.memory, "mount -t proc proc /proc"),
    Probe("huge pages", host.huge_pages, "mount -t sysfs sysfs /sys"),
    Probe("NUMA", host.numa, "mount -t sysfs sysfs /sys"),
    Probe("shared memory mount", host.shm, "mount -t tmpfs tmpfs /dev/shm"),
    Probe("memlock limit", host.memlock, "ulimit -l"),
    Probe("open files limit", host.descriptors, "ulimit -n"),
    Probe("clock", host.clock, "mount -t sysfs sysfs /sys"),
    Probe("CURVE", builds.curve, VENV),
    Probe("RDMA", network.rdma, "ibv_devinfo"),
    Probe("addresses", network.addresses, "ip address"),
    Probe("ports", network.ports, "ss -ltnp"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: `found` describes the host, `mend` is the command that fixes a problem, empty for none."""

    name: str
    state: State
    found: str
    mend: str


def run(*, json: bool, transport_ports: Sequence[str] = (), bind: str = "", advertise: str = "") -> int:
    """Runs every probe, and prints a table or one JSON object; returns 1 if something required is missing.

    `transport_ports` are the port ranges of this host's daemons, first-last; `bind` and `advertise` those of one.
    Raises ConfigError where they cannot be a daemon's.
    """
    asked = PrefillConfig(bind=bind or PrefillConfig().bind, advertise=advertise, insecure=True).network
    findings = examine(transport_ports=transport_ports, asked=asked)
    lacking = [finding.name for finding in findings if finding.state == "missing"]
    if json:
        print(dumps({"ok": not lacking, "findings": [asdict(finding) for finding in findings]}))
    else:
        _show(findings, lacking)
    return int(bool(lacking))


def examine(
    root: Path = Path("/"), *, transport_ports: Sequence[str] = (), asked: Network | None = None
) -> list[Finding]:
    """Returns the findings of all probes for the host's files below `root`. Never raises."""
    return [_finding(probe, root) for probe in probes(transport_ports, asked)]


def probes(transport_ports: Sequence[str] = (), asked: Network | None = None) -> list[Probe]:
    """Returns all probes, of every transport as well, for daemons with these port ranges, by default the default, and
    for one of the network `asked`."""
    ports = sorted({port_range("transport_ports", text) for text in transport_ports}) or [PrefillConfig().network.ports]
    # Transports may share a probe, as those of engines do that of their ports.
    shared = {probe.name: probe for registered in TRANSPORTS.values() for probe in registered.probes(ports)}
    firewall = Probe("engine firewall", network.firewall, "nft list ruleset")
    chosen = Probe("transport", partial(network.transport, asked=asked))
    return [*PROBES, *shared.values(), firewall, chosen]


def _finding(probe: Probe, root: Path) -> Finding:
    try:
        seen = probe.look(root)
    except Exception as error:  # noqa: BLE001 (no host, and no bug of one probe, hides what the others see)
        seen = _untried(probe, error)
    return Finding(name=probe.name, state=seen.state, found=seen.found, mend=seen.mend)


def _untried(probe: Probe, error: Exception) -> Seen:
    reason = " ".join(f"cannot be tried: {type(error).__name__}: {error}".split())
    mend = probe.mend or "pdtransfer doctor --json, into a report"
    return missing(reason, mend) if probe.required else warn(reason, mend)


def _show(findings: list[Finding], lacking: list[str]) -> None:
    console = Console(highlight=False)
    states, subjects = (max(map(len, column)) for column in zip(*((f.state, f.name) for f in findings), strict=True))
    indent = " " * (states + subjects + 4)
    for finding in findings:
        lines = textwrap.wrap(
            finding.found, max(FOUND_COLUMNS_MIN, console.width - len(indent)), break_on_hyphens=False
        )
        line = Text(f"{finding.state:{states}}", style=COLORS[finding.state])
        console.print(
            line.append(f"  {finding.name:{subjects}}  ", style="none").append(lines[0], style="none"), soft_wrap=True
        )
        for more in lines[1:]:
            console.print(Text(indent + more), soft_wrap=True)
        if finding.mend:
            # On one line, so that it can be copied.
            console.print(Text(f"{indent}-> {finding.mend}", style="bold"), soft_wrap=True)
    warned = sum(finding.state == "warn" for finding in findings)
    rest = f"{warned} warning{'s' * (warned != 1)}." if warned else ""
    summary = f"Missing: {', '.join(lacking)}." if lacking else "Nothing required is missing."
    console.print(f"{summary} {rest}".rstrip())
