"""SGLang's servers with a transfer backend, ours and those that SGLang brings."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import aiohttp

from pdtransfer.errors import WorldError

from .servers import HOST, Answer, Fleet, Params, Role, Server, Setup, free_port

NO_TRANSFER = "2.2.2.2"  # SGLang's FAKE_BOOTSTRAP_HOST: a request whose KV is neither sent nor received


class SglangFleet(Fleet):
    """Prefill and decode get the same request at once, as SGLang's router sends it. Prefill answers when its KV has
    been transferred; that it has computed the prompt is in the times of its answer (--enable-metrics)."""

    path: ClassVar[str] = "/generate"

    def __init__(
        self, servers: Mapping[Role, Server], session: aiohttp.ClientSession, bootstrap_port: int | None
    ) -> None:
        super().__init__(servers, session)
        self._bootstrap_port = bootstrap_port  # None: one engine

    async def hand_over(self, prompt: Sequence[int], tokens: int) -> tuple[Answer, asyncio.Task[None]]:
        answer = Answer(time.monotonic())
        body = _body(prompt, tokens)
        if self._bootstrap_port is None:
            return answer, self._decode("one", answer, body, tokens)
        body |= self._room()
        rest = self._decode("decode", answer, body, tokens)
        try:
            meta = (await self._post("prefill", body))["meta_info"]
        except (OSError, aiohttp.ClientError, TimeoutError, WorldError) as error:
            answer.error = f"prefill: {error!r}"
            return answer, rest
        if wall_s := meta.get("prefill_finished_time"):
            answer.prefilled_s = wall_s - time.time() + time.monotonic()
        return answer, rest

    async def prefill_alone(self, prompt: Sequence[int]) -> None:
        await self._post("prefill", _body(prompt, 1) | self._room(NO_TRANSFER))

    async def decode_alone(self, prompt: Sequence[int], tokens: int, into: Answer | None = None) -> Answer:
        """Decode computes no prompt: it goes on from pages that nobody has written."""
        answer = into or Answer(time.monotonic())
        if self._bootstrap_port is None:
            await self._decode("one", answer, _body(prompt, tokens), tokens)
        else:
            await self._decode("decode", answer, _body(prompt, tokens) | self._room(NO_TRANSFER), tokens)
        return answer

    def _room(self, host: str = HOST) -> Params:
        room = random.randrange(1, 1 << 63)  # noqa: S311
        return {"bootstrap_host": host, "bootstrap_port": self._bootstrap_port, "bootstrap_room": room}

    def _decode(self, role: Role, into: Answer, body: Params, tokens: int) -> asyncio.Task[None]:
        return asyncio.create_task(self._stream(role, into, body | {"stream": True}, tokens))

    def _new_tokens(self, chunk: Any, count: int) -> list[int]:
        """Each chunk of SGLang has all tokens so far."""
        return chunk["output_ids"][count:]


def _body(prompt: Sequence[int], tokens: int) -> Params:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling}


class Sglang:
    """SGLang, as `servers.Engine` has it."""

    links = "pdtransfer", "mooncake", "nixl"  # values of --disaggregation-transfer-backend
    our_link = "pdtransfer"
    our_metrics = "sglang:kv_transfer"

    def command(
        self, setup: Setup, link: str | None, role: Role, ports: tuple[int, int]
    ) -> tuple[list[str], dict[str, str]]:
        port, bootstrap_port = ports
        command = [
            str(setup.python), "-m", "sglang.launch_server", "--model-path", str(setup.model), "--host", HOST,
            "--port", str(port), "--nccl-port", str(free_port()), "--enable-metrics", "--skip-server-warmup",
            *setup.options, *setup.options_of(role),
        ]  # fmt: skip
        environment: dict[str, str] = {"SGLANG_HOST_IP": HOST}
        if link is not None:
            command += [
                "--disaggregation-mode", role, "--disaggregation-transfer-backend", link,
                "--disaggregation-bootstrap-port", str(bootstrap_port),
            ]  # fmt: skip
            if link == self.our_link and setup.extra:
                environment["PDTRANSFER_SGLANG"] = json.dumps(dict(setup.extra))
        return command, environment

    async def fleet(
        self,
        servers: Mapping[Role, Server],
        session: aiohttp.ClientSession,
        link: str | None,
        ports: Mapping[Role, int],
    ) -> Fleet:
        return SglangFleet(servers, session, None if link is None else ports["prefill"])
