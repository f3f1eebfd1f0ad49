"""Workers that DNS names: what its records become, and a router that follows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdtransfer.bus.keys import AllowList, generate
from pdtransfer.errors import ConfigError, WorldError
from pdtransfer.serve.router.fleet import dns_workers
from pdtransfer.serve.router.fleet.dns_workers import DnsName, DnsResolver, HostPort, dns_server, workers_of
from pdtransfer.serve.router.fleet.fleet_changes import FleetChanges
from pdtransfer.serve.router.fleet.membership import Membership
from pdtransfer.serve.router.fleet.roles import Departure
from pdtransfer.serve.settings.router import RouterConfig
from tests.serve.router.router_site import Site, Worker, site
from tests.support.waiting import until

KEYS = {"prefill-0": "p" * 40, "decode-0": "d" * 40}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("dns://prefill.fleet:7101", DnsName("prefill", "prefill.fleet", 7101)),
        ("srv://_pdtransfer._tcp.prefill.fleet.", DnsName("prefill", "_pdtransfer._tcp.prefill.fleet.")),
    ],
)
def test_a_name_is_parsed_and_written_as_it_was_given(text: str, name: DnsName) -> None:
    assert DnsName.parse("prefill", text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text", ["dns://host", "dns://host:0", "dns://host:65536", "srv://", "srv://a:1", "tcp://host:1", "srv://a b", ""]
)
def test_what_is_no_name_is_refused_with_its_setting(text: str) -> None:
    with pytest.raises(ConfigError, match=r"decode_dns = .*: must be dns://NAME:PORT or srv://NAME"):
        DnsName.parse("decode", text)


@pytest.mark.parametrize(
    ("text", "server"),
    [("10.0.0.2", ("10.0.0.2", 53)), ("10.0.0.2:54", ("10.0.0.2", 54)), ("[fd00::2]:54", ("fd00::2", 54))],
)
def test_a_resolver_is_an_address_with_or_without_a_port(text: str, server: tuple[str, int]) -> None:
    assert dns_server(text) == server


@pytest.mark.parametrize("text", ["resolver", "10.0.0.2:0", "fd00::2", "10.0.0.256", "[::1]:x"])
def test_what_is_no_resolver_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="dns_server = "):
        dns_server(text)


def test_addresses_and_targets_become_endpoints() -> None:
    targets = [("10.0.0.1", 7101), ("fd00::1", 7101), ("a.b", 1)]
    found = workers_of(DnsName("prefill", "x", 7101), targets, allowed=None)
    assert found.workers == dict.fromkeys(["tcp://10.0.0.1:7101", "tcp://[fd00::1]:7101", "tcp://a.b:1"], "prefill")
    servers = workers_of(DnsName("decode", "x"), [("a.b", 1)], allowed=None, scheme="http")
    assert servers.workers == {"http://a.b:1": "decode"}


def test_with_keys_a_target_is_joined_with_the_key_of_its_first_label_and_its_role() -> None:
    allowed = AllowList({key: name for name, key in KEYS.items()}, {KEYS["decode-0"]: frozenset({"decode"})})
    targets = [("prefill-0.prefill.ns", 7101), ("decode-0.prefill.ns", 7101), ("intruder.ns", 7101)]
    found = workers_of(DnsName("prefill", "x"), targets, allowed=allowed)
    assert found.workers == {f"{KEYS['prefill-0']}@tcp://prefill-0.prefill.ns:7101": "prefill"}
    assert found.refused == [
        "tcp://decode-0.prefill.ns:7101: the allow-list has no prefill named 'decode-0'",
        "tcp://intruder.ns:7101: the allow-list has no prefill named 'intruder'",
    ]


def test_hostile_records_are_refused_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_workers, "WORKERS_MAX", 2)
    targets = [("a@tcp://b\n", 1), ("a", 1), ("b", 1)]
    found = workers_of(DnsName("prefill", "x"), targets, allowed=None)
    assert list(found.workers) == ["tcp://a:1"]
    assert found.refused == ["'a@tcp://b\\n' is not a host name", "3 records, at most 2 workers"]


def test_addresses_are_refused_where_workers_have_keys(tmp_path: Path) -> None:
    pytest.importorskip("dns")
    (tmp_path / "allow").write_text(generate(tmp_path / "r") + "\n")
    keyed = RouterConfig(key=tmp_path / "r.key", allow=tmp_path / "allow", decode_dns=("dns://fleet:7201",))
    with pytest.raises(ConfigError, match=r"decode_dns = 'dns://fleet:7201': an address names no worker.*srv://NAME"):
        FleetChanges(keyed, None)  # type: ignore[arg-type]


class Tables:
    """Answers of DNS as a test says them."""

    def __init__(self) -> None:
        self.targets: list[HostPort] | Exception = []
        self.asked = 0

    async def ask(self, name: DnsName) -> tuple[tuple[HostPort, ...], float]:
        self.asked += 1
        if isinstance(self.targets, Exception):
            raise self.targets
        return tuple(self.targets), 0.01


@asynccontextmanager
async def followed(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A router that follows the tables for its decode workers."""
    monkeypatch.setattr(dns_workers, "DnsResolver", lambda _: tables)
    monkeypatch.setattr(dns_workers, "TTL_S_MIN", 0.01)
    async with site() as it:
        prefill, decode = it.backend.roles()
        config = RouterConfig(prefill=(prefill,), decode=(decode,), decode_dns=("srv://_pd._tcp.fleet",))
        changes = FleetChanges(config, it.backend)
        await changes.open()
        try:
            yield it
        finally:
            await changes.close()


