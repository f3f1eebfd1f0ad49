"""HTTP servers in the place of SGLang's, which compute nothing and take their time: what a relay can be timed with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from pdtransfer.limits import HTTP_BODY_BYTES_MAX

ANSWER_S = 0.01


@asynccontextmanager
async def paced_servers() -> AsyncGenerator[tuple[str, str]]:
    """The URLs of a prefill and a decode server."""

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def generate(request: web.Request) -> web.Response:
        async for _ in request.content.iter_any():
            pass
        await asyncio.sleep(ANSWER_S)
        return web.json_response({"choices": [{"text": "a"}]})

    runners: list[web.AppRunner] = []
    try:
        for _ in range(2):
            app = web.Application(client_max_size=2 * HTTP_BODY_BYTES_MAX)
            app.add_routes([web.get("/health", health), web.get("/server_info", info)])
            app.add_routes([web.post(path, generate) for path in ("/v1/completions", "/generate")])
            runners.append(web.AppRunner(app))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        prefill, decode = (f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners)
        yield prefill, decode
    finally:
        for runner in runners:
            await runner.cleanup()
