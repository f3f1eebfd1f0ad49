"""Roles of the allow-list on a real bus: every pair of a listed role and a role that is met, whoever dials."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from pdtransfer.bus.keys import ROLES, AllowList, KeyPair
from pdtransfer.errors import ConfigError
from pdtransfer.wire import VERSION, Hello, Message, Ping, Pong, Reject, Welcome
from tests.support.bus_peers import ANY_PORT, Listening, Node, hello, pair
from tests.support.internals import dialled_by
from tests.support.waiting import until

PAIRS = [*itertools.product(sorted(ROLES), sorted(ROLES))]  # the role that the list names, and the role that is met


def listed(peer: KeyPair, *roles: str) -> AllowList:
    return AllowList({peer.public: "peer"}, {peer.public: frozenset(roles)} if roles else {})


def hello_as(role: str) -> Hello:
    return msgspec.structs.replace(hello("peer"), identity=msgspec.structs.replace(hello("peer").identity, role=role))


class Answering(Node):
    """Answers each Hello with a Welcome in its role."""

    role = ""

    def receive(self, peer: str, message: Message) -> None:
        super().receive(peer, message)
        if isinstance(message, Hello):
            self.bus.send(peer, Welcome(VERSION, hello_as(self.role).identity))


@pytest.mark.parametrize(("listed_role", "role"), PAIRS)
async def test_a_peer_is_dialled_in_a_listed_role_alone(listed_role: str, role: str) -> None:
    p, d = pair(), pair()
    async with Node("p", p, {"d": d}) as listener, Node("d", d, {"peer": p}) as dialler:
        endpoint = f"{p.public}@{await listener.bus.bind(ANY_PORT)}"
        dialler.bus.allow(listed(p, listed_role))
        if role == listed_role:
            await dialler.ping(await dialler.meet(endpoint, "d", role), 1)
            return
        with pytest.raises(ConfigError, match=f"the allow-list lets peer be {listed_role}, not {role}"):
            dialler.bus.dial(endpoint, role)
        assert not dialled_by(dialler.bus)


@pytest.mark.parametrize(("listed_role", "role"), PAIRS)
async def test_a_dialled_peer_is_cut_off_once_its_role_is_taken_away(listed_role: str, role: str) -> None:
    p, d = pair(), pair()
    async with Node("p", p, {"d": d}) as listener, Node("d", d, {"peer": p}) as dialler:
        peer = await dialler.meet(f"{p.public}@{await listener.bus.bind(ANY_PORT)}", "d", role)
        await dialler.ping(peer, 1)
        revoked = dialler.bus.allow(listed(p, listed_role))
        if role == listed_role:
            assert revoked == []
            await dialler.ping(peer, 2)
            return
        assert revoked == [peer]
        assert not dialler.bus.send(peer, Ping(2))
        with pytest.raises(ConfigError, match=f"not {role}"):
            dialler.bus.dial(peer, role)


@pytest.mark.parametrize(("dialled_role", "role"), PAIRS)
@pytest.mark.parametrize("keyed", [True, False], ids=["keys", "no keys"])
async def test_a_welcome_in_another_role_than_the_dialled_one_is_a_refusal(
    keyed: bool, dialled_role: str, role: str
) -> None:
    p, d = (pair(), pair()) if keyed else (None, None)
    async with Answering("p", p, {"d": d} if d else None) as listener, Node("d", d, {"peer": p} if p else None) as node:
        listener.role = role
        bound = await listener.bus.bind(ANY_PORT)
        peer = await node.meet(f"{p.public}@{bound}" if p else bound, "d", dialled_role)
        await until(lambda: bool(node.received))
        (received,) = node.received
        if role == dialled_role:
            assert isinstance(received[1], Welcome)
            return
        assert received == (
            peer,
            Reject(0, "refused", (f"role: {peer} has {role!r}, it is dialled as {dialled_role!r}",)),
        )


@pytest.mark.parametrize(("listed_role", "role"), PAIRS)
@pytest.mark.given("peer")
async def test_a_peer_that_dials_claims_a_listed_role_alone(it: Listening, listed_role: str, role: str) -> None:
    it.node.bus.allow(listed(it.keys["peer"], listed_role))
    raw = it.raw("peer")
    raw.send(hello_as(role), Ping(1))
    answer = await raw.receive()
    if role == listed_role:
        assert answer == Pong(1)
        return
    text = f"Hello.identity.role: the allow-list lets peer be {listed_role}, not {role}"
    assert answer == Reject(0, "breach", (text,))
    assert not it.node.received


@pytest.mark.parametrize(("listed_role", "role"), PAIRS)
@pytest.mark.given("peer")
async def test_a_peer_that_dialled_is_cut_off_once_its_role_is_taken_away(
    it: Listening, listed_role: str, role: str
) -> None:
    it.node.bus.allow(listed(it.keys["peer"], role))
    raw = it.raw("peer")
    raw.send(hello_as(role), Ping(1))
    assert await raw.receive() == Pong(1)
    revoked = it.node.bus.allow(listed(it.keys["peer"], listed_role))
    if role == listed_role:
        assert revoked == []
        raw.send(Ping(2))
        assert await raw.receive() == Pong(2)
        return
    assert revoked == ["key:peer"]
    await until(lambda: raw.was_cut_off)


async def test_a_key_with_several_roles_or_none_named_is_dialled_in_each_of_these() -> None:
    p, d = pair(), pair()
    async with Node("d", d, {"peer": p}) as dialler:
        for roles in ((), ("decode", "prefill")):
            dialler.bus.allow(listed(p, *roles))
            for number, role in enumerate(roles or sorted(ROLES), 1):
                peer = dialler.bus.dial(f"{p.public}@tcp://127.0.0.1:{number}", role)
                dialler.bus.hang_up(peer)
        with pytest.raises(ConfigError, match="the allow-list lets peer be decode, prefill, not router"):
            dialler.bus.dial(f"{p.public}@tcp://127.0.0.1:9", "router")
        peer = dialler.bus.dial(f"{p.public}@tcp://127.0.0.1:9", "prefill")
        with pytest.raises(ConfigError, match="role: 'decode', it is dialled as 'prefill'"):
            dialler.bus.dial(peer, "decode")