def target_of(endpoint: str) -> HostPort:
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    return (host, int(port))


async def test_workers_come_and_go_with_their_records_and_stay_while_no_resolver_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tables, new = Tables(), Worker("d1", "decode")
    endpoint = await new.open()
    async with followed(tables, monkeypatch) as it:
        first = set(it.backend.roles())
        tables.targets = [target_of(endpoint)]
        await until(lambda: endpoint in it.backend.roles())
        for failure in (WorldError("SRV of x: no answer"), RuntimeError("a bug")):
            tables.targets, asked = failure, tables.asked
            await until(lambda asked=asked: tables.asked > asked + 3)
            times = 1 if isinstance(failure, WorldError) else 2  # with its traceback
            assert caplog.text.count(str(failure)) == times
            assert set(it.backend.roles()) == {*first, endpoint}
        tables.targets = []
        await until(lambda: set(it.backend.roles()) == first, "it is let go")
        tables.targets = [target_of(endpoint)]
        await until(lambda: endpoint in it.backend.roles(), "and taken in again")
    await new.close()


async def test_a_room_of_a_worker_that_leaves_dns_runs_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, new = Tables(), Worker("d1", "decode")
    endpoint = await new.open()
    async with followed(tables, monkeypatch) as it:
        it.backend.depart_worker([*it.backend.roles()][1], Departure.DRAINS)
        tables.targets = [target_of(endpoint)]
        await until(lambda: it.backend.routing.workers.by_peer.get(endpoint) is not None)
        await until(lambda: it.backend.routing.workers.by_peer[endpoint].usable)
        new.gate.clear()
        answer = asyncio.create_task(it.post(prompt="abc", max_tokens=4))
        await until(lambda: new.begun)
        tables.targets, asked = [], tables.asked
        await until(lambda: tables.asked > asked + 2)
        assert endpoint in it.backend.roles(), "its room has not ended"
        new.gate.set()
        assert (await answer)[0] == 200
        await until(lambda: endpoint not in it.backend.roles())
    await new.close()


async def test_a_worker_on_another_host_without_a_key_is_refused_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables = Tables()
    tables.targets = [("192.0.2.1", 7201)]
    async with followed(tables, monkeypatch) as it:
        await until(lambda: tables.asked > 4)
        assert len(it.backend.roles()) == 2
    assert caplog.text.count("on another host, so it needs its public key") == 1


