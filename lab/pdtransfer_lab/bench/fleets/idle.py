"""What daemons cost that have nothing to do: CPU, and memory beside their pool and arena."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import aiohttp
import uvloop

from pdtransfer.errors import WorldError
from pdtransfer.serve.process.fleet import Daemon
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig

from ..report import Figures, Line

_SLOTS = 1_024  # 1 MiB of KV: what stays is the daemon itself
_SETTLE_SECONDS = 1.0  # what starting leaves behind is over by then
_ANSWER_SECONDS = 60.0
_MIB = 1 << 20

LINES = (
    *(
        Line(
            f"{role}, {when}",
            f"{{{role}_{name}_cpu_percent:.2f}} % of a core",
            f"{{{role}_{name}_private_mib:.0f}} MiB private, {{{role}_{name}_pss_mib:.0f}} PSS, "
            f"{{{role}_{name}_rss_mib:.0f}} RSS",
        )
        for name, when in (("alone", "no peer"), ("session", "with a session and a router"))
        for role in ("prefill", "decode")
    ),
)


class Memory(NamedTuple):
    """Bytes of one process; shared pages count in `pss` by how many share them, in `private` not at all."""

    rss: int
    pss: int
    private: int


def measure(*, seconds: int = 10) -> Figures:
    """One prefill and one decode daemon with the stamp engine, pools of 1,024 tokens, HTTP on, no load.

    CPU is user and system time of /proc/PID/stat over `seconds`, in percent of one core: first before any peer has sent
    a message, then with the session between them that one completion has opened, and the router's pings. Memory is
    /proc/PID/smaps_rollup behind each.
    """
    return uvloop.run(_measure(seconds))


async def _measure(seconds: int) -> Figures:
    figures: Figures = {"seconds": seconds}
    with tempfile.TemporaryDirectory(prefix="pdtransfer-bench-") as directory:
        logs = Path(directory)
        pools = (
            PrefillConfig(bind="tcp://127.0.0.1:0", http="127.0.0.1:0", slots=_SLOTS),
            DecodeConfig(bind="tcp://127.0.0.1:0", http="127.0.0.1:0", slots=_SLOTS, socket_directory=logs),
        )
        daemons = [await Daemon.start(config, logs / f"{config.role}.log") for config in pools]
        try:
            prefill, decode = [(await daemon.wait_ready())["endpoint"] for daemon in daemons]
            figures |= await _watch(daemons, "alone", seconds)
            config = RouterConfig(listen="127.0.0.1:0", prefill=(prefill,), decode=(decode,))
            router = await Daemon.start(config, logs / "router.log")
            pair, daemons = daemons, [*daemons, router]
            address = (await router.wait_ready())["http"]
            await asyncio.wait_for(_complete(f"http://{address}"), _ANSWER_SECONDS)
            figures |= await _watch(pair, "session", seconds)
        finally:
            await asyncio.gather(*(daemon.stop() for daemon in reversed(daemons)))
    return figures


async def _watch(daemons: list[Daemon], name: str, seconds: int) -> Figures:
    await asyncio.sleep(_SETTLE_SECONDS)
    before, since = [cpu_seconds(daemon.process.pid) for daemon in daemons], time.monotonic()
    await asyncio.sleep(seconds)
    after, passed_s = [cpu_seconds(daemon.process.pid) for daemon in daemons], time.monotonic() - since
    figures: Figures = {}
    for daemon, start, end in zip(daemons, before, after, strict=True):
        figures[f"{daemon.role}_{name}_cpu_percent"] = 100 * (end - start) / passed_s
        figures |= {f"{daemon.role}_{name}_{key}": value for key, value in _mib(memory_of(daemon.process.pid)).items()}
    return figures


async def _complete(url: str) -> None:
    """One completion, as soon as the router has found both daemons."""
    body = {"prompt": "once", "max_tokens": 2}
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS)) as session:
        while not (await session.get("/health")).ok:  # noqa: ASYNC110 (it is another process)
            await asyncio.sleep(0.05)
        async with session.post("/v1/completions", json=body) as answer:
            if not answer.ok:
                raise WorldError(f"the router answers {answer.status}: {await answer.text()}")


def _mib(memory: Memory) -> Mapping[str, float]:
    return {f"{name}_mib": value / _MIB for name, value in memory._asdict().items()}


def memory_of(pid: int) -> Memory:
    """A process's memory, as the kernel reports it."""
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, size, _ = line.split()
        sizes[name.rstrip(":")] = int(size) << 10
    return Memory(sizes["Rss"], sizes["Pss"], sizes["Private_Clean"] + sizes["Private_Dirty"])


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, all its threads, in ticks of 10 ms."""
    # Behind the command's name, which may hold anything, the 12th and 13th fields are user and system ticks.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
