"""Real processes for tests: a fleet with small engines, its clients, and what must be true of it when nothing runs.

Every wait is for a condition and bounded. Ports are the system's choice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from pdtransfer.limits import Limits
from pdtransfer.serve.engine_api import EngineConfig
from pdtransfer.serve.engines.generation import Generation
from pdtransfer.serve.engines.stamp.factory import generate_many
from pdtransfer.serve.process.fleet import Daemon, Fleet
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.transports.options import Network
from pdtransfer.wire import Sampling
from tests.support.paths import REPO
from tests.support.processes import children, command_line
from tests.support.waiting import PATIENCE_S, until

ENGINE = "tests.support.engines.faulty:create"
MLA, GQA = ("layers=2",), ("layers=2", "kv_heads=4")  # options of the engine
ROLES = ("prefill", "decode")  # of workers
SLOTS = 2_048
SERVED = "does it work"
TOKENS = 6  # generated for each prompt where a test does not say otherwise
LIMITS = Limits(ping_ms=250, fence_poll_ms=25, room_deadline_ms=30_000)
USUAL: dict[str, Any] = {"listen": "127.0.0.1:0", "slots": SLOTS, "engine_option": MLA, "limits": LIMITS}  # of workers
Within = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Answer:
    """What a client got: a status, and a completion or an error."""

    status: int
    body: dict[str, Any]
    retry_after: str | None = None

    @property
    def text(self) -> str:
        return self.body["choices"][0]["text"]

    @property
    def facts(self) -> dict[str, Any]:
        return self.body["pdtransfer"]

    @property
    def error(self) -> dict[str, Any]:
        return self.body["error"]


def equal(answer: Answer, expected: Generation) -> bool:
    """Tokens, logits and KV are those of a single process."""
    names = ("tokens_digest", "logits_digest", "kv_digest")
    return answer.status == 200 and all(answer.facts[name] == getattr(expected, name).hex() for name in names)


@cache
def generated(prompt: str, max_tokens: int = TOKENS, options: tuple[str, ...] = MLA) -> Generation:
    """The answer of a single process, with these options of the engine."""
    config = EngineConfig(
        role="decode", slots=8_192, page_size=64, host_layout="layer_first",
        options=dict(option.split("=", 1) for option in options),
    )  # fmt: skip
    ids = np.frombuffer(prompt.encode(), np.uint8).astype(np.int64)
    (outcome,) = generate_many(config, [(ids, Sampling(max_tokens=max_tokens, ignore_eos=True))])
    return outcome


def prompts(seed: int, *sizes: int) -> list[str]:
    """Lower-case text of this many bytes each."""
    random = np.random.default_rng(seed)
    return ["".join(map(chr, random.integers(97, 123, size))) for size in sizes]


class Site:
    """A fleet that runs, and a client in front of it."""

    def __init__(
        self,
        fleet: Fleet,
        http: aiohttp.ClientSession,
        configs: dict[str, Any],
        logs: Path,
        within: Within = lambda _: (),
    ) -> None:
        self.fleet, self.http, self.configs, self.logs, self.within = fleet, http, configs, logs, within

    @property
    def prefill(self) -> Daemon:
        return self.fleet.of("prefill")[0]

    @property
    def decode(self) -> Daemon:
        return self.fleet.of("decode")[0]

    @property
    def router(self) -> Daemon:
        return self.fleet.of("router")[0]

    # The client

    def _body(self, prompt: str | list[int] | None, more: dict[str, Any]) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more}
        return {name: value for name, value in body.items() if value is not None}

    async def complete(self, prompt: str | list[int] | None, **more: Any) -> Answer:
        """One completion, whole."""
        async with self.http.post("/v1/completions", json=self._body(prompt, more)) as response:
            return Answer(response.status, await response.json(), response.headers.get("Retry-After"))

    async def stream(self, prompt: str, **more: Any) -> list[dict[str, Any]]:
        """The events of one completion; the last has the end of the choice and its usage, or is an error."""
        asked = {"stream_options": {"include_usage": True}}
        *events, last = [event async for event in self.events(prompt, **asked, **more)]
        if "error" in last:
            return [*events, last]
        assert last["choices"] == []
        return [*events[:-1], {**events[-1], "usage": last["usage"]}]

    async def events(self, prompt: str, **more: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of one completion as they come."""
        async with self.http.post("/v1/completions", json=self._body(prompt, {"stream": True, **more})) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
                else:
                    assert line.strip() in (b"", b"data: [DONE]"), line

    async def served(self, prompt: str = SERVED, options: tuple[str, ...] = MLA) -> None:
        """A request is answered as it should be."""
        answer = await self.complete(prompt)
        assert equal(answer, generated(prompt, options=options)), answer

    async def answers(self) -> bool:
        """Whether a request is answered at all."""
        return (await self.complete("does it work")).status == 200

    # The daemons

    async def get(self, daemon: Daemon, path: str, rank: int = 0) -> tuple[int, str]:
        where = daemon.ready if rank == 0 else daemon.ready["ranks"][rank]
        async with self.http.get(f"http://{where['http']}{path}") as response:
            return response.status, await response.text()

    async def health(self, daemon: Daemon) -> dict[str, Any]:
        return json.loads((await self.get(daemon, "/health"))[1])

    async def usable(self, *, prefill: int = 1, decode: int = 1) -> None:
        """The router has this many workers."""
        want = {"prefill": prefill, "decode": decode}

        async def known() -> bool:
            workers = (await self.health(self.router))["workers"]
            return want == {role: sum(w["role"] == role and w["usable"] for w in workers) for role in want}

        await until(known, f"workers {want}")

    async def metrics(self, daemon: Daemon, rank: int = 0) -> dict[str, float]:
        """Each metric's sum over its labels, by its name; each sample too, by name{label}."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families((await self.get(daemon, "/metrics", rank))[1]):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0) + sample.value
                for label in sample.labels.values():
                    found[f"{sample.name}{{{label}}}"] = sample.value
        return found

    async def until(self, daemon: Daemon, name: str, holds: Callable[[float], object] = bool) -> None:
        """Waits for a metric of the daemon to be as it should; for any value but 0 where nothing is said."""

        async def is_so() -> bool:
            return bool(holds((await self.metrics(daemon)).get(name, 0)))

        await until(is_so, f"{daemon.ready['node']}: {name}")

    async def leaves(self, role: str) -> None:
        """Waits until the router has a worker of this role that is not usable."""

        async def is_out() -> bool:
            workers = (await self.health(self.router))["workers"]
            return any(each["role"] == role and not each["usable"] for each in workers)

        await until(is_out, f"a {role} is not usable")

    async def holds(self, daemon: Daemon, rank: int = 0) -> dict[str, float]:
        """What a rank of a daemon still holds; nothing, when all is over."""
        m = await self.metrics(daemon, rank)
        if daemon.role == "prefill":
            names = ("pdtransfer_rooms", "pdtransfer_grants")
        else:
            names = (
                "pdtransfer_rooms", "pdtransfer_rooms_queued", "pdtransfer_leases", "pdtransfer_quarantined_bytes",
                "pdtransfer_inflight_bytes", "pdtransfer_hisparse_running", "pdtransfer_hisparse_waiting",
            )  # fmt: skip
        held = {name: m[name] for name in names if m.get(name)}
        if daemon.role == "decode" and (used := m["pdtransfer_slots"] - m["pdtransfer_slots_free"]):
            held["slots"] = used
        return held

    async def settled(self) -> None:
        """Every slot, lease, grant and room of all living daemons is back where it started, on ranks with metrics."""
        held: dict[str, Any] = {}

        async def nothing() -> bool:
            living = [
                daemon for daemon in self.fleet.daemons if daemon.role != "router" and daemon.process.returncode is None
            ]
            held.clear()
            for each in living:
                for index, rank in enumerate(each.ready["ranks"]):
                    if rank["http"] and (holds := await self.holds(each, index)):
                        held[rank["node"]] = holds
            return not held

        try:
            await until(nothing)
        except AssertionError:
            raise AssertionError(f"not given back: {held}") from None

    async def restart(self, daemon: Daemon) -> Daemon:
        """Another process in the place of one that has ended, at the same endpoint."""
        assert daemon.process.returncode is not None
        config = self.configs[daemon.ready["node"]]
        if daemon.role == "router":
            config = replace(config, listen=daemon.ready["http"], **self._workers)
        else:
            config = replace(config, bind=daemon.ready["endpoint"].rpartition("@")[2])
        log = self.logs / f"{daemon.ready['node']}-again.log"
        again = await Daemon.start(config, log, within=self.within(config.node))
        self.fleet.daemons[self.fleet.daemons.index(daemon)] = again
        await again.wait_ready()
        return again

    @asynccontextmanager
    async def beside(self, node: str, **more: Any) -> AsyncIterator[Site]:
        """Another router before the same workers, once it has them all; `more` is not as the first one's."""
        front: RouterConfig = self.configs["router"]
        config = replace(front, **{"node": node, "listen": "127.0.0.1:0", **self._workers, **more})
        router = await Daemon.start(config, self.logs / f"{node}.log")
        seen = object.__new__(Fleet)
        seen.daemons = [*(each for role in ROLES for each in self.fleet.of(role)), router]
        try:
            await router.wait_ready()
            async with aiohttp.ClientSession(f"http://{router.ready['http']}") as http:
                site = Site(seen, http, self.configs, self.logs)
                await site.usable(**{role: len(seen.of(role)) for role in ROLES})
                yield site
        finally:
            await router.stop()

    @contextmanager
    def listed(self, daemon: Daemon, change: Callable[[str], str]) -> Iterator[None]:
        """A daemon's allow-list is another for so long: it reads that at a hangup, and the one before at the end."""
        allow: Path = self.configs[daemon.ready["node"]].allow
        before = allow.read_text()

        def write(text: str) -> None:
            allow.write_text(text)
            daemon.process.send_signal(signal.SIGHUP)

        write(change(before))
        try:
            yield
        finally:
            write(before)

    @property
    def _workers(self) -> dict[str, tuple[str, ...]]:
        return {role: tuple(each.ready["endpoint"] for each in self.fleet.of(role)) for role in ROLES}

    def log(self, daemon: Daemon) -> str:
        return daemon.log.read_text()


