"""A whole fleet for `storms`: daemons that are killed and frozen, and are started again as a supervisor would."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdtransfer.bus.keys import generate
from pdtransfer.errors import WorldError
from pdtransfer.limits import Limits
from pdtransfer.serve.process.fleet import Daemon
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig

OPTIONS = {"layers": "2", "top_k": "16", "index_share": "1"}  # of the stamp engine
SLOTS = 4_096
DEADLINE_MS = 10_000
LIMITS = Limits(room_deadline_ms=DEADLINE_MS, hisparse_wait_steps=1, hisparse_quantum_steps=2)
AGAIN_S = 0.5  # a supervisor's pause before it starts a daemon again that has ended by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class StormKind:
    """What a fleet is made of."""

    name: str
    transport: str = "shm"
    prefill_tp: int = 1
    decode_tp: int = 1
    hisparse: bool = False
    keys: bool = False


KINDS = (
    StormKind(name="shm"),
    StormKind(name="shm, keys", keys=True),
    StormKind(name="shm, decode of two ranks", decode_tp=2),
    StormKind(name="shm, both of two ranks", prefill_tp=2, decode_tp=2),
    StormKind(name="Mooncake", transport="mooncake"),
    StormKind(name="Mooncake, keys, decode of two ranks", transport="mooncake", keys=True, decode_tp=2),
    StormKind(name="HiSparse", hisparse=True),
    StormKind(name="HiSparse, keys, decode of two ranks", hisparse=True, keys=True, decode_tp=2),
    StormKind(name="HiSparse, Mooncake", hisparse=True, transport="mooncake"),
)


@dataclass(eq=False)
class StormNode:
    """One worker or router, whose process is another one after each end. Times are CLOCK_MONOTONIC's, in seconds."""

    config: PrefillConfig | DecodeConfig | RouterConfig
    log: Path
    daemon: Daemon | None = None
    ready_once: asyncio.Event = field(default_factory=asyncio.Event)
    frozen: set[int] = field(default_factory=set[int])
    held: bool = False  # its supervisor waits until the storm releases it before it starts the next process
    starts: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # launched, ready
    starting_since: float | None = None
    ends: list[str] = field(default_factory=list[str])  # by itself: the status, and its last line

    @property
    def name(self) -> str:
        """As its peers know it."""
        return self.config.node

    @property
    def pids(self) -> list[int]:
        """Its process, and the other ranks of its worker."""
        if self.daemon is None or self.daemon.process.returncode is not None:
            return []
        leader = self.daemon.process.pid
        return [leader, *ranks_under(leader)]

    def freeze(self, pids: list[int]) -> None:
        """Stops processes of it."""
        self.frozen.update(pids)
        _signal(pids, signal.SIGSTOP)

    def thaw(self) -> None:
        """Continues them."""
        _signal(self.frozen, signal.SIGCONT)
        self.frozen.clear()


class StormFleet:
    """Its daemons, each with a supervisor: `async with StormFleet(kind, here) as fleet`."""

    def __init__(self, kind: StormKind, directory: Path, progress: Callable[[str], None]) -> None:
        self.nodes = [StormNode(config, directory / f"{config.node}.log") for config in configs_of(kind, directory)]
        self._supervisors: list[asyncio.Task[None]] = []
        self._released, self._progress = asyncio.Event(), progress
        self._struck: set[StormNode] = set()

    async def __aenter__(self) -> StormFleet:
        self._supervisors = [asyncio.create_task(self._supervise(node)) for node in self.nodes]
        await asyncio.gather(*(node.ready_once.wait() for node in self.nodes))
        return self

    async def __aexit__(self, *_: object) -> None:
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        for node in self.nodes:
            node.thaw()
        await asyncio.gather(*(node.daemon.stop() for node in self.nodes if node.daemon is not None))

    @property
    def url(self) -> str:
        """Of the router."""
        (router,) = (node.config for node in self.nodes if isinstance(node.config, RouterConfig))
        return f"http://{router.listen}"

    def workers(self, role: str) -> set[str]:
        """Names of the workers of a role."""
        return {node.name for node in self.nodes if node.config.role == role}

    def kill(self, node: StormNode, pids: list[int]) -> None:
        """Kills processes of a node. Nothing takes its place before `release`."""
        node.held = True
        self._struck.add(node)
        _signal(pids, signal.SIGKILL)

    def release(self, node: StormNode) -> None:
        """Lets a killed node be started again."""
        node.held = False
        self._released.set()

    def heal(self) -> None:
        """Continues and starts all that is frozen or dead."""
        for node in self.nodes:
            node.thaw()
            self.release(node)
            self._struck.discard(node)

    def starting(self, since: float, until: float) -> float:
        """How long, between two moments, any process was being started."""
        now, total, counted_to = time.monotonic(), 0.0, since
        spans = [span for node in self.nodes for span in node.starts]
        spans += [(node.starting_since, now) for node in self.nodes if node.starting_since is not None]
        for begun, ended in sorted(spans):
            first, last = max(begun, counted_to), min(ended, until)
            if last > first:
                total, counted_to = total + last - first, last
        return total

    async def _supervise(self, node: StormNode) -> None:
        """Starts the node, and again whenever it has ended."""
        while True:
            node.starting_since = time.monotonic()
            starting = asyncio.ensure_future(Daemon.start(node.config, node.log))
            try:
                node.daemon = daemon = await asyncio.shield(starting)
            except asyncio.CancelledError:
                node.daemon = await starting
                raise
            with suppress(WorldError):  # it has ended, which is seen below
                await daemon.wait_ready()
                node.ready_once.set()
            node.starts.append((node.starting_since, time.monotonic()))
            node.starting_since = None
            status = await daemon.process.wait()
            if status != -signal.SIGKILL:
                lines = node.log.read_text(errors="replace").splitlines()[-1:]
                node.ends.append(f"{node.name} ended with status {status}: {' '.join(lines)}")
                self._progress(node.ends[-1])
                await asyncio.sleep(AGAIN_S)
            while node.held:
                self._released.clear()
                await self._released.wait()


