"""Which transport a session takes, and that one from outside the package is as good as those inside."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from pdtransfer.errors import ConfigError, TransportError
from pdtransfer.handoff.effects import Outcome
from pdtransfer.limits import TRANSPORTS_MAX
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.probe import Probe, ok
from pdtransfer.serve.commands.doctor import probes
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.transports import registry, select
from pdtransfer.transports.base import Components, WriterCalls
from pdtransfer.transports.mooncake import MooncakeLibrary
from pdtransfer.transports.nixl import NixlLibrary
from pdtransfer.transports.options import ArenaOptions, Network, WriterOptions
from tests.library.transports.fake_transport import FakeArena, FakeWriter
from tests.support.node_pair import SOURCE, TARGET, node_pair
from tests.support.session_ends import identity

HERE = "boot net:[1] mnt:[2] 0"


@pytest.mark.parametrize(
    ("ours", "theirs", "where", "chosen", "reason"),
    [
        (("shm", "mooncake"), ("shm", "mooncake"), HERE, "shm", "on this host"),
        (("shm", "mooncake"), ("shm", "mooncake"), "other net:[1] mnt:[2] 0", "mooncake", "another kernel"),
        (("shm", "mooncake"), ("shm", "mooncake"), "boot net:[9] mnt:[2] 0", "mooncake", "network namespace"),
        (("shm", "mooncake"), ("shm", "mooncake"), "boot net:[1] mnt:[9] 0", "mooncake", "mount namespace"),
        (("shm", "mooncake"), ("shm", "mooncake"), "boot net:[1] mnt:[2] 7", "mooncake", "another user"),
        (("shm", "mooncake"), ("shm", "mooncake"), "", "shm", "on this host"),
        (("shm", "mooncake"), ("shm",), "other net:[1] mnt:[2] 0", "shm", "mooncake is not offered by both"),
        (("shm", "mooncake"), ("mooncake",), HERE, "mooncake", "shm is not offered by both"),
        (("shm",), ("mooncake", "carrier-pigeon"), HERE, None, "takes mooncake, carrier-pigeon, this node shm"),
    ],
)
def test_the_transport_is_chosen_by_where_the_peer_is_and_what_both_take(
    ours: tuple[str, ...], theirs: tuple[str, ...], where: str, chosen: str | None, reason: str
) -> None:
    peer = identity("p", "prefill", 1, transports=theirs, place=where)
    if chosen is None:
        with pytest.raises(TransportError, match=reason):
            select.choose(ours, HERE, peer)
        return
    name, text = select.choose(ours, HERE, peer)
    assert name == chosen
    assert reason in text


def test_a_transport_that_cannot_be_had_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MooncakeLibrary, "why_not", lambda _: "mooncake is not installed")
    assert select.taken("auto") == ("shm",)
    with pytest.raises(TransportError, match="not installed"):
        select.taken("mooncake")
    monkeypatch.setattr(MooncakeLibrary, "why_not", lambda _: "")
    assert select.taken("auto") == ("shm", "mooncake")


def test_auto_leaves_out_what_is_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NixlLibrary, "why_not", lambda _: "")
    monkeypatch.setattr(MooncakeLibrary, "why_not", lambda _: "mooncake is not installed")
    assert select.taken("auto") == ("shm",), "what its ports allow is to be somebody's choice"
    assert "opens no port here" in select.needs_no_guard("auto", loopback=False)
    assert select.taken("nixl") == ("nixl",)
    assert not select.needs_no_guard("nixl", loopback=True)


def test_auto_on_loopback_takes_nothing_that_listens_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MooncakeLibrary, "why_not", lambda _: "")
    assert select.taken("auto", loopback=True) == ("shm",)
    assert select.taken("mooncake", loopback=True) == ("mooncake",), "asked for by name"
    for bind, loopback in (("tcp://127.0.0.1:0", True), ("tcp://[::1]:0", True), ("tcp://0.0.0.0:0", False)):
        assert PrefillConfig(bind=bind, insecure=True).network.loopback is loopback


@pytest.mark.parametrize(
    ("theirs", "where", "reason"),
    [
        (("shm", "mooncake"), HERE, None),
        (("shm", "mooncake"), "boot net:[1] mnt:[2] 7", "p is dialled on loopback and has another user"),
        (("mooncake",), HERE, "p is dialled on loopback and takes mooncake"),
    ],
)
def test_a_prefill_dialled_on_loopback_gets_shared_memory_or_a_reason(
    theirs: tuple[str, ...], where: str, reason: str | None
) -> None:
    peer = identity("p", "prefill", 1, transports=theirs, place=where)
    if reason is None:
        assert select.choose_near(("shm", "mooncake"), HERE, peer)[0] == "shm"
        return
    with pytest.raises(TransportError, match=f"{reason}.* set --transport on both"):
        select.choose_near(("shm", "mooncake"), HERE, peer)


@pytest.mark.parametrize(
    ("endpoint", "loopback"),
    [("tcp://127.0.0.1:1", True), (f"{'k' * 40}@tcp://[::1]:1", True), ("tcp://10.0.0.7:1", False)],
)
def test_an_endpoint_is_on_loopback_by_its_address(endpoint: str, loopback: bool) -> None:
    assert uvloop.run(select.on_loopback(endpoint)) is loopback
    assert uvloop.run(select.on_loopback("tcp://nowhere.invalid:1")) is False


def test_this_hosts_address_is_the_one_on_the_way_to_the_peer() -> None:
    assert select.own_address("tcp://127.0.0.1:7101") == "127.0.0.1"
    with pytest.raises(TransportError, match="advertise"):
        select.own_address("tcp://[::1]:7101")


# One from outside the package


class Carrier:
    """A Transport within this process, of which the package knows nothing."""

    name, any_host, listens_everywhere, by_name_alone = "carrier", True, False, False

    def __init__(self) -> None:
        self.owner = FakeArena(0)
        self.hosts: list[str] = []  # that were offered

    def why_not(self) -> str:
        return ""

    def check(self, network: Network) -> None:
        if network.host == "nowhere":
            raise ConfigError("advertise = 'nowhere': no carrier goes there")

    def arena(self, memory: ArenaMemory, options: ArenaOptions, **_: Any) -> FakeArena:
        self.owner.memory = memory.mapping.array
        offer = self.owner.offer

        async def offered(session: int, host: str = "") -> Any:
            self.hosts.append(host)
            return msgspec.structs.replace(await offer(session, host), transport=self.name)

        async def close() -> None:
            self.owner.memory = np.empty(0, np.uint8)  # nothing here looks at the arena any more

        self.owner.offer, self.owner.close = offered, close
        return self.owner

    def writer(self, components: Components, options: WriterOptions, _: Any, calls: WriterCalls) -> FakeWriter:
        byte_count = max(each.layout.end for each in components)
        pool = np.ctypeslib.as_array((ctypes.c_uint8 * byte_count).from_address(options.pool_address))
        return FakeWriter(self.owner, components, pool, calls.wrote, outcome=Outcome.LANDED)

    def probes(self, ports: Sequence[tuple[int, int]]) -> Sequence[Probe]:
        return (Probe("carrier", lambda _: ok(f"awake, {len(ports)} ranges")),)


@pytest.fixture
def carrier() -> Iterator[Carrier]:
    made = Carrier()
    registry.register(made)
    yield made
    del registry.TRANSPORTS["carrier"]


async def lands(prefill_takes: str, decode_takes: str, network: Network | None = None) -> dict[str, int]:
    """Lands a room of all rows between two nodes; returns how many sessions each of prefill's transports has."""
    options = ArenaOptions(transport=decode_takes, network=network or Network())
    writer = WriterOptions(transport=prefill_takes)
    async with node_pair(arena_bytes=len(TARGET.memory), writer=writer, options=options) as it:
        it.expect(1, 60)
        it.send(1, 60)
        ready, landed = await it.ready(1), replace(TARGET)
        landed.__dict__["memory"] = it.arena.mapping.array[: len(TARGET.memory)].copy()
        for row in TARGET.model.rows():
            assert np.array_equal(landed.read(*row, ready.slots["kv"][:60]), SOURCE.read(*row, np.arange(60)))
        return it.prefill.transport.counts


