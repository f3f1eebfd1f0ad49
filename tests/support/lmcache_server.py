"""LMCache's server, which keeps KV in host memory, and the connector of a vLLM engine that keeps its KV there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.sglang_engine import free_port
from tests.support.vllm_engine import ENVIRONMENT


@contextmanager
def lmcache_server(python: Path, log: Path, *, chunk: int) -> Generator[dict[str, Any]]:
    """Started by an interpreter that has LMCache, with chunks of this many tokens, of which it keeps whole ones; yields
    the connector's entry in a MultiConnector. Engines wait for the server to answer."""
    port = free_port()
    command = [
        python, "-m", "lmcache.v1.multiprocess.server", "--port", str(port), "--chunk-size", str(chunk),
        "--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU", "--disable-observability",
        "--supported-transfer-mode", "auto",  # by its default, an engine on CPUs waits for an answer that never comes
    ]  # fmt: skip
    environment = os.environ | ENVIRONMENT | {"LMCACHE_TRACK_USAGE": "false"}
    with log.open("wb") as kept, subprocess.Popen(command, env=environment, stdout=kept, stderr=kept) as server:
        try:
            yield {
                "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.port": port},
            }  # fmt: skip
        finally:
            server.kill()