def strikes(chance: random.Random, nodes: list[StormNode], seconds: float) -> Iterator[tuple[float, StormNode, str]]:
    """When, whom and how: faults of one storm, in their order."""
    for moment in sorted(chance.uniform(0.0, seconds) for _ in range(chance.randint(3, 9))):
        yield moment, chance.choice(nodes), chance.choice(("kill", "kill", "freeze", "freeze", "freeze"))


def ranks_under(leader: int) -> list[int]:
    """Process ids of the other ranks that a worker's leader has started."""
    pids: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{leader}/task"):
            with suppress(OSError):
                started = Path(f"/proc/{leader}/task/{thread}/children").read_text().split()
                pids += [int(pid) for pid in started if b"--group=" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pids


def _signal(pids: list[int] | set[int], number: signal.Signals) -> None:
    for pid in list(pids):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def configs_of(kind: StormKind, directory: Path) -> list[PrefillConfig | DecodeConfig | RouterConfig]:
    """One router, two prefills and two decodes, at addresses that stay theirs."""
    names = {"prefill": ("prefill-0", "prefill-1"), "decode": ("decode-0", "decode-1")}
    publics = _made_keys(kind, directory, [name for group in names.values() for name in group]) if kind.keys else {}

    def options_of(node: str) -> dict[str, Any]:
        return {
            "node": node,
            "limits": LIMITS,
            **({"key": directory / f"{node}.key", "allow": directory / "all"} if publics else {}),
        }

    def worker(node: str) -> dict[str, Any]:
        return options_of(node) | {
            "bind": f"tcp://{free_address()}", "listen": free_address(), "slots": SLOTS, "transport": kind.transport,
            "engine_option": tuple(f"{name}={value}" for name, value in OPTIONS.items()),
        }  # fmt: skip

    hot: dict[str, Any] = (
        {"enable_hisparse": True, "hot_tokens": 48, "device_slots": 98, "dense_slots": 1_024} if kind.hisparse else {}
    )
    prefills = [PrefillConfig(chunk_tokens=64, tp_size=kind.prefill_tp, **worker(node)) for node in names["prefill"]]
    decodes = [
        DecodeConfig(
            socket_directory=directory / "s", tp_size=kind.decode_tp, huge_pages="never", **hot, **worker(node)
        )
        for node in names["decode"]
    ]

    def endpoints(workers: list[Any]) -> tuple[str, ...]:
        return tuple(
            (f"{publics[worker_config.node]}@" if publics else "") + worker_config.bind for worker_config in workers
        )

    router = RouterConfig(
        listen=free_address(), prefill=endpoints(prefills), decode=endpoints(decodes), **options_of("router")
    )
    return [*prefills, *decodes, router]


def _made_keys(kind: StormKind, directory: Path, workers: list[str]) -> dict[str, str]:
    """Writes a key for every rank, and one list of them all; public keys by name."""
    grouped = {"prefill": kind.prefill_tp > 1, "decode": kind.decode_tp > 1}
    names = ["router", *workers, *(f"{name}-tp1" for name in workers if grouped[name.partition("-")[0]])]
    lines = [generate(directory / name) for name in names]
    (directory / "all").write_text("\n".join(lines) + "\n")
    return {name: line.split()[1] for name, line in zip(names, lines, strict=True)}


_given: set[int] = set()


def free_address() -> str:
    """host:port that a daemon finds free again when it is restarted: the kernel gives that port to no connection."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(low // 2, low)  # noqa: S311
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given and not 21_000 <= port < 22_000:  # where Mooncake's engines listen
                _given.add(port)
                return f"127.0.0.1:{port}"
