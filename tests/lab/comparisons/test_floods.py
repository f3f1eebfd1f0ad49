"""What `pdtransfer bench floods` is made of: attacks that reach a listener, clients that are counted, and its table."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from aiohttp import web
from aiohttp.test_utils import TestServer
from pdtransfer_lab.bench.fleets import floods
from pdtransfer_lab.bench.fleets.flood_attacks import CLIENTS, KEYED, KEYLESS, FloodTarget
from pdtransfer_lab.bench.fleets.floods import FloodMeasure, Served
from pdtransfer_lab.commands.comparisons import bench as app

from pdtransfer.bus.keys import generate_pair
from pdtransfer.errors import RemoteProtocolError
from pdtransfer.limits import HTTP_BODY_BYTES_MAX
from pdtransfer.wire import Hello, Ping, decode
from tests.support.waiting import wait_for

SENDS: dict[str, Callable[[set[str]], bool]] = {  # kinds of frames that a listener gets from each
    "junk": lambda kinds: kinds == {"junk"},
    "junk_lines": lambda kinds: kinds == {"junk"},
    "hellos": lambda kinds: kinds == {Hello.__name__},
    "hello_lines": lambda kinds: kinds == {Hello.__name__},
    "other_role": lambda kinds: kinds >= {Hello.__name__, Ping.__name__},
}


class Listener:
    """A ROUTER in the place of a daemon's, which answers nothing."""

    def __init__(self, *, keyed: bool) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        keys = generate_pair() if keyed else None
        if keys is not None:
            self._socket.set(zmq.CURVE_SERVER, 1)
            self._socket.set(zmq.CURVE_SECRETKEY, keys.secret.encode())
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.target = FloodTarget(
            port=port, role="prefill", server_key=keys.public if keys else "", guest=generate_pair() if keys else None
        )

    def kinds(self) -> set[str]:
        """Of the frames that have come."""
        found: set[str] = set()
        while self._socket.poll(0):
            found.add(_kind(self._socket.recv_multipart()[-1]))
        return found

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _kind(frame: bytes) -> str:
    try:
        return type(decode(frame)).__name__
    except RemoteProtocolError:
        return "junk"


@contextmanager
def listening(*, keyed: bool) -> Generator[Listener]:
    listener = Listener(keyed=keyed)
    try:
        yield listener
    finally:
        listener.close()


@pytest.mark.parametrize(
    ("name", "keyed"),
    [(name, keyed) for keyed, names_of in ((False, KEYLESS), (True, KEYED)) for name in names_of if name in SENDS],
)
def test_each_flood_sends_to_a_listener_what_its_name_promises(name: str, keyed: bool) -> None:
    kinds: set[str] = set()
    with listening(keyed=keyed) as listener:
        attack = (KEYED if keyed else KEYLESS)[name](listener.target)

        def has_met() -> bool:
            assert next(attack) >= 0
            kinds.update(listener.kinds())
            return SENDS[name](kinds)

        if keyed and name == "junk":
            assert not any(has_met() for _ in range(20)), "junk has no key"
        else:
            wait_for(has_met, f"only {kinds}")


@pytest.mark.parametrize("name", [name for names_of in CLIENTS.values() for name in names_of])
async def test_a_client_posts_bodies_of_the_largest_size(name: str) -> None:
    bodies = list[bytes]()

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response(status=400)

    application = web.Application(client_max_size=HTTP_BODY_BYTES_MAX)
    application.add_routes([web.post(path, answer) for path in ("/v1/completions", "/generate")])
    async with TestServer(application, host="127.0.0.1") as server:
        attack = next(names_of[name] for names_of in CLIENTS.values() if name in names_of)
        posted = attack(FloodTarget(port=server.port or 0, role="router"))
        assert [await asyncio.to_thread(next, posted) for _ in range(2)] == [1, 2]
    assert [len(body) > 0.9 * HTTP_BODY_BYTES_MAX for body in bodies] == [True, True]
    assert json.loads(bodies[0])


@pytest.mark.parametrize("keyed", [False, True])
def test_connections_are_made_and_left(keyed: bool) -> None:
    with listening(keyed=keyed) as listener:
        attack = KEYLESS["connections"](listener.target)
        assert [next(attack) for _ in range(20)] == list(range(1, 21))
        assert not listener.kinds()


def test_an_attacker_is_a_process_that_counts_until_it_is_asked_to_end() -> None:
    with listening(keyed=False) as listener:
        with floods.attacking("junk", [listener.target]) as done:
            wait_for(lambda: "junk" in listener.kinds())
        assert len(done) == 1
        assert done[0] > 0


async def test_clients_count_what_is_answered_refused_and_lost(tmp_path: Path) -> None:
    answers = itertools.cycle((200, 503, 0))

    async def answer(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["max_tokens"]
        (tmp_path / "router.log").write_text("a line\n")
        match next(answers):
            case 200:
                return web.json_response({})
            case 503:
                return web.json_response({"error": {"message": "no worker"}}, status=503)
            case _:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()

    application = web.Application()
    application.router.add_post("/v1/completions", answer)
    async with TestServer(application) as server:
        served = await floods.served_by(str(server.make_url("")), 1, 0.5, tmp_path)
    assert served.answers.keys() == {"200", "503 no worker", "ServerDisconnectedError"}
    assert served.goodput == served.answers["200"] / 0.5
    assert served.log_bytes == len("a line\n")


def test_the_table_sets_each_flood_beside_the_quiet_before_it() -> None:
    quiet = [Served(2.0, Counter({"200": count}), 0) for count in (100, 200, 100)]
    flooded = [Served(2.0, Counter({"200": count, "503 full": 1}), 6_000) for count in (50, 50, 80)]
    row = floods.row_of("junk, keys", quiet, flooded, 1_234)
    assert row == ["junk, keys", "0.50 (0.25-0.80)", "100", "3 of 183", "1,234", "3.0"]


def test_floods_has_a_command_that_passes_its_flags_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[object] = []

    def measure(given: FloodMeasure, *, attacks: tuple[str, ...], progress: object) -> list[list[str]]:
        seen.extend((given, attacks))
        return [["junk", "1.00", "100", "0 of 9", "5", "0.1"]]

    monkeypatch.setattr(floods, "measure", measure)
    assert app(["floods", "junk", "--seconds=2", "--rounds=1", "--clients=3", "--attackers=2", "--json"]) == 0
    assert seen == [FloodMeasure(seconds=2.0, rounds=1, clients=3, attackers=2), ("junk",)]
    assert json.loads(capsys.readouterr().out)["tables"][0][0] == floods.HEAD
    assert app(["floods", "junk"]) == 0
    assert "0 of 9" in capsys.readouterr().out


@pytest.mark.full
def test_a_fleet_serves_while_it_is_flooded() -> None:
    rows = floods.measure(FloodMeasure(seconds=0.5, rounds=1, clients=2), attacks=("connections",))
    assert [row[0] for row in rows] == ["connections", "connections, keys"]
    assert all(int(row[4].replace(",", "")) > 0 for row in rows), "attacked"
    assert all(float(row[2]) > 0 for row in rows), "and served in quiet"