_taken: list[socket.socket] = []  # names of ports, for as long as this process lives


def free_address(host: str = "127.0.0.1") -> str:
    """host:port that a process finds free, and again when it is restarted.

    The kernel gives that port to no connection, engines do not listen there, and no other test of this host gets it.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    engines = range(Network().ports[0], Network().ports[1] + 1)
    while (port := random.randrange(low // 2, low)) in engines or not _take(host, port):
        pass
    return f"{host}:{port}"


def _take(host: str, port: int) -> bool:
    """Whether nobody listens there, nor means to."""
    name = socket.socket(socket.AF_UNIX)
    with socket.socket() as probe:
        try:
            name.bind(f"\0pdtransfer test {port}")
            probe.bind((host, port))
        except OSError:
            name.close()
            return False
    _taken.append(name)
    return True


def prefill_config(number: int = 0, **more: Any) -> PrefillConfig:
    own = {"bind": f"tcp://{free_address()}", "node": f"prefill-{number}", "chunk_tokens": 64}
    return PrefillConfig(**USUAL | own | more)


def decode_config(sockets: Path, number: int = 0, **more: Any) -> DecodeConfig:
    own = {"bind": f"tcp://{free_address()}", "node": f"decode-{number}", "socket_directory": sockets}
    return DecodeConfig(**USUAL | own | {"huge_pages": "never"} | more)


@asynccontextmanager
async def fleet(
    logs: Path,
    *,
    prefills: Sequence[dict[str, Any]] = ({},),
    decodes: Sequence[dict[str, Any]] = ({},),
    router: dict[str, Any] | None = None,
    ready: bool = True,
    within: Within = lambda _: (),
) -> AsyncIterator[Site]:
    """Each of `prefills` and `decodes` says what is not as usual of one daemon; `within` where a node runs."""
    # Not below `logs`: a Unix socket's path has 107 bytes, and pytest's directories grow with the tests' names.
    sockets = tempfile.TemporaryDirectory(prefix="pdt-")
    prefill = [prefill_config(number, **more) for number, more in enumerate(prefills)]
    decode = [decode_config(Path(sockets.name) / "s", number, **more) for number, more in enumerate(decodes)]
    front = RouterConfig(**{"listen": free_address(), "node": "router", "limits": LIMITS, **(router or {})})
    async with Fleet(prefill, decode, front, logs, within=within) as running:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        # A connection that is kept would be a descriptor of a daemon's.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(running.url, timeout=timeout, connector=connector) as http:
            configs = {each.node: each for each in (*prefill, *decode, front)}
            site = Site(running, http, configs, logs, within)
            if ready:
                await site.usable(prefill=len(prefill), decode=len(decode))
            yield site
    sockets.cleanup()


class Gates:
    """A directory that engines look into at every step: what a test wants to see under way is so until it lets go."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextmanager
    def closed(self, role: str) -> Iterator[None]:
        """Prefills finish no prompt, or decodes generate no token but the first, for so long."""
        gate = self.directory / role
        gate.touch()
        try:
            yield
        finally:
            gate.unlink()


@asynccontextmanager
async def running(logs: Path, ends_as: tuple[int, ...] = (), **more: Any) -> AsyncIterator[Site]:
    """A fleet whose processes end as asked when the context is left, without a traceback.

    `ends_as` are statuses that are right beside 0, where a test has killed some.
    """
    os.environ.setdefault("PYTHONPATH", str(REPO))
    left: list[Daemon] = []
    async with fleet(logs, **more) as site:
        try:
            yield site
        finally:
            left += site.fleet.daemons
    statuses = {daemon.log.name: daemon.process.returncode for daemon in left}
    assert set(statuses.values()) <= {0, *ends_as}, statuses  # each ended by itself, and in time
    for log in filter(Path.is_file, logs.glob("*.log")):  # noqa: ASYNC240  # and no device
        assert "Traceback" not in log.read_text(), log.read_text()


def followers(daemon: Daemon) -> list[int]:
    """Process ids of the other ranks of a leader's worker, in their order."""
    started = children(daemon.process.pid)
    return sorted(pid for pid in started if any(each.startswith("--group=") for each in command_line(pid)))
