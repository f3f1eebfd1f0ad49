"""Real daemons in any number and of any role, for tests that have something else in the place of one of them."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdtransfer.serve.process.fleet import Daemon
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.transports.mooncake.host import why_not
from tests.support.waiting import PATIENCE_S, wait_for

TRANSPORTS = ("shm", pytest.param("mooncake", marks=pytest.mark.skipif(bool(why_not()), reason=why_not())))


@contextmanager
def lone_daemons(logs: Path, *configs: PrefillConfig | DecodeConfig | RouterConfig) -> Iterator[list[Daemon]]:
    """They run until the context is left, and end as asked then, without a traceback."""
    with asyncio.Runner() as runner:
        daemons: list[Daemon] = []
        try:
            for config in configs:
                daemons.append(runner.run(Daemon.start(config, logs / f"{config.node}.log")))  # noqa: PERF401
            for daemon in daemons:
                runner.run(daemon.wait_ready())
            yield daemons
        finally:
            statuses = [runner.run(daemon.stop()) for daemon in daemons]
        assert not any(statuses), statuses
        for daemon in daemons:
            assert "Traceback" not in daemon.log.read_text(), daemon.log.read_text()


def complete(router: Daemon, prompt: str, **more: Any) -> dict[str, Any]:
    """The answer of a router to one completion, as soon as it has usable workers."""
    url = f"http://{router.ready['http']}"

    def usable() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S) as response:
                return all(worker["usable"] for worker in json.load(response)["workers"])
        except urllib.error.HTTPError:  # 503 without workers
            return False

    wait_for(usable, "usable workers")
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **more}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return json.load(response)
