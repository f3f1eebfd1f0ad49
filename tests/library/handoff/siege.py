"""A decode and a prefill that are honest, and beside each a peer that says whatever comes to its mind."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from pdtransfer.errors import RemoteProtocolError
from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.decode.room_request import RoomRequest
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.prefill.cells import Cell
from pdtransfer.handoff.prefill.sessions import PrefillSessions
from pdtransfer.wire import (
    Abort,
    Drained,
    Failed,
    Goodbye,
    Grant,
    Granted,
    Hello,
    Landed,
    Message,
    Part,
    Ping,
    Pong,
    Register,
    Registered,
    Reject,
    Released,
    Welcome,
    decode,
    encode,
    pack_extents,
)  # fmt: skip
from tests.library.sim.pools import LAYERS, ROW, components
from tests.support.session_ends import D2, LIMITS, P2, REACH, D, P, grant, identity


class Siege:
    """A decode and a prefill that are honest, and one of each that say whatever comes to their minds."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"hostile {seed}")
        self.now = 0.0
        self.sanity = self.rng.choice([0.3, 0.8, 0.95])  # how often the hostile ones answer as honest ones would
        slots, limits = 1024, replace(LIMITS, window=64, silence_ms=60_000, session_silence_ms=60_000)
        ids = iter(range(100, 1 << 40, 7))
        arena = components(slots, 1, page_first=True)
        self.decode = DecodeSessions(identity("d0", "decode"), arena, limits, lambda: next(ids))
        pool = components(slots, 4, page_first=False)
        self.prefill = PrefillSessions(identity("p0", "prefill", 9), pool, limits)
        self.from_decode: list[Message] = []  # to the hostile prefill: what it may twist
        self.from_prefill: list[Message] = []
        self.ready: dict[int, fx.RoomReady] = {}
        self.failed: dict[int, str] = {}
        self.unfinished: list[int] = []  # rooms of the honest ones
        self.number = 0  # of the hostile decode's latest grant
        self.delivered: Counter[str] = Counter()  # what got through to a core, by kind
        self.done: Counter[str] = Counter()  # what the hostile ones brought about
        self.arena_bytes = max(c.layout.end for c in arena)
        self.reach = msgspec.structs.replace(REACH, arena_bytes=self.arena_bytes)
        self._performing: list[tuple[str, Any]] = []
        self.on_decode(self.decode.dial(P, 0.0) + self.decode.dial(P2, 0.0))

    def on_decode(self, effects: list[Any]) -> None:
        self.perform([("decode", effect) for effect in effects])

    def on_prefill(self, effects: list[Any]) -> None:
        self.perform([("prefill", effect) for effect in effects])

    def perform(self, new: list[tuple[str, Any]]) -> None:
        idle = not self._performing
        self._performing += new
        while idle and self._performing:
            side, effect = self._performing[0]
            self.perform_one(side, effect)
            self._performing.pop(0)

    def perform_one(self, side: str, effect: Any) -> None:
        match effect:
            case fx.Send(peer, message) if peer in (P2, D2):
                received = self.from_decode if side == "decode" else self.from_prefill
                received.append(decode(encode(message)))
                self.done[f"{type(message).__name__} from {side}"] += 1
            case fx.Send(peer, message):
                message = decode(encode(message))
                if side == "decode":
                    assert peer == P
                    self.on_prefill(self.prefill.receive(D, message, self.now))
                else:
                    assert peer == D
                    self.on_decode(self.decode.receive(P, message, self.now))
            case fx.Offer(_, session):
                self.on_decode(self.decode.offered(session, self.reach, self.now))
            case fx.Fence(session):
                if self.rng.random() < 0.1:
                    self.on_decode(self.decode.fenced(session, self.now))
            case fx.Map(session, reach, _):
                self.on_prefill(self.prefill.mapped(session, reach.arena_bytes))
            case fx.Write():
                self.on_prefill(self.prefill.wrote(effect.session, effect.write, fx.Outcome.LANDED, "", self.now))
            case fx.RoomReady(room):
                self.ready[room] = effect
            case fx.RoomFailed(room, _, detail) if side == "decode":
                self.failed[room] = detail
            case _:
                pass

    def honest_room(self, room: int) -> None:
        tokens = self.rng.randint(1, 12)
        deadline = self.now + 1e6
        request = RoomRequest(room=room, tokens=tokens, sources=[P], time_left_s=1e6)
        self.on_decode(self.decode.expect(request, self.now))
        self.on_prefill(self.prefill.open(room, tokens=tokens, now=self.now, deadline=deadline, peers=[D]))
        for component in components(1024, 4, page_first=False):
            cell = Cell(component.name, 0, (0, LAYERS), np.arange(component.rows(tokens)))
            self.on_prefill(self.prefill.push(room, cell, self.now))
        self.unfinished.append(room)

    def rave(self) -> None:
        """One message of a hostile peer: what an honest one would answer, one that it knows, twisted, or a new one."""
        rng = self.rng
        side, received = rng.choice([("decode", self.from_decode), ("prefill", self.from_prefill)])
        recent, draw, twists = received[-20:], rng.random(), 0.2
        if recent and draw < self.sanity:
            message, twists = self.answer(rng.choice(recent[-4:])), 0.0
        elif recent and draw < (self.sanity + 1.0) / 2:
            message = self.answer(rng.choice(recent)) if rng.random() < 0.5 else rng.choice(recent)
        else:
            message = self.forge()
        changed = {
            name: self.value(name, getattr(message, name))
            for name in message.__struct_fields__
            if rng.random() < twists
        }
        try:
            message = decode(encode(msgspec.structs.replace(message, **changed)))
        except RemoteProtocolError:
            return
        self.delivered[f"{type(message).__name__} to {side}"] += 1
        if side == "decode":
            self.on_decode(self.decode.receive(P2, message, self.now))
        else:
            self.on_prefill(self.prefill.receive(D2, message, self.now))

    def value(self, name: str, before: Any) -> Any:
        """Something else for a field: of the kind that it is, and likely to matter."""
        rng = self.rng
        known: dict[str, list[Any]] = {
            "session": [*self.decode.prefill_peers.sessions, *self.prefill.sessions, 0, 1, rng.getrandbits(64)],
            "room": [*self.decode.rooms, *self.prefill.rooms, 0, rng.getrandbits(64)],
            "incarnation": [1, 2, 9, rng.getrandbits(64)],
            "identity": [identity("x", rng.choice(["prefill", "decode", "router"]), rng.choice([1, 2, 3, 9]))],
            "parts": [tuple(self.part() for _ in range(rng.randint(0, 3)))],
            "reach": [msgspec.structs.replace(REACH, arena_bytes=rng.choice([0, self.arena_bytes, 1 << 40]))],
            "components": [components(rng.choice([64, 1024]), rng.choice([1, 4]), page_first=rng.random() < 0.5)],
            "reason": ["hello_required", "unknown_session", "refused", "breach", "x"],
        }
        if name in known:
            return rng.choice(known[name])
        match before:
            case bool():
                return rng.random() < 0.5
            case int():
                return rng.choice([0, 1, 2, 3, 8, 63, 64, 65, 1024, before + 1, 1 << 24, 1 << 32, (1 << 53) - 1])
            case str():
                return rng.choice(["", "x", "\U0010ffff" * 100])
            case bytes():
                return rng.randbytes(rng.choice([0, 1, 4, 8, 64]))
            case _:
                return before

    def part(self) -> Part:
        rng = self.rng
        extents = [(rng.choice([0, 8, 1000, 1024, 1 << 31]), rng.choice([1, 2, 8])) for _ in range(rng.randint(0, 3))]
        rows = sum(count for _, count in extents) + rng.choice([0, 0, 0, 1])
        packed = pack_extents(np.array(extents, dtype=np.int64).reshape(-1, 2))
        return Part(rng.randint(0, 2), rng.choice([0, 0, 1]), rows, packed)

    def answer(self, to: Message) -> Message:
        """What an honest peer would say, more or less."""
        rng = self.rng
        match to:
            case Hello():
                return Welcome(1, identity("p1", "prefill", rng.choice([1, 1, 1, 2])))
            case Register(session=session, reach=reach):
                return Registered(session, reach.arena_bytes)
            case Grant(session=session, grant=number, parts=parts):
                kv_bytes = sum(part.rows for part in parts) * LAYERS * ROW
                ends = (Landed(session, number, kv_bytes, b""), Drained(session, number), Granted(session, number))
                return rng.choice([*ends, Failed(session, number, "engine", "", quiescent=rng.random() < 0.5)])
            case Abort(session=session, grant=number):
                return Drained(session, number)
            case Ping():
                return Pong(rng.choice([1, 1, 1, 2]))
            case Welcome():
                return Register(rng.getrandbits(32), components(1024, 1, page_first=True), self.reach)
            case Granted(session=session, grant=number) if rng.random() < 0.5:
                return Abort(session, number)
            case Registered(session=session) | Granted(session=session) | Released(session=session):
                self.number = self.number % 60 + 1
                room = rng.choice([*self.prefill.rooms, rng.getrandbits(64)])
                return grant(self.number, room, session=session, at=16 * self.number)
            case Landed() | Drained() | Failed():
                return Released(to.session, to.grant)
            case _:
                return Hello(1, 1, identity("d1", "decode", rng.choice([1, 1, 2])))

    def forge(self) -> Message:
        rng, n = self.rng, self.rng.choice([1, 1, 2, 3, 60, 64, 65])
        session = self.value("session", 0)
        likely: list[Message] = [
            Hello(1, 1, self.value("identity", None)), Welcome(1, self.value("identity", None)),
            Register(rng.getrandbits(8), self.value("components", 0), self.value("reach", 0)),
            Registered(session, self.arena_bytes), grant(n, self.value("room", 0), session=session, at=8 * n % 1000),
            Granted(session, n), Landed(session, n, rng.choice([0, 240]), b""), Released(session, n),
            Failed(session, n, "engine", "", rng.random() < 0.5), Abort(session, n), Drained(session, n),
            Reject(rng.choice([0, session]), self.value("reason", ""), ("x",)), Ping(1), Pong(rng.choice([1, 2, 9])),
            Goodbye(rng.choice([1, 2, 9]), "shutdown"),
        ]  # fmt: skip
        return rng.choice(likely)

    def step(self, number: int) -> None:
        self.now += 0.01
        if number % 10 == 0:
            self.honest_room(1_000 + number)
        if number % 10 == 9:
            self.on_prefill(self.prefill.finish(self.unfinished.pop(), aux=b"aux", now=self.now))
        if number % 12 == 0:
            source = self.rng.choice([[P2], [P2, P]])
            request = RoomRequest(room=number + 1, tokens=4, sources=source, time_left_s=0.5)
            self.on_decode(self.decode.expect(request, self.now))
        self.rave()
        if number % 5 == 0:
            self.on_decode(self.decode.tick(self.now))
            self.on_prefill(self.prefill.tick(self.now))
