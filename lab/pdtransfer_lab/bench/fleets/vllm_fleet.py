"""Real vLLM servers on this host: one engine, or prefill and decode with a KV connector between them; and requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias

import aiohttp

from pdtransfer.errors import WorldError

REPO = Path(__file__).parents[4]
HOST = "127.0.0.1"
START_S = 180.0  # of servers that import vLLM, load a model and capture graphs
ANSWER_S = 300.0
END_S = 20.0  # after which a server that was asked to end is killed
LOG_LINES = 12  # that an error quotes
NAME = "measured"  # of the model, as requests have it

Role: TypeAlias = Literal["one", "prefill", "decode"]
ROLES: dict[Role, str] = {"one": "", "prefill": "kv_producer", "decode": "kv_consumer"}
Params: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """How two engines hand requests over, and how a proxy asks them.

    `at_once`: decode is asked together with prefill, as the connector's own proxy does; else once prefill has answered,
    with the kv_transfer_params that it returned. `bootstrap`: a server of prefill's own has what decode must know of
    it; else its first answer has. `environment` takes a port that is free.
    """

    name: str
    at_once: bool = False
    bootstrap: bool = False
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Callable[[int], dict[str, str]] = lambda _: {}


CONNECTORS = {
    each.name: each
    for each in (
        Connector(
            name="PDTransferConnector", at_once=True,
            config={"kv_connector_module_path": "pdtransfer.adapters.vllm"},
        ),
        Connector(
            name="NixlConnector",
            environment=lambda port: {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)},
        ),
        Connector(
            name="MooncakeConnector", at_once=True, bootstrap=True,
            config={"kv_connector_extra_config": {"mooncake_protocol": "tcp"}},
            environment=lambda port: {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)},
        ),
    )
}  # fmt: skip
"""Those that vLLM brings, beside ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all servers of a run have in common."""

    python: Path  # an interpreter that has vLLM
    model: Path
    options: tuple[str, ...]  # of vLLM's server
    cards: tuple[str, ...]  # what the first and the second server see as CUDA_VISIBLE_DEVICES; empty on CPUs
    environment: Mapping[str, str]
    extra: Mapping[str, Any]  # kv_connector_extra_config of PDTransferConnector
    logs: Path
    vocabulary: int


@dataclass(slots=True)
class Answer:
    """What came of a request, by CLOCK_MONOTONIC."""

    asked_s: float
    prefilled_s: float | None = None  # prefill's answer is there
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


class Fleet:
    """Servers that run, and requests to them. `connector` is None for one engine, which is prefill and decode."""

    def __init__(
        self, urls: Mapping[Role, str], connector: Connector | None, session: aiohttp.ClientSession, identity: Params,
        servers: Mapping[Role, tuple[int, float]],
    ) -> None:  # fmt: skip
        """`servers` are the process group of each server, and after how many seconds it answered."""
        self._urls, self._connector, self._session, self._servers = urls, connector, session, servers
        self._names = count()
        self._identity = identity  # of the prefill engine, as decode is told it; learnt of its first answer

    async def ask(self, prompt: Sequence[int], tokens: int) -> Answer:
        """So many greedy tokens of a prompt, handed over if there are two engines."""
        made, rest = await self.hand_over(prompt, tokens)
        await rest
        return made

    async def hand_over(self, prompt: Sequence[int], tokens: int) -> tuple[Answer, asyncio.Task[None]]:
        """As `ask`, but returns once prefill has answered; the task ends with decode's last token."""
        made = Answer(time.monotonic())
        if self._connector is None:
            return made, asyncio.create_task(self._stream("one", made, prompt, tokens, None))
        label = f"xfer-{os.getpid()}-{next(self._names)}"
        sends = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": label}
        rest = None
        if self._connector.at_once and self._identity:
            params = self._identity | {"transfer_id": label}
            rest = asyncio.create_task(self._stream("decode", made, prompt, tokens, params))
        try:
            returned = await self._prefill(prompt, sends)
        except (OSError, aiohttp.ClientError, TimeoutError, WorldError) as error:
            made.error = f"prefill: {error!r}"
            rest = rest or asyncio.create_task(asyncio.sleep(0))
            return made, rest
        made.prefilled_s = time.monotonic()
        if rest is None:
            if self._connector.at_once:
                self._identity = {name: value for name, value in returned.items() if name != "remote_request_id"}
            rest = asyncio.create_task(self._stream("decode", made, prompt, tokens, returned))
        return made, rest

    async def prefill_alone(self, prompt: Sequence[int]) -> None:
        """Has prefill compute a prompt that nobody gets. Raises as aiohttp does, and WorldError if it refuses."""
        await self._prefill(prompt, None)

    async def decode_alone(self, prompt: Sequence[int], tokens: int, into: Answer | None = None) -> Answer:
        """So many greedy tokens of a prompt that decode computes itself; the answer grows while they come."""
        made = into or Answer(time.monotonic())
        await self._stream("one" if self._connector is None else "decode", made, prompt, tokens, None)
        return made

    async def metrics(self, prefix: str) -> dict[str, float]:
        """Samples of decode's /metrics whose names begin so, summed over other labels than the first."""
        async with self._session.get(f"{self._urls['decode']}/metrics") as answer:
            text = await answer.text()
        made: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith(prefix) and "_bucket" not in line and "_created" not in line:
                name, _, value = line.rpartition(" ")
                made[name] = float(value)
        return made

    def memory(self) -> dict[Role, tuple[float, float, float]]:
        """Of each server: anonymous and shared memory of its processes in GiB, and the seconds until it answered."""
        return {role: (*memory_of(group), start_s) for role, (group, start_s) in self._servers.items()}

    async def _prefill(self, prompt: Sequence[int], params: Params | None) -> Params:
        body = self._body(prompt, 1, params)
        async with self._session.post(f"{self._urls['prefill']}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise WorldError(f"{answer.status}: {(await answer.text())[:200]}")
            return (await answer.json()).get("kv_transfer_params") or {}

    async def _stream(
        self, role: Role, made: Answer, prompt: Sequence[int], tokens: int, params: Params | None
    ) -> None:
        body = self._body(prompt, tokens, params) | {"stream": True, "return_token_ids": True}
        try:
            async with self._session.post(f"{self._urls[role]}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    made.error = made.error or f"{answer.status}: {(await answer.text())[:200]}"
                    return
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    now = time.monotonic()
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        made.error = made.error or str(chunk["error"])[:200]
                        return
                    if chunk["choices"] and (ids := chunk["choices"][0].get("token_ids")):
                        made.chunks_s.append(now)
                        made.tokens += ids
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            made.error = made.error or repr(error)
        if len(made.tokens) != tokens:
            made.error = made.error or f"{len(made.tokens)} of {tokens} tokens"

    @staticmethod
    def _body(prompt: Sequence[int], tokens: int, params: Params | None) -> dict[str, Any]:
        made = {"model": NAME, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return made if params is None else made | {"kv_transfer_params": params}


@contextlib.asynccontextmanager
async def running(setup: Setup, connector: Connector | None) -> AsyncGenerator[Fleet]:
    """A fleet whose servers are healthy; they end with the scope. Raises WorldError, with lines of its log, for one
    that does not start."""
    roles: tuple[Role, ...] = ("one",) if connector is None else ("prefill", "decode")
    ports: dict[Role, int] = {role: free_port() for role in roles}
    side = free_port()
    urls: dict[Role, str] = {role: f"http://{HOST}:{ports[role]}" for role in roles}
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with AsyncExitStack() as stack:
        servers = ExitStack()
        stack.push_async_callback(asyncio.to_thread, servers.close)
        logs = {role: setup.logs / f"{connector.name if connector else 'one'}-{role}.log" for role in roles}
        processes = {
            role: servers.enter_context(_server(setup, connector, role, at, ports[role], side + at, logs[role]))
            for at, role in enumerate(roles)
        }
        session = await stack.enter_async_context(
            # A connection that was idle may be closed by its server just as it is used again.
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))
        )
        began, started = time.monotonic(), dict[Role, tuple[int, float]]()
        for role in roles:
            await _healthy(session, urls[role], processes[role], logs[role], began + START_S)
            started[role] = processes[role].pid, time.monotonic() - began
        identity: Params = {}
        if connector is not None and connector.bootstrap:
            own = f"http://{HOST}:{side}"
            async with session.get(f"{own}/query") as answer:
                engine = (await answer.json())["0"]["engine_id"]
            identity = {
                "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": engine,
                "remote_bootstrap_addr": own,
            }  # fmt: skip
        yield Fleet(urls, connector, session, identity, started)


def memory_of(group: int) -> tuple[float, float]:
    """Anonymous and shared memory that the processes of a group have mapped and backed, in GiB. What several of them
    share counts once for each."""
    anonymous = shared = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if os.getpgid(int(process.name)) != group:
                continue
            lines = (line.split() for line in (process / "status").read_text().splitlines())
            status = {words[0]: words[1] for words in lines if len(words) > 1}
            anonymous += int(status["RssAnon:"])
            shared += int(status["RssShmem:"]) + int(status["RssFile:"])
    return anonymous / (1 << 20), shared / (1 << 20)


def free_port() -> int:
    """A port of loopback that nobody listens on, nor on the next one."""
    while True:
        with socket.create_server((HOST, 0)) as one, contextlib.suppress(OSError):
            port = int(one.getsockname()[1])
            with socket.create_server((HOST, port + 1)):
                return port


@contextlib.contextmanager
def _server(
    setup: Setup, connector: Connector | None, role: Role, at: int, port: int, side: int, log: Path
) -> Generator[subprocess.Popen[bytes]]:
    command = [
        str(setup.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(setup.model),
        "--served-model-name", NAME, "--host", HOST, "--port", str(port), *setup.options,
    ]  # fmt: skip
    environment = dict(os.environ) | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": HOST}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    if setup.cards:
        environment["CUDA_VISIBLE_DEVICES"] = setup.cards[at % len(setup.cards)]
    if connector is not None:
        config: dict[str, Any] = {"kv_connector": connector.name, "kv_role": ROLES[role]} | dict(connector.config)
        if connector.name == "PDTransferConnector" and setup.extra:
            config["kv_connector_extra_config"] = dict(setup.extra)
        command += ["--kv-transfer-config", json.dumps(config)]
        environment |= connector.environment(side)
    environment |= setup.environment
    with log.open("wb") as out:
        # A group of its own: the engine's processes end with the server.
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)  # noqa: S603
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _healthy(
    session: aiohttp.ClientSession, url: str, process: subprocess.Popen[bytes], log: Path, until: float
) -> None:
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.2)
    lines = (await asyncio.to_thread(log.read_text, errors="replace")).splitlines()
    told = [line for line in lines if "Error" in line][-3:] or lines[-LOG_LINES:]
    raise WorldError(f"{url}: the server did not start; {log}: {' / '.join(told)[-600:]}")
