"""Servers of real engines on this host: one engine, or prefill and decode with KV transfer between them; and requests.

What the engines have in common; `vllm_fleet` and `sglang_fleet` have how each is started and asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import aiohttp

from pdtransfer.errors import WorldError

REPO = Path(__file__).parents[4]
HOST = "127.0.0.1"
START_S = 600.0  # of servers that import torch, load a model and capture graphs, on a busy host
ANSWER_S = 300.0
END_S = 20.0  # after which a server that was asked to end is killed
LOG_LINES = 12  # that an error quotes
TICKS_S = os.sysconf("SC_CLK_TCK")

Role: TypeAlias = Literal["one", "prefill", "decode"]
Params: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all servers of a run have in common."""

    python: Path  # an interpreter that has the engine
    model: Path
    options: tuple[str, ...]  # of the engine's server
    cards: tuple[str, ...]  # what the first and the second server see as CUDA_VISIBLE_DEVICES; empty on CPUs
    environment: Mapping[str, str]
    extra: Mapping[str, Any]  # settings of our connector or backend
    logs: Path
    vocabulary: int
    prefill_options: tuple[str, ...] = ()  # of a server of this role, behind `options`
    decode_options: tuple[str, ...] = ()
    hisparse_gib: float = 0.0  # of vLLM's host pool for HiSparse, on one engine and on decode
    transfer: Mapping[str, Any] = field(default_factory=dict[str, Any])  # more of vLLM's kv_transfer_config

    def options_of(self, role: Role) -> tuple[str, ...]:
        return {"one": (), "prefill": self.prefill_options, "decode": self.decode_options}[role]


@dataclass(slots=True)
class Answer:
    """What came of a request, by CLOCK_MONOTONIC."""

    asked_s: float
    prefilled_s: float | None = None  # prefill has computed the prompt, as far as it reports
    chunks_s: list[float] = field(default_factory=list[float])  # of decode's stream; a chunk has a token or more
    tokens: list[int] = field(default_factory=list[int])
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """From asking to the first token."""
        return self.chunks_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        """Between the chunks of its stream."""
        return [after - before for before, after in zip(self.chunks_s, self.chunks_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Server:
    """One server that runs: where it answers, the process group of its processes, and after how many seconds it was
    healthy."""

    url: str
    group: int
    start_s: float


class Fleet:
    """Servers that run, and requests to them. One engine has the role "one", and is prefill and decode."""

    path: ClassVar[str]  # of requests

    def __init__(self, servers: Mapping[Role, Server], session: aiohttp.ClientSession) -> None:
        self._servers, self._session = servers, session

    async def ask(self, prompt: Sequence[int], tokens: int) -> Answer:
        """The greedy tokens of a prompt, handed over if there are two engines."""
        answer, rest = await self.hand_over(prompt, tokens)
        await rest
        return answer

    async def hand_over(self, prompt: Sequence[int], tokens: int) -> tuple[Answer, asyncio.Task[None]]:
        """As `ask`, but returns once prefill has answered; the task ends with decode's last token."""
        raise NotImplementedError

    async def prefill_alone(self, prompt: Sequence[int]) -> None:
        """Has prefill compute a prompt that nobody gets. Raises as aiohttp does, and WorldError if it refuses."""
        raise NotImplementedError

    async def decode_alone(self, prompt: Sequence[int], tokens: int, into: Answer | None = None) -> Answer:
        """The greedy tokens of a prompt that decode computes itself; the answer grows while they come."""
        raise NotImplementedError

    async def metrics(self, prefix: str) -> dict[str, float]:
        """Samples of decode's /metrics whose names begin so, summed over other labels than the first."""
        async with self._session.get(f"{self._servers['decode'].url}/metrics") as answer:
            text = await answer.text()
        samples: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith(prefix) and "_bucket" not in line and "_created" not in line:
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def memory(self) -> dict[Role, tuple[float, float, float]]:
        """Of each server: anonymous and shared memory of its processes in GiB, and the seconds until it answered."""
        return {role: (*memory_of(server.group), server.start_s) for role, server in self._servers.items()}

    def threads_cpu_s(self) -> float:
        """CPU seconds of prefill's threads, or of the one engine's, without the main thread of each process. An
        engine's loop, which may spin, is in a main thread; transfers are not."""
        server = self._servers.get("prefill") or self._servers["one"]
        return threads_cpu_s(server.group)

    async def _post(self, role: Role, body: Params) -> Params:
        async with self._session.post(self._servers[role].url + self.path, json=body) as answer:
            if answer.status != 200:
                raise WorldError(f"{answer.status}: {(await answer.text())[:200]}")
            return await answer.json()

    async def _stream(self, role: Role, into: Answer, body: Params, tokens: int) -> None:
        """Reads a stream of server-sent events to its end, into an answer."""
        try:
            async with self._session.post(self._servers[role].url + self.path, json=body) as answer:
                if answer.status != 200:
                    into.error = into.error or f"{answer.status}: {(await answer.text())[:200]}"
                    return
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.monotonic()
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        into.error = into.error or str(chunk["error"])[:200]
                        return
                    if new := self._new_tokens(chunk, len(into.tokens)):
                        into.chunks_s.append(now)
                        into.tokens += new
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            into.error = into.error or repr(error)
        if len(into.tokens) != tokens:
            into.error = into.error or f"{len(into.tokens)} of {tokens} tokens"

    def _new_tokens(self, chunk: Any, count: int) -> list[int]:
        """The token ids of a chunk of a stream that had `count` tokens before."""
        raise NotImplementedError


class Engine(Protocol):
    """How the servers of one engine are started and asked."""

    @property
    def links(self) -> Sequence[str]:
        """The names of the connectors or backends that it hands KV over by."""
        ...

    @property
    def our_link(self) -> str: ...

    @property
    def our_metrics(self) -> str:
        """The prefix of the metrics that decode exports of our link."""
        ...

    def command(
        self, setup: Setup, link: str | None, role: Role, ports: tuple[int, int]
    ) -> tuple[list[str], dict[str, str]]:
        """A server's command and what it has in its environment; `ports` are of its requests and of its side channel.
        Without a link it is one engine."""
        ...

    async def fleet(
        self,
        servers: Mapping[Role, Server],
        session: aiohttp.ClientSession,
        link: str | None,
        ports: Mapping[Role, int],
    ) -> Fleet:
        """Of servers that are healthy; `ports` are of their side channels."""
        ...


@contextlib.asynccontextmanager
async def running(setup: Setup, engine: Engine, link: str | None) -> AsyncGenerator[Fleet]:
    """A fleet whose servers are healthy; they end with the scope. Raises WorldError, with lines of its log, for one
    that does not start."""
    roles: tuple[Role, ...] = ("one",) if link is None else ("prefill", "decode")
    ports: dict[Role, int] = {role: free_port() for role in roles}
    side_ports: dict[Role, int] = {role: free_port() for role in roles}
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with AsyncExitStack() as stack:
        processes = ExitStack()
        stack.push_async_callback(asyncio.to_thread, processes.close)
        began, started = time.monotonic(), dict[Role, tuple[subprocess.Popen[bytes], Path]]()
        for index, role in enumerate(roles):
            command, environment = engine.command(setup, link, role, (ports[role], side_ports[role]))
            if setup.cards:
                environment["CUDA_VISIBLE_DEVICES"] = setup.cards[index % len(setup.cards)]
            log = setup.logs / f"{link or 'one'}-{role}.log"
            environment |= setup.environment
            started[role] = processes.enter_context(server_process(command, environment, log)), log
        session = await stack.enter_async_context(
            # A connection that was idle may be closed by its server just as it is used again.
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))
        )
        servers: dict[Role, Server] = {}
        for role, (process, log) in started.items():
            url = f"http://{HOST}:{ports[role]}"
            await healthy(session, url, process, log, began + START_S)
            servers[role] = Server(url, process.pid, time.monotonic() - began)
        yield await engine.fleet(servers, session, link, side_ports)


