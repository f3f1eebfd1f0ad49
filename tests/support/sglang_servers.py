"""HTTP servers that behave like SGLang's with disaggregation and compute nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from aiohttp import web

from tests.support.vllm_servers import FakeVllm, Seen


@dataclass
class FakeSglang(FakeVllm):
    """One server. `port` is of its bootstrap server; `info_requests` counts the requests for it, and
    `key` is whose requests it answers."""

    speaks: ClassVar[str] = "sglang"

    port: int = 8998
    info_requests: int = 0
    key: str = ""
    shown: dict[str, Any] = field(default_factory=dict[str, Any])  # what the plugin adds to a rank's state

    def routes(self, app: web.Application) -> None:
        app.add_routes([web.get("/server_info", self._info), web.post("/abort_request", self._abort)])

    async def _abort(self, request: web.Request) -> web.Response:
        self.given_up.append((await request.json())["rid"])
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        self.info_requests += 1
        if self.key and request.headers.get("Authorization") != self.key:
            return web.json_response({"error": "Unauthorized"}, status=401)
        mode = self.role if self.connector else "null"
        return web.json_response(
            {"disaggregation_mode": mode, "disaggregation_bootstrap_port": self.port, "version": "0.5.23"}
            | ({"internal_states": [{"pdtransfer": self.shown}]} if self.shown else {})
        )

    async def hand_over(self, seen: Seen) -> None:
        landing = self.landings.of("", str(seen.body["bootstrap_room"]))
        if self.role == "prefill":
            landing.set()
        else:
            await landing.wait()
