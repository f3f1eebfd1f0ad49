"""Whole daemons on five hosts, KV between them over Mooncake alone, and what befalls them while requests are under way.

`python -m tests.serve.integration.far FILES` has each daemon in a network namespace of its own, asks on the router's,
and prints for each fault how many requests were answered as by a single process, and how many were told why not.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.fleets import Gates, Site, fleet
from tests.support.healing import Rest, decode, healed, met, prefill
from tests.support.loads import Load, mend, named, streams, strike
from tests.support.networks import DATA_PORTS, Network
from tests.support.processes import children, deliver

PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
MEGABITS = 1_000
HEAL_S = 90.0  # an end that a cut has swallowed leaves half a connection, which keep-alives find within a minute
STEP_MS, ROW_BYTES = 10, 16_384  # 32 KiB a token: a request of 80 tokens takes some 20 ms to cross
_CLONE_NEWNET = 0x40000000

Case = Callable[["Far"], Awaitable[dict[str, int]]]


class Far:
    """The fleet, its network, and what holds its engines back."""

    def __init__(self, site: Site, network: Network, gates: Gates, before: Rest) -> None:
        self.site, self.network, self.gates, self.before = site, network, gates, before

    @asynccontextmanager
    async def granted(self, node: str, seed: int) -> AsyncGenerator[Load]:
        """Requests that have slots on this decode, and whose last rows are computed only afterwards."""
        with self.gates.closed("prefill"):
            load = Load(self.site, seed=seed)
            await self.site.until(named(self.site, node), "pdtransfer_leases")
            yield load

    async def healed(self) -> None:
        await healed(self.site, self.before, HEAL_S)


async def tally(load: Load) -> dict[str, int]:
    """What became of each request: there is one answer to each."""
    answers = await load.answers()
    served = sum(answer.status == 200 for answer in answers)
    return {"served": served, "told": len(answers) - served}


async def decode_killed_while_kv_is_on_its_way(far: Far) -> dict[str, int]:
    async with far.granted("decode-0", 1) as load:
        await strike(far.site, "decode-0", signal.SIGKILL)
    found = await tally(load)
    await mend(far.site, "decode-0", signal.SIGKILL)
    return found


async def decode_killed_while_it_streams(far: Far) -> dict[str, int]:
    with far.gates.closed("decode"):
        begun = await streams(far.site, "decode-1")
        await strike(far.site, "decode-1", signal.SIGKILL)
    whole = [await each.whole() for each in begun]
    await mend(far.site, "decode-1", signal.SIGKILL)
    return {"served": sum(whole), "told": len(whole) - sum(whole)}


async def prefill_killed_while_kv_is_on_its_way(far: Far) -> dict[str, int]:
    async with far.granted("decode-1", 2) as load:
        await far.site.until(named(far.site, "prefill-0"), "pdtransfer_grants")
        await strike(far.site, "prefill-0", signal.SIGKILL)
    found = await tally(load)
    await mend(far.site, "prefill-0", signal.SIGKILL)
    return found


async def hosts_cut_off_from_each_other(far: Far) -> dict[str, int]:
    async with far.granted("decode-0", 3) as load:
        far.network.cut("prefill-0", "decode-0")
        far.network.cut("decode-0", "prefill-0")
    found = await tally(load)
    far.network.heal()
    return found


async def engines_refused_while_nodes_still_talk(far: Far) -> dict[str, int]:
    async with far.granted("decode-1", 4) as load:
        far.network.refuse("prefill-1", "decode-1")
    found = await tally(load)
    far.network.heal()
    return found


async def decodes_engines_frozen(far: Far) -> dict[str, int]:
    async with far.granted("decode-0", 5) as load:
        engines = children(named(far.site, "decode-0").process.pid)
        deliver(engines, signal.SIGSTOP)
    found = await tally(load)
    deliver(engines, signal.SIGCONT)
    return found


CASES: tuple[Case, ...] = (
    decode_killed_while_kv_is_on_its_way,
    decode_killed_while_it_streams,
    prefill_killed_while_kv_is_on_its_way,
    hosts_cut_off_from_each_other,
    engines_refused_while_nodes_still_talk,
    decodes_engines_frozen,
)


def node(network: Network, name: str, **more: Any) -> dict[str, Any]:
    address = network.address(name)
    place = {"bind": f"tcp://{address}:7101", "listen": f"{address}:7102", "insecure": True}
    return more | place | {"transport": "mooncake", "transport_ports": "{}-{}".format(*DATA_PORTS)}


async def outcomes(network: Network, files: Path) -> dict[str, Any]:
    """Of each case, once all is as before after it."""
    gates = Gates(files / "gates")
    gates.directory.mkdir()
    slow = {"step_ms": STEP_MS, "row_bytes": ROW_BYTES, "gates": gates.directory}
    async with fleet(
        files,
        prefills=[node(network, name, **prefill(**slow)) for name in PREFILLS],
        decodes=[node(network, name, **decode(slots=2_048, **slow)) for name in DECODES],
        router={"listen": f"{network.address('router')}:8000", "insecure": True},
        within=network.on,
    ) as site:
        far = Far(site, network, gates, await met(site))
        found: dict[str, Any] = {}
        for case in CASES:
            found[case.__name__] = await case(far)
            await far.healed()
        for name in DECODES:
            metrics = await site.metrics(named(site, name))
            found[name] = {each: metrics[f"pdtransfer_transport_sessions{{{each}}}"] for each in ("mooncake",)}
    return found


def main(files: Path) -> None:
    with Network(("router", *PREFILLS, *DECODES), megabits=MEGABITS) as network:
        # This process asks from the router's host; every other one is started on its own.
        descriptor = os.open(network.on("router")[1].removeprefix("--net="), os.O_RDONLY)
        assert ctypes.CDLL(None).setns(descriptor, _CLONE_NEWNET) == 0
        os.close(descriptor)
        print(json.dumps(asyncio.run(outcomes(network, files))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
