"""Lists what this host has and lacks, with a command to fix each problem."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from ...bounds import port_range
from ...environment import complete_environment, pip_install
from ...probe import KERNEL, Probe, Seen, State, missing, warn
from ...transports.options import Network
from ...transports.registry import TRANSPORTS
from ..settings.node import Json
from ..settings.worker import PrefillConfig
from . import engine_facts
from .probes import builds, cards, host, kernel, network

VENV = complete_environment()

COLORS: dict[State, str] = {"ok": "green", "warn": "yellow", "missing": "red"}
FOUND_COLUMNS_MIN = 30  # on a narrow terminal

PROBES = (
    Probe("python", builds.python, required=True),
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


def doctor(
    prefill_url: Annotated[str, Parameter(help="The URL of a prefill engine's server, to compare engines.")] = "",
    decode_url: Annotated[str, Parameter(help="The URL of a decode engine's server.")] = "",
    /,
    *,
    transport_ports: Annotated[tuple[str, ...], Parameter(help="Daemons' ports, first-last; may be repeated.")] = (),
    bind: Annotated[str, Parameter(help="A daemon's --bind, for which each transport is asked.")] = "",
    advertise: Annotated[str, Parameter(help="Its --advertise.")] = "",
    api_key: Annotated[Path | None, Parameter(help="A file with an API key, for engines that ask for one.")] = None,
    json: Json = False,
) -> int:
    """Runs every probe, or compares two engines; prints a table or one JSON object. Returns 1 if something required is
    missing. Raises ConfigError where the flags cannot be a daemon's."""
    if prefill_url or decode_url:
        return engine_facts.run(prefill_url, decode_url, api_key=api_key, json=json)
    asked = PrefillConfig(bind=bind or PrefillConfig().bind, advertise=advertise, insecure=True).network
    findings = examine(transport_ports=transport_ports, asked=asked)
    lacking = [finding.name for finding in findings if finding.state == "missing"]
    if json:
        print(dumps({"ok": not lacking, "findings": [asdict(finding) for finding in findings]}))
    else:
        _show(findings, lacking)
    return int(bool(lacking))


def examine(root: Path = Path("/"), *, transport_ports: Sequence[str] = (), asked: Network | None = None) -> list[Seen]:
    """Returns what all probes find for the host's files below `root`. Never raises."""
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


def _finding(probe: Probe, root: Path) -> Seen:
    try:
        seen = probe.look(root)
    except Exception as error:  # noqa: BLE001 (no host, and no bug of one probe, hides what the others see)
        reason = " ".join(f"cannot be tried: {type(error).__name__}: {error}".split())
        seen = (missing if probe.required else warn)(reason, probe.mend or "pdtransfer doctor --json, into a report")
    return replace(seen, name=probe.name)


def _show(findings: list[Seen], lacking: list[str]) -> None:
    console = Console(highlight=False)
    states, subjects = (max(map(len, column)) for column in zip(*((f.state, f.name) for f in findings), strict=True))
    indent = " " * (states + subjects + 4)
    width = max(len(indent) + FOUND_COLUMNS_MIN, console.width)
    for finding in findings:
        head = f"{finding.state:{states}}  {finding.name:{subjects}}  "
        wrapper = textwrap.TextWrapper(width, head, indent, break_on_hyphens=False)
        text = Text(wrapper.fill(finding.found))
        text.stylize(COLORS[finding.state], 0, states)
        console.print(text, soft_wrap=True)
        if finding.mend:
            # On one line, so that it can be copied.
            console.print(Text(f"{indent}-> {finding.mend}", style="bold"), soft_wrap=True)
    warned = sum(finding.state == "warn" for finding in findings)
    rest = f"{warned} warning{'s' * (warned != 1)}." if warned else ""
    summary = f"Missing: {', '.join(lacking)}." if lacking else "Nothing required is missing."
    console.print(f"{summary} {rest}".rstrip())
