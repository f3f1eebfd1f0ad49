"""vLLM's OpenAI servers with a KV connector, ours and those that vLLM brings."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

import aiohttp

from pdtransfer.errors import WorldError

from .servers import HOST, Answer, Fleet, Params, Role, Server, Setup

NAME = "measured"  # of the model, as requests have it
ROLES: dict[Role, str] = {"one": "", "prefill": "kv_producer", "decode": "kv_consumer"}


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
    engine.name: engine
    for engine in (
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


class VllmFleet(Fleet):
    """Prefill is asked for one token. `connector` is None for one engine."""

    path: ClassVar[str] = "/v1/completions"

    def __init__(
        self, servers: Mapping[Role, Server], session: aiohttp.ClientSession, connector: Connector | None,
        identity: Params,
    ) -> None:  # fmt: skip
        super().__init__(servers, session)
        self._connector, self._names = connector, count()
        self._identity = identity  # of the prefill engine, as decode gets it; learnt from its first answer

    async def hand_over(self, prompt: Sequence[int], tokens: int) -> tuple[Answer, asyncio.Task[None]]:
        answer = Answer(time.monotonic())
        if self._connector is None:
            return answer, self._decode("one", answer, prompt, tokens, None)
        label = f"xfer-{os.getpid()}-{next(self._names)}"
        sends = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": label}
        rest = None
        if self._connector.at_once and self._identity:
            params = self._identity | {"transfer_id": label}
            rest = self._decode("decode", answer, prompt, tokens, params)
        try:
            returned: Params = (await self._post("prefill", body_of(prompt, 1, sends))).get("kv_transfer_params") or {}
        except (OSError, aiohttp.ClientError, TimeoutError, WorldError) as error:
            answer.error = f"prefill: {error!r}"
            return answer, rest or asyncio.create_task(asyncio.sleep(0))
        answer.prefilled_s = time.monotonic()
        if rest is None:
            if self._connector.at_once:
                self._identity = {name: value for name, value in returned.items() if name != "remote_request_id"}
            rest = self._decode("decode", answer, prompt, tokens, returned)
        return answer, rest

    async def prefill_alone(self, prompt: Sequence[int]) -> None:
        await self._post("prefill", body_of(prompt, 1, None))

    async def decode_alone(self, prompt: Sequence[int], tokens: int, into: Answer | None = None) -> Answer:
        answer = into or Answer(time.monotonic())
        await self._decode("one" if self._connector is None else "decode", answer, prompt, tokens, None)
        return answer

    def _decode(
        self, role: Role, into: Answer, prompt: Sequence[int], tokens: int, params: Params | None
    ) -> asyncio.Task[None]:
        body = body_of(prompt, tokens, params) | {"stream": True, "return_token_ids": True}
        return asyncio.create_task(self._stream(role, into, body, tokens))

    def _new_tokens(self, chunk: Any, count: int) -> list[int]:  # noqa: ARG002
        return (chunk["choices"] and chunk["choices"][0].get("token_ids")) or []


def body_of(prompt: Sequence[int], tokens: int, params: Params | None) -> Params:
    """A request for greedy tokens; `params` are its kv_transfer_params."""
    body = {"model": NAME, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return body if params is None else body | {"kv_transfer_params": params}


class Vllm:
    """vLLM, as `servers.Engine` has it."""

    links = tuple(CONNECTORS)
    our_link = "PDTransferConnector"
    our_metrics = "vllm:pdtransfer"

    def command(
        self, setup: Setup, link: str | None, role: Role, ports: tuple[int, int]
    ) -> tuple[list[str], dict[str, str]]:
        port, side_port = ports
        command = [
            str(setup.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(setup.model),
            "--served-model-name", NAME, "--host", HOST, "--port", str(port), *setup.options, *setup.options_of(role),
        ]  # fmt: skip
        environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": HOST}
        configs: list[dict[str, Any]] = []
        if link is not None:
            connector = CONNECTORS[link]
            config: dict[str, Any] = {"kv_connector": link, "kv_role": ROLES[role]}
            config |= {**connector.config, **setup.transfer}
            if link == self.our_link and setup.extra:
                config["kv_connector_extra_config"] = dict(setup.extra)
            configs.append(config)
            environment |= connector.environment(side_port)
        if setup.hisparse_gib and role != "prefill":
            pool = {"host_pool_gib": setup.hisparse_gib}
            configs.append(
                {"kv_connector": "HiSparseConnector", "kv_role": "kv_both", "kv_connector_extra_config": pool}
            )
        if len(configs) > 1:
            both = {"kv_connector": "MultiConnector", "kv_role": configs[0]["kv_role"]}
            configs = [both | {"kv_connector_extra_config": {"connectors": configs}}]
        for whole in configs:
            command += ["--kv-transfer-config", json.dumps(whole)]
        return command, environment

    async def fleet(
        self,
        servers: Mapping[Role, Server],
        session: aiohttp.ClientSession,
        link: str | None,
        ports: Mapping[Role, int],
    ) -> Fleet:
        connector = None if link is None else CONNECTORS[link]
        identity: Params = {}
        if connector is not None and connector.bootstrap:
            prefill_url = f"http://{HOST}:{ports['prefill']}"
            async with session.get(f"{prefill_url}/query") as answer:
                engine = (await answer.json())["0"]["engine_id"]
            identity = {
                "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": engine,
                "remote_bootstrap_addr": prefill_url,
            }  # fmt: skip
        return VllmFleet(servers, session, connector, identity)
