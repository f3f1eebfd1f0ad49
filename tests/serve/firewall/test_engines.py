"""Engines behind a firewall: they report their ports, and serve nothing before those are closed to strangers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from pdtransfer.errors import TransportError
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.firewall import Firewall, Guarded
from pdtransfer.transports import select
from pdtransfer.transports.engines.arena import EngineArena
from pdtransfer.transports.engines.library import Library
from pdtransfer.transports.nixl import NixlLibrary
from pdtransfer.transports.options import Network
from tests.support.internals import sessions_of
from tests.support.libraries import (
    on_each_library,
    slow_starts,  # noqa: F401 (a fixture)
)
from tests.support.waiting import until

SESSION = 7


class Rules(Firewall):
    """Rules that are in place when a test lets them."""

    def __init__(self) -> None:
        super().__init__("t")
        self.ports: list[int] = []
        self.stand, self.refusal, self.released = asyncio.Event(), "", asyncio.Event()
        self.open_to_itself, self.stays_open = False, ""

    async def guard(
        self, session: int, ports: Sequence[int], end: Callable[[], None], *, dials_itself: bool = False
    ) -> Guarded:
        assert session == SESSION
        self.open_to_itself = dials_itself
        self.ports = list(ports)
        await self.stand.wait()
        if self.refusal:
            raise TransportError(self.refusal)
        return Guarded("key:p", tuple(ports), end, self.released.set, opened=self._opened)

    async def _opened(self) -> None:
        if self.stays_open:
            raise TransportError(self.stays_open)
        self.open_to_itself = False


@asynccontextmanager
async def arena_behind(rules: Rules, library: Library) -> AsyncIterator[EngineArena]:
    memory = ArenaMemory.create(1 << 20, huge_pages="never")
    owner = EngineArena(library, memory, Network(guard=rules))
    try:
        yield owner
    finally:
        await owner.close()
        memory.close()


@on_each_library
async def test_an_engine_serves_nothing_before_its_ports_are_guarded_and_frees_them_when_it_is_dead(
    library: Library,
) -> None:
    rules = Rules()
    async with arena_behind(rules, library) as owner:
        offer = asyncio.create_task(owner.offer(SESSION))
        await until(lambda: rules.ports)
        engine = sessions_of(owner)[SESSION].process
        assert not engine.serves, "it has registered the arena already"
        rules.stand.set()
        reach = await offer
        named = {int(reach.host.rpartition(":")[2]), *map(int, reach.address.split(","))}
        assert named < set(rules.ports), "those that the peer dials, and those that the engine names itself"
        assert len(rules.ports) == 2 * len(named)
        assert not rules.released.is_set()
        owner.revoke(SESSION)
        await until(lambda: engine.dead)
        assert rules.released.is_set()


@pytest.mark.skipif(bool(NixlLibrary().why_not()), reason=NixlLibrary().why_not())
async def test_nothing_of_nixl_runs_before_its_ports_are_guarded() -> None:
    """UCX writes and reads, for whoever reaches its port, also memory that nobody has registered."""
    rules = Rules()
    async with arena_behind(rules, NixlLibrary()) as owner:
        offer = asyncio.create_task(owner.offer(SESSION))
        await until(lambda: rules.ports)
        tasks = f"/proc/{sessions_of(owner)[SESSION].process.pid}/task"
        assert len(os.listdir(tasks)) == 1, "the interpreter's own: NIXL has some as well"
        for port in rules.ports:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"x")
        assert rules.open_to_itself
        rules.stand.set()
        await offer
        assert len(os.listdir(tasks)) > 1
        assert not rules.open_to_itself


@pytest.mark.parametrize("broken", ["refusal", "stays_open"])
@on_each_library
async def test_an_engine_whose_ports_cannot_be_guarded_or_stay_open_to_its_own_host_is_killed(
    library: Library, broken: str
) -> None:
    rules = Rules()
    setattr(rules, broken, "the firewall's process has ended")
    rules.stand.set()
    async with arena_behind(rules, library) as owner:
        with pytest.raises(TransportError, match="the firewall's process has ended"):
            await owner.offer(SESSION)
        await until(lambda: sessions_of(owner)[SESSION].process.dead)


def test_a_writer_that_dials_another_address_than_the_bus_shows_may_come_from_another_network() -> None:
    endpoint = "tcp://127.0.0.1:7101"
    assert select.elsewhere(endpoint, "127.0.0.1") == ""
    assert "--firewall-admit" in select.elsewhere(endpoint, "127.0.0.9")
    assert "cannot be compared with the route to" in select.elsewhere(endpoint, "no-such-host.invalid")


async def test_ports_of_a_spared_session_stay_open_and_are_reported() -> None:
    firewall = Firewall("t")
    firewall.expect(1, "key:p", spared="another network")
    guarded = await firewall.guard(1, [21_000], lambda: None)
    guarded.release()
    assert firewall.keeper is None, "no rule was set"
    assert firewall.report == {"state": "on", "table": "t", "admits": [], "open_to_all": ["another network"]}
    firewall.forget(1)
    assert "open_to_all" not in firewall.report