@pytest.mark.parametrize("decode_takes", ["carrier", "auto"])
def test_a_room_lands_over_a_transport_from_outside_the_package(carrier: Carrier, decode_takes: str) -> None:
    assert uvloop.run(lands("carrier", decode_takes)) == {"carrier": 1}
    assert carrier.hosts == ["127.0.0.1"], "this host's address on the way to the writer"


def test_auto_prefers_the_transports_that_were_registered_first(carrier: Carrier) -> None:
    counts = uvloop.run(lands("auto", "auto"))
    assert (counts["shm"], counts["carrier"]) == (1, 0)


def test_a_registered_transport_has_its_name_accepted_its_options_checked_and_its_probes_tried(
    carrier: Carrier,
) -> None:
    assert PrefillConfig(transport="carrier").transport == "carrier"
    for config in (PrefillConfig, DecodeConfig):
        with pytest.raises(ConfigError, match="no carrier goes there"):
            config(transport="carrier", advertise="nowhere", bind="tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="no carrier goes there"):
        uvloop.run(lands("carrier", "carrier", Network(host="nowhere")))
    with pytest.raises(ConfigError, match="must be auto or one of shm, mooncake, nixl, carrier"):
        PrefillConfig(transport="pigeon")
    (probe,) = (each for each in probes(["23000-23001", "24000-24001"]) if each.name == "carrier")
    assert "2 ranges" in probe.look(None).found  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["shm", "mooncake", "auto"])
def test_a_name_that_is_taken_is_not_registered_again(carrier: Carrier, name: str) -> None:
    carrier.name = name
    with pytest.raises(ConfigError, match=f"transport {name}: this name is taken"):
        registry.register(carrier)


@pytest.mark.parametrize("name", ["", "a!b", "Carrier", "carrier pigeon", "tube\n", "brieftaube-ü", "x" * 33])
def test_a_name_that_the_wire_does_not_carry_is_not_registered(carrier: Carrier, name: str) -> None:
    carrier.name = name
    with pytest.raises(ConfigError, match=re.escape(f"transport {name!r}: the name must be 1 to 32 of a-z, 0-9")):
        registry.register(carrier)
    assert name not in registry.TRANSPORTS


def test_no_more_transports_are_registered_than_a_hello_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TRANSPORTS", {f"t{number}": Carrier() for number in range(TRANSPORTS_MAX)})
    with pytest.raises(ConfigError, match=f"{TRANSPORTS_MAX} are registered, the most is {TRANSPORTS_MAX}"):
        registry.register(Carrier())
