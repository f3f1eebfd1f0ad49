"""A stranger that breaks a rule is answered as life.md says, and one that keeps them gets the proofs that are due."""

from __future__ import annotations

import ast
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from examples.engine import WRONG
from tests.serve.stranger import cast, messages, model, shm
from tests.serve.stranger.decode import Decode
from tests.serve.stranger.peer import Fields, Peer
from tests.serve.stranger.router import Router
from tests.support.engines.plain import text
from tests.support.fleets import decode_config, prefill_config
from tests.support.lone_daemons import lone_daemons
from tests.support.waiting import wait_for

PROMPT = "what is asked here"
Change = Callable[[Fields], Fields]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a real one."""
    config = prefill_config(engine="examples.engine:create", engine_option=())
    with lone_daemons(tmp_path_factory.mktemp("prefill"), config):
        yield config.bind


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a real one."""
    sockets = tmp_path_factory.mktemp("s") / "sockets"
    config = decode_config(sockets, engine="examples.engine:create", engine_option=())
    with lone_daemons(tmp_path_factory.mktemp("decode"), config):
        yield config.bind


def named(peer: str) -> str:
    """A name that no earlier process had."""
    return f"{peer}-{secrets.token_hex(4)}"


def breaks(peer: Peer, message: str, change: Change) -> None:
    """Has a peer send this message otherwise than it would."""
    repeat = peer.repeat

    def changed(key: tuple, link: object, name: str, **fields: object) -> None:
        repeat(key, link, name, **(fields | change(fields) if name == message else fields))

    peer.repeat = changed


def part(**fields: object) -> Change:
    return lambda grant: {"parts": [grant["parts"][0] | fields]}


def rows_of(component: Fields, row_bytes: int) -> Fields:
    planes = [plane | {"row_bytes": row_bytes} for plane in component["layout"]["planes"]]
    return component | {"layout": component["layout"] | {"planes": planes}}


def with_row_bytes(row_bytes: int) -> Change:
    return lambda register: {"components": [rows_of(each, row_bytes) for each in register["components"]]}


def with_transport(name: str) -> Change:
    return lambda register: {"reach": register["reach"] | {"transport": name}}


def extents(*pairs: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<2I", *pair) for pair in pairs)


COUNT = len(PROMPT)


@slow
@pytest.mark.parametrize(
    ("message", "change", "of_session", "reason", "field"),
    [
        ("Grant", part(extents=extents((3, COUNT - 1), (3, 1))), True, "breach", "extents"),
        ("Grant", part(extents=extents((cast.SLOTS - 1, COUNT))), True, "breach", "extents"),
        ("Grant", part(rows=COUNT - 1), True, "breach", "parts[0]"),
        ("Grant", lambda _: {"grant": 0}, False, "breach", "Grant.grant"),
        ("Register", with_row_bytes(32), True, "refused", "row_bytes"),
        ("Register", lambda register: {"reach": register["reach"] | {"token": bytes(32)}}, True, "transfer", ""),
        ("Register", with_transport("carrier"), True, "transfer", "transport: 'carrier', this node takes shm"),
        ("Register", with_transport("no name"), False, "breach", "transport: 'no name', expected str"),
        ("Hello", lambda hello: {"identity": hello["identity"] | {"weights": b"others"}}, False, "refused", "weights"),
    ],
    ids=[
        *("overlap", "beyond the slots", "too few rows", "no such grant", "other rows", "wrong token"),
        *("transport that prefill lacks", "transport without a name", "other weights"),
    ],
)
def test_a_decode_that_breaks_a_rule_is_rejected_and_another_is_served(
    prefill: str, message: str, change: Change, of_session: bool, reason: str, field: str
) -> None:
    with cast.decode("shm", node=named("wrong")) as wrong, cast.decode("shm", node=named("right")) as right:
        wrong.call(lambda: breaks(wrong, message, change))
        with (
            Router(node=named("r"), prefill=prefill, decode=wrong.endpoint) as router,
            Router(node=named("r"), prefill=prefill, decode=right.endpoint) as other,
        ):
            router.begin(PROMPT.encode(), 5)
            rejected = wait_for(
                lambda: [reject for reject in wrong.rejects if reject["reason"] == reason], wrong.rejects
            )
            assert (rejected[0]["session"] != 0) is of_session
            assert any(field in line for line in rejected[0]["fields"]) or not field, rejected
            assert wrong.landed == []
            assert bytes(other.complete(PROMPT.encode(), 5).tokens).decode() == text(PROMPT, 5)
        assert right.rejects == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (part(extents=extents((3, COUNT - 1), (3, 1))), "extents"),
        (part(extents=extents((cast.SLOTS - 1, COUNT))), "extents"),
        (part(rows=COUNT - 1), "extents"),
        (part(component=1), "component"),
        (part(first_row=1), "rows"),
    ],
)
def test_a_stranger_prefill_rejects_what_a_real_one_does(change: Change, field: str) -> None:
    with cast.prefill("shm") as prefill, cast.decode("shm") as decode:
        decode.call(lambda: breaks(decode, "Grant", change))
        with Router(node=named("r"), prefill=prefill.endpoint, decode=decode.endpoint) as router:
            router.begin(PROMPT.encode(), 5, roles=("decode",))
            rejected = wait_for(lambda: decode.rejects)
            assert rejected[0]["reason"] == "breach"
            assert rejected[0]["fields"][0].startswith(f"Grant.parts[0].{field}")
            wait_for(lambda: not prefill.sessions, "the session ends")
            wait_for(lambda: whole(decode), "the fence")


