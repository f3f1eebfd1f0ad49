"""Decodes bound to every interface, behind NAT and a firewall, and reached where they say that they are.

`python -m tests.serve.integration.advertised FILES` has two hosts that are network namespaces: prefill and a router in
its own, and two decodes in the other. One says the address of that host's second interface; the other says one that no
interface has, and that NAT here turns into that host's first. What may come in there is deploy/firewall.nft's to say.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from pdtransfer.bus.keys import generate
from pdtransfer.serve.commands.probes.network import _listening
from pdtransfer.serve.settings.config_to_argv import config_to_argv
from pdtransfer.serve.settings.router import RouterConfig
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from tests.support.fleets import decode_config, generated, prefill_config, prompts
from tests.support.networks import execute, linked
from tests.support.paths import REPO
from tests.support.waiting import until

FIRST, SECOND = "10.213.79", "10.213.80"  # this host is .1 on both, the other one .2, a stranger here .7
BEHIND_NAT = "10.213.81.9"
MOONCAKE = range(21_000, 22_000)
NAT = f"""
table ip nat {{
 chain output {{
  type nat hook output priority -100
  ip daddr {BEHIND_NAT} dnat to {FIRST}.2
 }}
}}
"""
Config = PrefillConfig | DecodeConfig | RouterConfig


def firewall() -> str:
    """The example, for these hosts."""
    text = (REPO / "deploy" / "firewall.nft").read_text()
    for name, hosts in {"routers": f"{FIRST}.1, {SECOND}.1", "workers": f"{FIRST}.1, {SECOND}.1"}.items():
        text, count = re.subn(rf"define {name} = {{.*?}}", f"define {name} = {{ {hosts} }}", text)
        assert count == 1
    return text


def start(stack: ExitStack, config: Config, log: Path, *prefix: str) -> tuple[dict[str, Any], int]:
    """A daemon by its own command line: what it says when it is ready, and its process."""
    stderr: IO[bytes] = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "pdtransfer", config.role, *config_to_argv(config)], cwd=REPO,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    return json.loads(process.stdout.readline()), process.pid


def reaches(source: str, address: str, port: int) -> bool:
    """Whether a connection from `source` is let in; who is not gets that reported at once."""
    try:
        socket.create_connection((address, port), timeout=30, source_address=(source, 0)).close()
    except ConnectionRefusedError:
        return False
    return True


def landed(pid: int, port: int) -> dict[str, float]:
    """Bytes of KV that came, and sessions by transport, of a decode in its own namespace."""
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-c", (
        f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
    )]  # fmt: skip
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.labels.get("transport", sample.name)] = sample.value
    return found


async def answers(url: str, decodes: dict[int, int]) -> list[bool]:
    """Prompts until each decode has had some; whether each answer is a single process's."""
    alike: list[bool] = []
    seeds = itertools.count()
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:

        async def ready() -> bool:
            async with session.get("/health") as response:
                workers = (await response.json())["workers"]
                return sum(worker["usable"] for worker in workers) == 1 + len(decodes)

        async def one(text: str) -> bool:
            body = {"prompt": text, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            async with session.post("/v1/completions", json=body) as response:
                facts = (await response.json()).get("pdtransfer", {})
            expected = generated(text)
            names = ("tokens_digest", "logits_digest", "kv_digest")
            return all(facts.get(name) == getattr(expected, name).hex() for name in names)

        async def all_served() -> bool:
            alike.extend(await asyncio.gather(*map(one, prompts(next(seeds), 30, 90, 150, 200))))
            each = [await asyncio.to_thread(landed, pid, port) for pid, port in decodes.items()]
            return not all(alike) or all(figures["pdtransfer_kv_bytes_total"] for figures in each)

        await until(ready, "the workers are usable")
        await until(all_served, "each decode has had a room")
    return alike


def main(files: Path) -> None:
    links = [([f"{network}.{host}/24" for host in (1, 7)], [f"{network}.2/24"]) for network in (FIRST, SECOND)]
    with ExitStack() as stack:
        far, there = stack.enter_context(linked(*links))
        execute("ip", "route", "add", BEHIND_NAT, "via", f"{FIRST}.2")
        execute("nft", "-f", "-", text=NAT)
        execute(*there, "nft", "-f", "-", text=firewall())
        allow = files / "allow"
        allow.write_text("".join(generate(files / name) + "\n" for name in ("r", "p", "d0", "d1")))
        keyed = {name: {"key": files / f"{name}.key", "allow": allow, "json": True} for name in ("r", "p", "d0", "d1")}
        prefill, _ = start(
            stack, prefill_config(bind="tcp://0.0.0.0:7101", advertise=f"{FIRST}.1", **keyed["p"]), files / "p.log"
        )
        decodes: dict[int, int] = {}
        endpoints: list[str] = []
        for number, (address, port) in enumerate(((f"{SECOND}.2", 7201), (BEHIND_NAT, 7101))):
            config = decode_config(
                files / "s", number, bind=f"tcp://0.0.0.0:{port}", listen=f"127.0.0.1:{7301 + number}",
                advertise=address, transport="mooncake", **keyed[f"d{number}"],
            )  # fmt: skip
            ready, pid = start(stack, config, files / f"d{number}.log", *there)
            decodes[pid] = 7301 + number
            endpoints.append(ready["endpoint"])
            assert ready["endpoint"].endswith(f"@tcp://{address}:{port}"), ready
        router = RouterConfig(
            listen="127.0.0.1:0", node="r", prefill=(prefill["endpoint"],), decode=tuple(endpoints), **keyed["r"]
        )
        front, _ = start(stack, router, files / "r.log")
        alike = asyncio.run(answers(f"http://{front['http']}", decodes))
        (files / "far" / "proc").mkdir(parents=True)
        (files / "far" / "proc" / "net").symlink_to(f"/proc/{far}/net")
        open_ports = sorted(_listening(files / "far").keys() & set(MOONCAKE))
        figures = [landed(pid, port) for pid, port in decodes.items()]
        print(
            json.dumps(
                {
                    "alike": alike,
                    "transports": [[figure.get("shm", 0), figure.get("mooncake", 0) > 0] for figure in figures],
                    "engines": len(open_ports),
                    "peer": [reaches(f"{FIRST}.1", f"{FIRST}.2", port) for port in open_ports],
                    "stranger": [reaches(f"{FIRST}.7", f"{FIRST}.2", port) for port in (7201, *open_ports)],
                }
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
