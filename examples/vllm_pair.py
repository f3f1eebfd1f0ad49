"""Two vLLM servers with pdtransfer between them, behind its router; prints what they answer.

    make venv-vllm
    .venv-vllm/bin/python examples/vllm_pair.py MODEL

MODEL is a directory or a name that `vllm serve` takes. One server computes each prompt, the other continues it from the
KV that has landed in its own blocks. `--vllm` names another installation of vLLM, into which pdtransfer need not be
installed; options that are not known here go to `vllm serve`. All listen on loopback, and all end with this process.
The logs are in `--logs`.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from openai import OpenAI

REPO = Path(__file__).parent.parent
PROMPTS = "The three primary colors are", "Once upon a time, in a small village by the sea,"
QUESTION: Any = {"role": "user", "content": "Name the capital of France, and one of its rivers."}
START_S = 600.0  # a server that imports vLLM and loads its model on a busy host
CONNECTOR = {"kv_connector": "PDTransferConnector", "kv_connector_module_path": "pdtransfer.adapters.vllm"}
# On CPUs the two servers share the cores.
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(REPO)}


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str | Path], log: Path) -> Generator[subprocess.Popen[bytes]]:
    """A process that ends with this scope."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_healthy(url: str, processes: Sequence[subprocess.Popen[bytes]], logs: Path) -> None:
    """Waits for /health of a server. Raises SystemExit where a process ends instead."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if any(process.poll() is not None for process in processes):
            raise SystemExit(f"a server did not start: its log is in {logs}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"{url} is not healthy: the logs are in {logs}")


def received(decode: str) -> tuple[int, int]:
    """How many hand-offs a decode server has received, and their bytes, by its own metrics."""
    with urllib.request.urlopen(f"{decode}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    counts = (re.search(rf'vllm:pdtransfer_{name}.*"received".* ([\d.e+]+)', text) for name in ("rooms", "bytes"))
    rooms, size = (int(float(count[1])) if count else 0 for count in counts)
    return rooms, size


def show(router: str, decode: str, model: str) -> bool:
    """Prints some answers; returns whether each is what decode makes of the prompt alone."""
    clients = [OpenAI(base_url=f"{url}/v1", api_key="none", timeout=START_S) for url in (router, decode)]
    how: dict[str, Any] = {"model": model, "max_tokens": 32, "temperature": 0}
    equal = True
    for prompt in PROMPTS:
        texts = [client.completions.create(prompt=prompt, **how).choices[0].text for client in clients]
        equal = equal and texts[0] == texts[1]
        print(f"{prompt} -> {texts[0].strip()}")
    chats = [client.chat.completions.create(messages=[QUESTION], **how) for client in clients]
    texts = [chat.choices[0].message.content or "" for chat in chats]
    equal = equal and texts[0] == texts[1]
    print(f"{QUESTION['content']} -> {texts[0].strip()}")
    rooms, size = received(decode)
    print(f"{rooms} hand-offs, {size / 1e6:.1f} MB of KV; {'equal' if equal else 'NOT EQUAL'} to decode alone")
    return equal and rooms == len(PROMPTS) + 1


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--vllm", type=Path, default=REPO / ".venv-vllm" / "bin" / "vllm", help="the command vllm")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/pdtransfer-vllm"))
    given, options = parser.parse_known_args()
    if not given.vllm.exists():
        raise SystemExit(f"{given.vllm} is not there: make venv-vllm, or name another with --vllm")
    given.logs.mkdir(parents=True, exist_ok=True)
    ports = {name: free_port() for name in ("prefill", "decode", "router")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    configs = {
        "prefill": {**CONNECTOR, "kv_role": "kv_producer"},
        "decode": {**CONNECTOR, "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"},
    }
    with ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        for role, config in configs.items():
            command = [given.vllm, "serve", given.model, "--served-model-name", "demo", "--host", "127.0.0.1", "--port"]
            command += [str(ports[role]), "--kv-transfer-config", json.dumps(config), *options]
            processes.append(stack.enter_context(running(command, given.logs / f"{role}.log")))
        command = [sys.executable, "-m", "pdtransfer", "router", "--engine", "vllm", "--listen"]
        command += [f"127.0.0.1:{ports['router']}", "--prefill", urls["prefill"], "--decode", urls["decode"]]
        processes.append(stack.enter_context(running(command, given.logs / "router.log")))
        wait_healthy(urls["router"], processes, given.logs)
        return 0 if show(urls["router"], urls["decode"], "demo") else 1


if __name__ == "__main__":
    sys.exit(main())
