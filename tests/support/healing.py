"""What has to be true soon after a fault is over, whatever it was: `healed(site, before)`; and fleets without a model.

Within HEAL_S of healing every room that was begun has ended, once, no slot is held, nothing is in quarantine, every
process has no more descriptors and mappings than before, and the next requests succeed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pdtransfer.serve.process.fleet import Daemon
from tests.support.engines import plain
from tests.support.fleets import LIMITS, TOKENS, Answer, Site, prompts
from tests.support.processes import open_files
from tests.support.waiting import until

HEAL_S = float(os.environ.get("HEAL_S", "20"))  # 3 is the aim, on a machine with nothing else to do
QUICK = replace(LIMITS, silence_ms=1_500 if HEAL_S < 10 else 3_000)  # a process that is only slow is not silent
PLAIN = {"engine": "tests.support.engines.plain:create", "page_size": 1, "limits": QUICK}
SERVED = "does it work after all"


def prefill(chunk_tokens: int = 8, **options: Any) -> dict[str, Any]:
    """What is not as usual of a prefill without a model: `options` are its engine's."""
    return PLAIN | {"chunk_tokens": chunk_tokens, "engine_option": tuple(f"{k}={v}" for k, v in options.items())}


def decode(slots: int = 4_096, **options: Any) -> dict[str, Any]:
    """The same of a decode."""
    return PLAIN | {"slots": slots, "engine_option": tuple(f"{k}={v}" for k, v in options.items())}


def right(prompt: str, answer: Answer, max_tokens: int = TOKENS) -> bool:
    """Whether a whole answer is what this prompt's is."""
    return answer.status == 200 and answer.text == plain.text(prompt, max_tokens)


def text_of(events: Sequence[dict[str, Any]]) -> str:
    """The text of a stream's events."""
    return "".join(event["choices"][0]["text"] for event in events if "choices" in event)


@dataclass(frozen=True)
class Rest:
    """What each process has when nothing runs, by node."""

    files: dict[str, int]
    mappings: dict[str, int]  # of arenas


def mappings(daemon: Daemon) -> int:
    """Arenas that it has mapped."""
    return Path(f"/proc/{daemon.process.pid}/maps").read_text().count("/memfd:")


async def met(site: Site) -> Rest:
    """Has every decode meet every prefill; what each process has then."""
    await meet(site)
    await site.settled()
    return at_rest(site)


async def meet(site: Site) -> None:
    """Asks until every decode has a session with every prefill, and every answer is right.

    A prefill learns of a decode's new life, and lets go of the old one's grants, when they meet again.
    """
    pairs = len(site.fleet.of("prefill"))

    async def up(daemon: Daemon) -> bool:
        return (await site.metrics(daemon)).get("pdtransfer_sessions{up}") == pairs

    seeds = itertools.count()

    async def all_up() -> bool:
        # Of different sizes, or prefills and decodes would take turns in step.
        seed = next(seeds)
        asked = prompts(seed, *np.random.default_rng(seed).integers(1, 40, 6 * pairs).tolist())
        answers = await asyncio.gather(*(site.complete(each) for each in asked))
        assert all(map(right, asked, answers)), answers
        return all([await up(each) for each in site.fleet.of("decode")])

    await until(all_up, "every pair has a session")


def at_rest(site: Site) -> Rest:
    """What each living process has now."""
    living = [daemon for daemon in site.fleet.daemons if daemon.process.returncode is None]
    return Rest(
        {each.ready["node"]: open_files(each.process.pid) for each in living},
        {each.ready["node"]: mappings(each) for each in living},
    )


async def complaints(site: Site, before: Rest) -> list[str]:
    """What is not as it should be when nothing runs."""
    found: list[str] = []
    for daemon in site.fleet.daemons:
        node, m = daemon.ready["node"], await site.metrics(daemon)
        if daemon.role == "router":
            found += [f"{node}: {name}" for name in ("pdtransfer_requests_open", "pdtransfer_rooms") if m[name]]
        else:
            found += [f"{node}: {name} {count:g}" for name, count in (await site.holds(daemon)).items()]
            ended = sum(count for name, count in m.items() if name == "pdtransfer_rooms_ended_total")
            if ended != m["pdtransfer_rooms_begun_total"]:
                found.append(f"{node}: {m['pdtransfer_rooms_begun_total']:g} rooms begun, {ended:g} ended")
        if daemon.role == "decode":
            states = {name: count for name, count in m.items() if name.startswith("pdtransfer_sessions{")}
            found += [
                f"{node}: {name}" for name, count in states.items() if count and name != "pdtransfer_sessions{up}"
            ]
        if (status := (await site.get(daemon, "/health"))[0]) != 200:
            found.append(f"{node}: /health says {status}")
    now = at_rest(site)
    for what, here, there in (("descriptors", now.files, before.files), ("arenas", now.mappings, before.mappings)):
        found += [
            f"{node}: {count} {what}, {there[node]} before" for node, count in here.items() if count > there[node]
        ]
    return found


async def healed(site: Site, before: Rest, seconds: float = HEAL_S) -> None:
    """The fault is over: all is as before within this many seconds, and everybody is served."""
    began = time.monotonic()
    await site.usable(prefill=len(site.fleet.of("prefill")), decode=len(site.fleet.of("decode")))
    asked = [f"{number} {SERVED}" for number in range(8)]
    answers = await asyncio.gather(*(site.complete(each) for each in asked))
    assert all(map(right, asked, answers)), answers
    await meet(site)
    while found := await complaints(site, before):
        assert time.monotonic() - began < seconds, found
        await asyncio.sleep(0.05)
    assert time.monotonic() - began < seconds, "healed too late"
