"""An engine that warms up: its daemon is not ready before, and then serves."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import aiohttp
import pytest

from pdtransfer.errors import WorldError
from pdtransfer.serve.process.fleet import Daemon
from tests.support.fleets import ENGINE, Gates, decode_config, free_address, prefill_config
from tests.support.paths import REPO
from tests.support.waiting import PATIENCE_S, until

# There is nothing to warm up in it, so nothing else takes long.
PLAIN = {"engine": ENGINE, "page_size": 1}


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_daemon_is_not_ready_before_its_engine_has_warmed_up(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", str(REPO)))
    gates, http = Gates(tmp_path / "gates"), free_address()
    gates.directory.mkdir()
    more = PLAIN | {"listen": http, "engine_option": ("model=plain", f"gates={gates.directory}")}
    sockets = tempfile.TemporaryDirectory(prefix="pdt-")  # a Unix socket's path is short
    config = prefill_config(**more) if role == "prefill" else decode_config(Path(sockets.name) / "s", **more)
    with sockets:
        async with aiohttp.ClientSession(f"http://{http}") as client:

            async def answers(status: int) -> bool:
                try:
                    async with client.get("/health") as response:
                        return response.status == status
                except aiohttp.ClientConnectionError:
                    return False

            async def warming_up() -> bool:
                return (gates.directory / "warming-up").exists()

            with gates.closed("warm-up"):
                daemon = await Daemon.start(config, tmp_path / "log")
                ready = asyncio.ensure_future(daemon.wait_ready())
                try:
                    await until(warming_up, "it warms up")
                    done, _ = await asyncio.wait([ready], timeout=0.5)
                    assert not done, "it says that it is ready"
                    assert await answers(503)
                except BaseException:
                    daemon.process.kill()
                    raise
            await asyncio.wait_for(ready, PATIENCE_S)
            assert await answers(200)
            daemon.process.terminate()
            assert await daemon.process.wait() == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_daemon_whose_engine_dies_at_its_warm_up_is_never_ready_and_ends_with_its_words(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", str(REPO)))
    more = PLAIN | {"engine_option": ("model=plain", "fault=cold")}
    with tempfile.TemporaryDirectory(prefix="pdt-") as sockets:
        config = prefill_config(**more) if role == "prefill" else decode_config(Path(sockets) / "s", **more)
        daemon = await Daemon.start(config, tmp_path / "log")
        with pytest.raises(WorldError, match=r"status 1.*\n(.*\n)*.*as the test wants it"):
            await daemon.wait_ready()