@slow
def test_a_grant_of_other_tokens_than_its_room_fails_with_breach(prefill: str) -> None:
    with cast.decode("shm", node=named("wrong")) as wrong:
        wrong.call(lambda: breaks(wrong, "Grant", lambda grant: {"tokens": COUNT + 1}))
        with Router(node=named("r"), prefill=prefill, decode=wrong.endpoint) as router:
            room = router.complete(PROMPT.encode(), 5)
        assert room.ends["decode"]["reason"] == "breach"
        assert wrong.rejects == []
        wait_for(lambda: len(wrong.free[0]) == cast.SLOTS, "slots given back")


@slow
def test_a_landed_of_other_bytes_than_granted_ends_the_session(decode: str) -> None:
    with cast.prefill("shm", node=named("wrong")) as wrong:
        wrong.call(lambda: breaks(wrong, "Landed", lambda landed: {"kv_bytes": landed["kv_bytes"] - 1}))
        with Router(node=named("r"), prefill=wrong.endpoint, decode=decode) as router:
            room = router.complete(PROMPT.encode(), 5)
        assert room.ends["decode"]["reason"] not in ("length", "stop")
        rejected = wait_for(lambda: [reject for reject in wrong.rejects if reject["reason"] == "breach"])
        assert rejected[0]["session"] != 0


@slow
def test_an_arena_is_handed_over_once_and_to_its_token_alone(decode: str) -> None:
    seen: list[Fields] = []

    class Curious(shm.Target):
        def __init__(self, session: int, reach: Fields) -> None:
            seen.append(reach)
            assert asks(session, reach["address"], bytes(32)) == b""
            super().__init__(session, reach)
            assert asks(session, reach["address"], reach["token"]) == b""

    with cast.prefill("shm", node=named("curious"), target=Curious) as prefill:
        with Router(node=named("r"), prefill=prefill.endpoint, decode=decode) as router:
            assert bytes(router.complete(PROMPT.encode(), 5).tokens).decode() == text(PROMPT, 5)
        assert len(seen) == 1


