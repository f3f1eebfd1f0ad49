"""Groups whose ranks are on two hosts: the leaders and a router here, the other ranks there.

`python -m tests.serve.integration.rank_hosts LOGS` has two hosts that are network namespaces: it runs in one of its
own, and makes the other; every node has a key.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pdtransfer.bus.keys import KeyPair, generate
from pdtransfer.serve.settings.config_to_argv import config_to_argv
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from tests.support.fleets import GQA, decode_config, equal, fleet, free_address, generated, prefill_config, prompts
from tests.support.networks import linked
from tests.support.paths import REPO

HERE, THERE = "10.213.78.1", "10.213.78.2"
KEYS = ("front", "p", "p-tp1", "d", "d-tp1")
GROUP = {"engine_option": GQA, "tp_size": 2}


def start(config: PrefillConfig | DecodeConfig, log: Path, prefix: list[str]) -> subprocess.Popen[bytes]:
    """A rank that does not lead, by its own command line."""
    with log.open("ab") as stderr:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "pdtransfer", config.role, *config_to_argv(config)], cwd=REPO,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
        )  # fmt: skip


def arenas(pid: int) -> set[str]:
    """Names of the arenas that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.rpartition("memfd:")[2].split()[0] for line in lines if "memfd:decode" in line}


async def served(
    logs: Path, here: str, there: str, prefix: list[str], keys: dict[str, dict[str, Any]]
) -> list[set[str]]:
    """Prompts through two groups of two, answered as by one process; the arenas that either prefill rank has mapped."""
    groups = {role: free_address(here) for role in "pd"}
    with ExitStack() as stack:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdt-"))) / "s"
        place = {"tp_rank": 1, "bind": f"tcp://{there}:0", "listen": "", **GROUP}
        ranks = [
            prefill_config(**{**place, **_follows(keys, "p", groups["p"]), "node": "prefill-0-tp1"}),
            decode_config(sockets, **{**place, **_follows(keys, "d", groups["d"]), "node": "decode-0-tp1"}),
        ]
        others: list[subprocess.Popen[bytes]] = []
        for config in ranks:
            others.append(start(config, logs / f"{config.node}.log", prefix))
            stack.callback(others[-1].kill)
        leads = [
            {"bind": f"tcp://{free_address(here)}", "group": group, **GROUP, **keys.get(role, {})}
            for role, group in groups.items()
        ]
        texts = prompts(11, 1, 40, 150)
        async with fleet(logs, prefills=leads[:1], decodes=leads[1:], router=keys.get("front")) as site:
            for text in texts:
                answer = await site.complete(text)
                assert equal(answer, generated(text, options=GQA)), answer
            mapped = [arenas(pid) for pid in (site.prefill.process.pid, others[0].pid)]
            await site.settled()
        for other in others:
            assert await asyncio.to_thread(other.wait, 30) == 0, "it ends with its leader"
    return mapped


def _follows(keys: dict[str, dict[str, Any]], leader: str, group: str) -> dict[str, Any]:
    """What a leader's other rank is given besides: the place, and with keys its own and the leader's."""
    if not keys:
        return {"group": group}
    public = KeyPair.read(keys[leader]["key"]).public
    return keys[f"{leader}-tp1"] | {"group": f"{public}@{group}"}


def _keys(directory: Path) -> dict[str, dict[str, Any]]:
    allow = directory / "allow"
    allow.write_text("".join(generate(directory / name) + "\n" for name in KEYS))
    return {name: {"key": directory / f"{name}.key", "allow": allow} for name in KEYS}


def main(logs: Path) -> None:
    with linked(([f"{HERE}/24"], [f"{THERE}/24"])) as (_, there):
        mapped = asyncio.run(served(logs, HERE, THERE, there, _keys(logs)))
    print(json.dumps([sorted(each) for each in mapped]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