def test_a_worker_that_has_been_taken_in_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Here:
        def roles(self) -> dict[str, str]:
            return {}

        def add_worker(self, role: str, address: str) -> None:
            pass

    membership = Membership(RouterConfig(), Here())  # type: ignore[arg-type]
    found = workers_of(DnsName("prefill", "x"), [("127.0.0.1", 1)], allowed=None)
    membership.check_listed("prefill srv://x", found)
    membership.listed("prefill srv://x", found.workers)

    def unresolved(role: str, address: str) -> None:
        raise ConfigError("its name does not resolve")

    monkeypatch.setattr(membership, "check", unresolved)
    membership.check_listed("prefill srv://x", found)
    assert (len(found.workers), found.refused) == (1, [])
    membership.check_listed("another", found)
    assert (found.workers, found.refused) == ({}, ["its name does not resolve"])


async def test_a_resolver_asks_again_within_bounds_and_separates_no_answer_from_no_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("dns")
    from tests.serve.router.dns_server import name_server

    monkeypatch.setattr(dns_workers, "ASK_S", 2.0)
    async with name_server() as server:
        resolver = DnsResolver(server.address)
        service, hosts = DnsName("decode", "_pd._tcp.decode.test"), DnsName("decode", "decode.test", 7201)
        server.records = {
            (service.name, "SRV"): ["0 0 7201 decode-0.decode.test.", "10 5 7202 decode-1.decode.test.", "0 0 0 ."],
            (hosts.name, "A"): ["10.0.0.1", "10.0.0.2"],
            (hosts.name, "AAAA"): ["fd00::1"],
            ("empty.test", "A"): [],
        }
        targets, ttl_s = await resolver.ask(service)
        assert set(targets) == {("decode-0.decode.test", 7201), ("decode-1.decode.test", 7202)}
        assert ttl_s == dns_workers.TTL_S_MIN, "a TTL of a second is asked for less often"
        server.ttl = 86_400
        targets, ttl_s = await resolver.ask(hosts)
        assert set(targets) == {(host, 7201) for host in ("10.0.0.1", "10.0.0.2", "fd00::1")}
        assert ttl_s == dns_workers.TTL_S_MAX
        server.ttl = 17
        assert (await resolver.ask(service))[1] == 17
        assert (await resolver.ask(DnsName("decode", "none.test")))[0] == ()
        assert (await resolver.ask(DnsName("decode", "empty.test", 7201)))[0] == ()
        server.failing = True
        with pytest.raises(WorldError, match=r"SRV of _pd\._tcp\.decode\.test: NoNameservers"):
            await resolver.ask(service)


async def test_a_router_finds_its_workers_by_srv_records_and_proves_their_keys(tmp_path: Path) -> None:
    pytest.importorskip("dns")
    from tests.serve.router.dns_server import name_server

    async with name_server() as server:
        server.records = {("_pd._tcp.fleet.test", "SRV"): ["0 0 7201 decode-0.fleet.test."]}
        allow = tmp_path / "allow"
        line = generate(tmp_path / "decode-0")
        allow.write_text(f"{line}\n{generate(tmp_path / 'r')}\n")
        config = RouterConfig(
            key=tmp_path / "r.key", allow=allow, decode_dns=("srv://_pd._tcp.fleet.test",), dns_server=server.address
        )
        added = list[str]()

        class Keyed:
            def roles(self) -> dict[str, str]:
                return {}

            def add_worker(self, role: str, address: str) -> None:
                added.append(f"{role} {address}")

        changes = FleetChanges(config, Keyed())  # type: ignore[arg-type]
        await changes.open()
        await until(lambda: added)
        await changes.close()
        assert added == [f"decode {line.split()[1]}@tcp://decode-0.fleet.test:7201"]