def memory_of(group: int) -> tuple[float, float]:
    """Anonymous and shared memory that the processes of a group have mapped and backed, in GiB. What several of them
    share counts once for each."""
    anonymous = shared = 0
    for process in _processes(group):
        with contextlib.suppress(OSError, ValueError, KeyError):
            lines = (line.split() for line in (process / "status").read_text().splitlines())
            status = {words[0]: words[1] for words in lines if len(words) > 1}
            anonymous += int(status["RssAnon:"])
            shared += int(status["RssShmem:"]) + int(status["RssFile:"])
    return anonymous / (1 << 20), shared / (1 << 20)


def threads_cpu_s(group: int) -> float:
    """CPU seconds of all threads of a group's processes but their main threads. Source: /proc/PID/task/TID/stat."""
    ticks = 0
    for process in _processes(group):
        for thread in (process / "task").glob("[0-9]*"):
            if thread.name == process.name:
                continue
            with contextlib.suppress(OSError):  # it has ended
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_S


def _processes(group: int) -> Generator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                yield process


def free_port() -> int:
    """A port of loopback that nobody listens on, nor on the next one."""
    while True:
        with socket.create_server((HOST, 0)) as server, contextlib.suppress(OSError):
            port = int(server.getsockname()[1])
            with socket.create_server((HOST, port + 1)):
                return port


@contextlib.contextmanager
def server_process(
    command: Sequence[str], variables: Mapping[str, str], log: Path
) -> Generator[subprocess.Popen[bytes]]:
    """A server with these variables besides this process's; with the scope all of its processes end."""
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= variables
    with log.open("wb") as out:
        # A group of its own: the engine's processes end with the server. No session: Linux may share the cores by it.
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, process_group=0)  # noqa: S603
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def healthy(
    session: aiohttp.ClientSession, url: str, process: subprocess.Popen[bytes], log: Path, until: float | None = None
) -> None:
    """Waits until a server answers, by default for as long as one may start. Raises WorldError, with lines of its log,
    where it does not."""
    until = time.monotonic() + START_S if until is None else until
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.2)
    lines = (await asyncio.to_thread(log.read_text, errors="replace")).splitlines()
    shown = [line for line in lines if "Error" in line][-3:] or lines[-LOG_LINES:]
    raise WorldError(f"{url}: the server did not start; {log}: {' / '.join(shown)[-600:]}")
