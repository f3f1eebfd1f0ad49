"""Requests while strangers and hostile peers flood the listeners: goodput over goodput in quiet."""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pdtransfer.bus.keys import Endpoint, KeyPair, generate
from pdtransfer.errors import WorldError
from pdtransfer.serve.process.fleet import Daemon, Fleet
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig

from ..processes import begun
from ..report import load, print_tables
from .flood_attacks import CLIENTS, KEYED, KEYLESS, FloodTarget, run
from .paced_servers import paced_servers

ENGINE = "pdtransfer_lab.bench.fleets.paced_engine:create"
NODES = "router", "prefill-0", "decode-0"
GUEST = "guest"  # the key that the attackers have
HEAD = ["attack", "goodput over quiet", "quiet/s", "not served", "attacks", "log kB/s"]
CLIENT_COUNTS = 1, 4  # hostile clients of the router at once
_START_SECONDS = 60.0
_WARM_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Served:
    """What clients got in a time."""

    seconds: float
    answers: Counter[str]
    log_bytes: int

    @property
    def goodput(self) -> float:
        """Requests a second that were answered."""
        return self.answers["200"] / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodMeasure:
    """How much is asked and attacked: `attackers` processes for each daemon's listener."""

    seconds: float = 8.0
    rounds: int = 3
    clients: int = 8
    attackers: int = 1


def _fleet(directory: Path, *, keyed: bool) -> Fleet:
    lines = [generate(directory / node) for node in NODES] if keyed else []
    if keyed:
        lines.append(f"{generate(directory / GUEST)} decode,prefill")
        (directory / "all").write_text("\n".join(lines) + "\n")

    def options_of(node: str) -> dict[str, Any]:
        return {"node": node, **({"key": directory / f"{node}.key", "allow": directory / "all"} if keyed else {})}

    same: dict[str, Any] = {
        "bind": "tcp://127.0.0.1:0", "listen": "127.0.0.1:0", "slots": 4_096, "page_size": 16, "transport": "shm",
        "engine": ENGINE, "engine_option": ("token_us=50", "step_ms=2"),
    }  # fmt: skip
    router, prefill, decode = NODES
    return Fleet(
        [PrefillConfig(chunk_tokens=256, **options_of(prefill), **same)],
        [DecodeConfig(socket_directory=directory / "sockets", **options_of(decode), **same)],
        RouterConfig(listen="127.0.0.1:0", **options_of(router)),
        directory,
    )


async def served_by(url: str, clients: int, seconds: float, logs: Path) -> Served:
    """Clients that ask one after the other; what is under way at the end is not counted."""
    answers: Counter[str] = Counter()
    body = {"prompt": "a short prompt", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    before, ends = _log_bytes(logs), time.monotonic() + seconds

    async def client(http: aiohttp.ClientSession) -> None:
        while time.monotonic() < ends:
            try:
                async with http.post("/v1/completions", json=body) as response:
                    text = "" if response.status == 200 else (await response.json())["error"]["message"]
                    await response.read()
                    answer = "200" if response.status == 200 else f"{response.status} {text}"
            except (aiohttp.ClientError, TimeoutError) as error:
                answer = type(error).__name__
            if time.monotonic() < ends:
                answers[answer] += 1
            if answer != "200":
                await asyncio.sleep(0.1)

    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=20)) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return Served(seconds, answers, _log_bytes(logs) - before)


def _log_bytes(logs: Path) -> int:
    return sum(path.stat().st_size for path in logs.glob("*.log"))


@contextmanager
def attacking(name: str, targets: list[FloodTarget]) -> Generator[list[int]]:
    """With an attacker on each target; how often each attacked is in the list afterwards."""
    started = [begun(run, name, target) for target in targets]
    done: list[int] = []
    try:
        for _, pipe in started:
            if not pipe.poll(_START_SECONDS):
                raise WorldError(f"the attack {name} did not get under way within {_START_SECONDS:.0f} s")
            pipe.recv()
        yield done
        for _, pipe in started:
            pipe.send(None)
            done.append(pipe.recv())
    except EOFError:
        raise WorldError(f"the attack {name} has ended by itself") from None
    finally:
        for process, pipe in started:
            pipe.close()
            process.join(_START_SECONDS)
            process.kill()


