"""A prefill and a decode on two hosts, decode behind its own firewall; who reaches its engines' ports, and when.

`python -m tests.serve.integration.guarded_decode FILES` is prefill's host, with the router, in a network namespace of
its own, and makes decode's. It prints what it has seen as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from pdtransfer.bus.keys import generate
from pdtransfer.probe import sockets
from pdtransfer.serve.settings.router import RouterConfig
from tests.serve.integration.advertised import MOONCAKE, reaches, start
from tests.support.fleets import decode_config, generated, prefill_config
from tests.support.networks import OWN_SYS, linked
from tests.support.waiting import until, wait_for

HERE, THERE, STRANGER = "10.213.84.1", "10.213.84.2", "10.213.84.7"
HERE6, THERE6 = "fd84::1", "fd84::2"
LISTENS = "0A"  # the state, in /proc/net/tcp


def tables(there: list[str]) -> str:
    return subprocess.run([*there, "nft", "list", "ruleset"], capture_output=True, text=True, check=True).stdout


def health(there: list[str], port: int) -> dict[str, Any]:
    ask = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/health').read().decode())"
    ran = subprocess.run([*there, sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def reached_by_6(port: int) -> bool:
    """Whether a host without a session, of IPv6, is let in: engines' second ports listen there as well."""
    try:
        socket.create_connection((THERE6, port), timeout=30, source_address=(HERE6, 0)).close()
    except ConnectionRefusedError:
        return False
    return True


async def alike(url: str) -> bool:
    """Whether a prompt's answer is a single process's."""
    text = "what is written here goes through engines" * 3
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=60)) as session:

        async def ready() -> bool:
            async with session.get("/health") as response:
                return all(worker["usable"] for worker in (await response.json())["workers"])

        await until(ready, "the workers are usable")
        body = {"prompt": text, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        async with session.post("/v1/completions", json=body) as response:
            facts = (await response.json()).get("pdtransfer", {})
    return facts.get("kv_digest") == generated(text).kv_digest.hex()


def main(files: Path, transport: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    link = ([f"{HERE}/24", f"{STRANGER}/24", f"{HERE6}/64"], [f"{THERE}/24", f"{THERE6}/64"])
    with ExitStack() as stack:
        far, there = stack.enter_context(linked(link))
        allow = files / "allow"
        allow.write_text("".join(generate(files / name) + "\n" for name in ("r", "p", "d")))
        keyed: dict[str, dict[str, Any]] = {
            name: {"key": files / f"{name}.key", "allow": allow, "json": True} for name in ("r", "p", "d")
        }
        (files / "far" / "proc").mkdir(parents=True)
        (files / "far" / "proc" / "net").symlink_to(f"/proc/{far}/net")

        def engines() -> list[int]:
            return sorted({port for state, _, port in sockets(files / "far") if state == LISTENS and port in MOONCAKE})

        made = prefill_config(bind=f"tcp://{HERE}:7101", firewall="off", transport=transport, **keyed["p"])
        prefill, prefill_pid = start(stack, made, files / "p.log")
        made = decode_config(
            files / "s", bind=f"tcp://{THERE}:7201", listen="127.0.0.1:7301", firewall="on", transport=transport,
            **keyed["d"],
        )  # fmt: skip
        decode, decode_pid = start(stack, made, files / "d.log", *there, *OWN_SYS)
        made = RouterConfig(
            listen="127.0.0.1:0", node="r", prefill=(prefill["endpoint"],), decode=(decode["endpoint"],), **keyed["r"]
        )
        front, _ = start(stack, made, files / "r.log")
        seen["alike"] = asyncio.run(alike(f"http://{front['http']}"))
        ports = engines()
        seen["ports"] = len(ports)
        seen["peer"] = [reaches(HERE, THERE, port) for port in ports]
        seen["stranger"] = [reaches(STRANGER, THERE, port) for port in ports]
        seen["stranger of IPv6"] = [reached_by_6(port) for port in ports]
        own = f"import socket; socket.create_connection(('127.0.0.1', {ports[0]}))"
        local = subprocess.run([*there, sys.executable, "-c", own], capture_output=True, text=True, check=False)
        seen["local user"] = local.returncode == 0
        seen["bus"] = reaches(STRANGER, THERE, 7201)
        seen["health"] = health(there, 7301)["firewall"]
        seen["names"] = all(f"{HERE} . {port}" in tables(there) for port in ports)

        os.kill(prefill_pid, signal.SIGTERM)
        wait_for(lambda: not engines(), "the session's engines end with it")
        seen["peer after its session"] = [reaches(HERE, THERE, port) for port in ports]
        wait_for(lambda: f"{HERE} . " not in tables(there), "its address is taken off the rules")
        os.kill(decode_pid, signal.SIGKILL)
        wait_for(lambda: not tables(there), "the rules end with their process")
    return seen


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