def asks(session: int, address: str, token: bytes) -> bytes:
    """What decode's socket answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + address[1:] if address.startswith("@") else address)
        connection.sendall(shm.REQUEST.pack(shm.MAGIC, session, token))
        return connection.recv(64)


@slow
@pytest.mark.parametrize(("routing", "first", "reason"), [(b"", "Ping", "hello_first"), (b"chosen", "Hello", "breach")])
def test_a_connection_opens_with_hello_and_has_no_routing_id(
    prefill: str, routing: bytes, first: str, reason: str
) -> None:
    identity = {"node": named("r"), "role": "router", "incarnation": 1, "ranks": {}, "model": "", "weights": b""}
    fields = {
        "Ping": {"incarnation": 1},
        "Hello": {"version_min": 1, "version_max": 1, "identity": identity | {"window": 1}},
    }
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 60_000
        if routing:
            dealer.routing_id = routing
        dealer.connect(prefill)
        dealer.send(messages.write(first, **fields[first]))
        name, answer = messages.read(dealer.recv())
    assert (name, answer["session"], answer["reason"]) == ("Reject", 0, reason)


@slow
def test_slots_of_a_room_that_is_given_up_come_back_by_the_proof_of_a_real_prefill(prefill: str) -> None:
    with (
        cast.decode("shm", node=named("decode")) as decode,
        Router(node=named("r"), prefill=prefill, decode=decode.endpoint) as router,
    ):
        room = router.begin(PROMPT.encode(), 5, roles=("decode",))  # its grant waits at prefill
        wait_for(lambda: decode.granted, "a Granted")
        assert not whole(decode)
        router.cancel(room, "aborted")
        router.wait(room.over, "End")
        assert room.ends["decode"]["reason"] == "aborted"
        wait_for(lambda: whole(decode), "slots given back")
        assert decode.ends == ["Drained"]
        assert bytes(router.complete(PROMPT.encode(), 5).tokens).decode() == text(PROMPT, 5)


@slow
def test_a_room_that_is_given_up_before_its_grant_fails_at_a_real_prefill(prefill: str) -> None:
    with (
        cast.decode("shm", node=named("decode")) as decode,
        Router(node=named("r"), prefill=prefill, decode=decode.endpoint) as router,
    ):
        router.complete(PROMPT.encode(), 5)
        (session,) = decode.sessions.values()
        session.up = False
        room = router.begin(PROMPT.encode(), 5, roles=("decode",))
        wait_for(lambda: room.number in decode.rooms, "Begin")
        router.cancel(room, "aborted")
        router.wait(room.over, "End")
        session.up = True
        decode.call(decode.grant_all)
        late = router.begin(PROMPT.encode(), 5, roles=("prefill",), room=room.number)
        router.wait(late.over, "End")
        assert late.ends["prefill"]["reason"] == "aborted"
        assert decode.granted == [1]


@slow
def test_the_fence_of_an_ended_session_is_proven_once_a_real_prefill_has_unmapped(prefill: str) -> None:
    with (
        cast.decode("shm", node=named("decode")) as decode,
        Router(node=named("r"), prefill=prefill, decode=decode.endpoint) as router,
    ):
        for _ in range(2):
            assert bytes(router.complete(PROMPT.encode(), 5).tokens).decode() == text(PROMPT, 5)
            (session,) = decode.sessions.values()
            assert not decode.arena.fenced(session.number)
            decode.call(lambda session=session: decode.leave(session, "shutdown", "as the test wants it"))
            wait_for(lambda: not decode.sessions, "the fence")
            assert decode.arena.fenced(session.number)


@slow
def test_one_wrong_byte_of_a_stranger_fails_its_room(decode: str) -> None:
    def row(ids: list[int], component: str, plane: Fields, at: int) -> bytes:
        right = model.row(ids, component, plane, at)
        return right[:-1] + bytes([right[-1] ^ 1]) if at == len(ids) // 2 else right

    with (
        cast.prefill("shm", node=named("wrong"), row=row) as wrong,
        Router(node=named("r"), prefill=wrong.endpoint, decode=decode) as router,
    ):
        room = router.complete(PROMPT.encode(), 5)
        assert (room.ends["decode"]["reason"], room.ends["decode"]["detail"]) == ("engine", WRONG)


def whole(decode: Decode) -> bool:
    """Whether no slot is taken."""
    return all(len(slots) == cast.SLOTS for slots in decode.free.values())


PEERS = {"checksum", "decode", "layout", "messages", "model", "mooncake", "peer", "prefill", "router", "shm", "worker"}


def imports(path: Path) -> set[str]:
    """The modules that a file imports, packages of the standard library left out."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found |= (
                {f"{node.module}.{name.name}" for name in node.names}
                if node.module == "tests.serve.stranger"
                else {node.module or ""}
            )
    return {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names}


def test_strangers_know_nothing_of_the_package() -> None:
    parent = Path(__file__).parent
    files = {path.stem for path in parent.glob("*.py") if not path.stem.startswith("test_")}
    assert files == PEERS | {"cast"}
    allowed = {"zmq", "msgpack", "mooncake.engine"} | {f"tests.serve.stranger.{name}" for name in PEERS}
    for name in PEERS:
        assert imports(parent / f"{name}.py") <= allowed, name
    assert "pdtransfer.serve.settings.router" in imports(parent / "test_decode.py")
