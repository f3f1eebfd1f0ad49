"""What a worker's histograms have after a room, and after a peer that was silent."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from pdtransfer.serve.worker.daemon_metrics import DecodeMetrics
from pdtransfer.serve.worker.worker_times import DecodeTimes
from tests.serve.worker.daemon_pair import ROOM, decode, engine_of, prefill


def _counts(times: Any) -> dict[tuple[str, ...], int]:
    """How many values each series of a worker has, without those that have none."""
    made = {
        (name.removeprefix("_"), *sample.labels.values()): int(sample.value)
        for name, histogram in vars(times).items()
        for family in getattr(histogram, "_histogram", histogram).collect()
        for sample in family.samples
        if sample.name.endswith("_count")
    }
    return {key: count for key, count in made.items() if count}


async def test_each_part_of_a_room_is_counted_once_and_the_time_between_its_tokens(directory: Path) -> None:
    async with prefill() as p, decode(directory) as d:
        d.routers.send("a", p.begin("a", ROOM, "d0"))
        async with engine_of(d):
            await p.routers.over("a", ROOM)
            await d.routers.over("a", ROOM)
            await p.drained()
        assert _counts(p.daemon.rank.times) == {
            ("handoff", "d0", "shm"): 1, ("queue",): 1, ("compute",): 1, ("exposed", "d0", "shm"): 1,
        }  # fmt: skip
        counts = _counts(d.rank.times)
        # Prefill's token and the first of decode's own leave in one message.
        assert counts.pop(("token",)) in (2, 3)
        assert counts == {("queue",): 1, ("admission",): 1, ("used",): 1, ("held",): 1}


async def test_a_grant_is_in_quarantine_from_the_silence_of_its_writer_to_the_proof(directory: Path) -> None:
    async with prefill() as p, decode(directory) as d:
        gate = asyncio.Event()
        p.daemon.node.transport.write = lambda *_: gate.set()  # never ends
        d.routers.send("a", p.begin("a", ROOM, "d0"))
        await gate.wait()
        core = d.node.core
        (session,) = core.prefill_peers.sessions.values()
        core.leases.quarantine(session)
        assert core.leases.quarantined_bytes > 0
        assert _counts(d.rank.times) == {("used",): 1}
        quarantined = b'pdtransfer_peer_quarantined_bytes{peer="p0"} %.1f\n' % core.leases.quarantined_bytes
        DecodeMetrics(d.node, registry := CollectorRegistry(), None)
        assert quarantined in generate_latest(registry)
        core.leases.quiet(session)
        assert _counts(d.rank.times)["quarantine", "p0", "shm"] == 1
        p.daemon.node.transport.write = lambda order, done: None


@pytest.mark.parametrize(("free", "bound"), [(100, "0.1"), (5, "0.95"), (0, "+Inf")])
def test_how_full_the_arena_is_does_not_depend_on_its_size(free: int, bound: str) -> None:
    registry = CollectorRegistry()
    DecodeTimes(registry).leased(free=free, total=100)
    text = generate_latest(registry).decode()
    reached = re.findall(r'^pdtransfer_arena_used_ratio_bucket{le="(.*)"} 1.0$', text, re.MULTILINE)
    assert reached[0] == bound
