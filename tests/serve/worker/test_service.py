"""The daemon's side of the router plays service.txt, as tests/library/handoff/player.py has the language.

Routers r0 and r1 speak to it, r0 where none is named. Ids are first:end.
Routers ping in `live`, without what answers that. Behind the effects: routers, bytes of prompts, states of rooms, and
whether the daemon is idle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pdtransfer import wire
from pdtransfer.errors import LocalProtocolError
from pdtransfer.handoff.peers import Send
from pdtransfer.handoff.slot_allocator import extents_of
from pdtransfer.limits import ENDED_ROOMS_MAX, ROUTERS_MAX, TEXT_LENGTH_MAX, TOKENS_BURST_MAX, Limits
from pdtransfer.serve.worker.service import IntroducePeers, RefusedRoom, Service, StartRoom, StopRoom
from pdtransfer.wire import Begin, End, Hello, Load, Ping, Sampling, Tokens, TokensAcked, pack_ids, unpack_ids
from tests.library.handoff.player import SessionPlayer
from tests.support.routing_world import LIMITS, identity
from tests.support.scenarios import plays
from tests.support.session_ends import CoreAndClock, sent

LOAD = Load(True, False, 0, 0, 100, 100)
TOKENS_MAX = TOKENS_BURST_MAX + 1_000  # of a room
ROUTERS = ("node:r0", "node:r1", "node:r2")


class Daemon(CoreAndClock):
    """A Service and its clock."""

    peer = ROUTERS[0]

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.me, self.now = identity("d", "decode"), 0.0
        self.core = Service(self.me, limits)


class ServicePlayer(SessionPlayer):
    end: Daemon
    peer = Daemon.peer
    them = identity("r0", "router")
    known = ()
    takes: ClassVar[dict[str, type]] = {"node": Limits, "end": End, "load": Load}

    def state(self) -> dict[str, str]:
        service = self.end.core
        return {
            "routers": self.text(tuple(filter(service.knows, ROUTERS))),
            "prompts": str(service._prompts_bytes),
            **{f"room {room.id}": room.state.value for room in service._rooms.values()},
            "": "idle" if service.idle(self.end.now) else "busy",
        }

    def stated(self, kind: Any) -> dict[str, Any]:
        begin = {
            "prompt": pack_ids([1, 2, 3]),
            "sampling": Sampling(TOKENS_MAX),
            "peers": ("tcp://p0",),
            "time_left_ms": 1_000,
        }
        return {Begin: begin, Load: msgspec.structs.asdict(LOAD), End: {"tokens": 0}}.get(kind, {})

    def shown(self, effect: Any) -> str:
        match effect:
            case StartRoom(peer, begin):
                return f"StartRoom {super().shown(Send(peer, begin))}"
            case RefusedRoom(begin, end):
                return f"RefusedRoom {super().shown(begin)}, {super().shown(end)}"
            case StopRoom(room, cause):
                return f"StopRoom {room} {self.text(cause)}"
            case IntroducePeers(peers):
                return f"IntroducePeers {self.text(peers)}"
            case _:
                return super().shown(effect)

    def text(self, value: Any, name: str = "") -> str:
        ids = isinstance(value, bytes) and name in ("ids", "prompt")
        return super().text(extents_of(unpack_ids(name, value)) if ids else value, name)

    def do_node(self, **limits: Any) -> None:
        self.end = Daemon(replace(LIMITS, **limits))

    def do_tokens(self, room: int, ids: NDArray[np.int64]) -> list[Any]:
        return self.end.core.tokens(room, ids.tolist(), self.end.now)

    def do_end(self, room: int, reason: str = "length", **fields: Any) -> list[Any]:
        return self.end.core.end(End(room, reason, **{"detail": "", "tokens": 0} | fields), self.end.now)

    def do_load(self, **fields: Any) -> list[Any]:
        return self.end.core.load(msgspec.structs.replace(LOAD, **fields), self.end.now)

    def do_live(self, seconds: float, peers: tuple[str, ...] = ROUTERS[:2]) -> list[Any]:
        effects, until = list[Any](), self.end.now + seconds
        while self.end.now < until:
            for peer in peers:
                self.end.receive(Ping(1), peer=peer)
            effects += self.end.passing(min(until - self.end.now, LIMITS.ping_ms / 1e3))
        return effects


test_scenario = plays({Path(__file__).with_name("service.txt"): ServicePlayer})


def hello(router: str) -> Hello:
    return Hello(1, 1, identity(router, "router"))


@pytest.fixture
def daemon() -> Daemon:
    """With a room of its router r0, whose tokens come with one alternative each."""
    daemon = Daemon()
    sampling = Sampling(9_000, logprobs=True, top_logprobs=1)
    for message in (hello("r0"), Begin(7, pack_ids([1]), sampling, ("tcp://p0",), 1_000)):
        daemon.receive(message)
    return daemon


def test_routers_are_bounded(daemon: Daemon) -> None:
    for place in range(1, ROUTERS_MAX):
        daemon.receive(hello(f"r{place}"), peer=f"node:r{place}")
    (refused,) = daemon.receive(hello("more"), peer="node:more")
    assert refused.message.reason == "full"
    assert sent(daemon.receive(hello("r0")), wire.Welcome)


def test_memory_of_ended_rooms_is_bounded_a_router(daemon: Daemon) -> None:
    daemon.receive(hello("r1"), peer=ROUTERS[1])
    daemon.receive(wire.Cancel(1, "aborted"), peer=ROUTERS[1])
    for room in range(100, 100 + ENDED_ROOMS_MAX + 10):
        daemon.receive(wire.Cancel(room, "aborted"))
    assert len(daemon.core._routers[ROUTERS[0]].ended) == ENDED_ROOMS_MAX
    assert daemon.core.room_count == 1
    (end,) = daemon.receive(wire.Cancel(1, "aborted"), peer=ROUTERS[1])
    assert end.message.room == 1, "one router cannot push out another's"


def test_logprobs_travel_with_their_ids_and_are_as_many_as_the_request_asks_for(daemon: Daemon) -> None:
    total = TOKENS_BURST_MAX + 3
    rows = [wire.Logprobs(-float(index), ((index, -0.5),)).pack() for index in range(total)]
    (first,) = sent(daemon.core.tokens(7, list(range(total)), 0.0, logprobs=b"".join(rows)), Tokens)
    assert first.logprobs == b"".join(rows[:TOKENS_BURST_MAX])
    assert not sent(daemon.receive(TokensAcked(7, 3)), Tokens)
    (again,) = sent(daemon.tick(0.06), Tokens)
    assert (again.first, again.logprobs) == (3, b"".join(rows[3:TOKENS_BURST_MAX]))
    (rest,) = sent(daemon.receive(TokensAcked(7, TOKENS_BURST_MAX)), Tokens)
    assert (rest.first, rest.logprobs) == (TOKENS_BURST_MAX, b"".join(rows[TOKENS_BURST_MAX:]))
    for wrong in (b"", rows[0][:-1], rows[0] * 2):
        with pytest.raises(LocalProtocolError, match="logprobs"):
            daemon.core.tokens(7, [1], 0.0, logprobs=wrong)


def test_a_long_reason_is_cut_to_what_the_wire_takes(daemon: Daemon) -> None:
    (end,) = daemon.core.end(End(7, "engine", "x" * 10_000, 0), 0.0)
    assert wire.decode(wire.encode(end.message)).detail == "x" * TEXT_LENGTH_MAX