@asynccontextmanager
async def _site(kind: str, directory: Path, attackers: int) -> AsyncGenerator[tuple[str, list[FloodTarget]]]:
    """The URL of a router, and whom `attackers` on each listener attack."""
    if kind == "sglang":
        async with paced_servers() as (prefill, decode):
            servers: dict[str, Any] = {"engine": kind, "prefill": (prefill,), "decode": (decode,)}
            router = await Daemon.start(RouterConfig(listen="127.0.0.1:0", **servers), directory / "router.log")
            try:
                address = (await router.wait_ready())["http"]
                yield f"http://{address}", [FloodTarget(port=_port(address), role="router")] * attackers
            finally:
                await router.stop()
        return
    async with _fleet(directory, keyed=kind == "keyed") as fleet:
        if kind == "pdtransfer":
            yield fleet.url, [FloodTarget(port=_port(fleet.url), role="router")] * attackers
        else:
            roles = ("prefill", "decode")
            yield fleet.url, [_target(fleet, role, directory, keyed=kind == "keyed") for role in roles] * attackers


async def _measured(
    names: tuple[str, ...], given: FloodMeasure, *, kind: str, attackers: int, progress: Callable[[str], None]
) -> list[list[str]]:
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="pdtransfer-floods-") as directory:
        path = Path(directory)
        async with _site(kind, path, attackers) as (url, targets):
            await served_by(url, given.clients, _WARM_SECONDS, path)
            for name in names:
                quiet, flooded, count = list[Served](), list[Served](), 0
                for _ in range(given.rounds):
                    quiet.append(await served_by(url, given.clients, given.seconds, path))
                    progress(f"{name}: quiet {quiet[-1].goodput:.0f} a second")
                    context = attacking(name, targets)
                    done = await asyncio.to_thread(context.__enter__)
                    flooded.append(await served_by(url, given.clients, given.seconds, path))
                    await asyncio.to_thread(context.__exit__, None, None, None)
                    progress(f"{name}: {flooded[-1].goodput:.0f} a second, {dict(flooded[-1].answers)}")
                    count += sum(done)
                    await asyncio.sleep(1.0)
                label = f"{name}{', keys' if kind == 'keyed' else ''}"
                rows.append(
                    row_of(f"{label}, {attackers} clients" if kind in CLIENTS else label, quiet, flooded, count)
                )
    return rows


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _target(fleet: Fleet, role: str, directory: Path, *, keyed: bool) -> FloodTarget:
    endpoint = Endpoint.parse(fleet.of(role)[0].ready["endpoint"])
    port = int(endpoint.address.rpartition(":")[2])
    if not keyed:
        return FloodTarget(port=port, role=role)
    return FloodTarget(
        port=port, role=role, server_key=endpoint.server_key or "", guest=KeyPair.read(directory / f"{GUEST}.key")
    )


def row_of(name: str, quiet: list[Served], flooded: list[Served], count: int) -> list[str]:
    ratios = sorted(after.goodput / max(before.goodput, 1e-9) for before, after in zip(quiet, flooded, strict=True))
    failed: Counter[str] = Counter()
    for sample in flooded:
        failed.update({answer: times for answer, times in sample.answers.items() if answer != "200"})
    asked = sum(sum(sample.answers.values()) for sample in flooded)
    log_rate = max(sample.log_bytes / sample.seconds for sample in flooded)
    return [
        name,
        f"{ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
        f"{max(sample.goodput for sample in quiet):.0f}",
        f"{sum(failed.values())} of {asked}",
        f"{count:,}",
        f"{log_rate / 1e3:.1f}",
    ]


def measure(
    given: FloodMeasure, *, attacks: tuple[str, ...] = (), progress: Callable[[str], None] = lambda _: None
) -> list[list[str]]:
    """One router, prefill and decode whose engines compute nothing, and clients that ask one after the other. Attackers
    of each daemon's listener run at the lowest priority beside them: on hosts of their own they would take none of
    these processors. Then clients of the router post to it, one and four at once, also to one in front of servers
    like SGLang's. In turn: this many seconds in quiet, and as many under the attack."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[4]))
    rows: list[list[str]] = []
    kinds = [("keyless", KEYLESS, given.attackers), ("keyed", KEYED, given.attackers)]
    kinds += [(engine, attacks_of, count) for engine, attacks_of in CLIENTS.items() for count in CLIENT_COUNTS]
    for kind, attacks_of, count in kinds:
        names = tuple(name for name in attacks_of if not attacks or name in attacks)
        if names:
            rows += asyncio.run(_measured(names, given, kind=kind, attackers=count, progress=progress))
    return rows


def show(rows: list[list[str]]) -> None:
    """Prints it."""
    print_tables([[HEAD, *rows]], width=110, title=f"load {load()}", names=("attack",))
