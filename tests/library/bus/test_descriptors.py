"""What dialled endpoints cost: those that never answer leave descriptors for the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdtransfer.bus import dialled
from pdtransfer.errors import WorldError
from tests.support.bus_peers import ANY_PORT, LIMITS, Node, hello
from tests.support.internals import dialled_by
from tests.support.processes import no_descriptors
from tests.support.waiting import until


async def test_dead_endpoints_leave_descriptors_for_a_living_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighty of them once took all 256 of a process: three each, four once they answer, five with a session's line."""
    monkeypatch.setattr(dialled.resource, "getrlimit", lambda _: (256, 256))
    async with Node("p") as prefill, Node("d") as decode_node:
        bus, bound = decode_node.bus, await prefill.bus.bind(ANY_PORT)
        for port in range(1, 81):
            while True:
                try:
                    bus.dial(f"tcp://127.0.0.1:{port}", "prefill")
                    break
                except WorldError:
                    await until(lambda: any(each.unreachable for each in dialled_by(bus).values()))
        await decode_node.ping(await decode_node.meet(bound, "d"), 1)
        assert len(dialled_by(bus)) == 38


async def test_an_endpoint_without_descriptors_takes_those_of_one_that_was_never_reached() -> None:
    async with Node("p") as prefill, Node("d", limits=replace(LIMITS, redial_ms=60_000)) as decode_node:
        bus, bound = decode_node.bus, await prefill.bus.bind(ANY_PORT)
        nowhere = bus.dial("tcp://127.0.0.1:1", "prefill")
        await until(lambda: dialled_by(bus)[nowhere].unreachable)
        with no_descriptors():
            peer = bus.dial(bound, "prefill")
            await until(lambda: list(dialled_by(bus)) == [peer])
        bus.send(peer, hello("d"))
        await decode_node.ping(peer, 1)
