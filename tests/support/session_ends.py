"""One end of a session for tests that play the other: a core, its clock, and what it has just asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np

from pdtransfer.errors import Cause
from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.decode.room_request import RoomRequest
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.prefill.cells import Cell
from pdtransfer.handoff.prefill.sessions import PrefillSessions
from pdtransfer.layout.layout import Component, Layout
from pdtransfer.limits import Limits
from pdtransfer.wire import (
    VERSION,
    Grant,
    Hello,
    Holds,
    Identity,
    Landed,
    Message,
    Part,
    Ping,
    Pong,
    Ranks,
    Reach,
    Register,
    Registered,
    Reject,
    Released,
    Welcome,
    pack_extents,
)
from tests.library.sim.pools import LAYERS, ROW, components

P, P2, P3 = "tcp://p0", "tcp://p1", "tcp://p2"
D, D2 = "node:d0", "node:d1"
SLOTS = 64  # of each component, on either side
ARENA_BYTES = 2 * SLOTS * LAYERS * ROW
LIMITS = Limits(
    window=4, resend_ms=100, resend_ms_max=400, ping_ms=500, silence_ms=2_000, session_silence_ms=5_000,
    fence_poll_ms=50, fence_poll_ms_max=200,
)  # fmt: skip
REACH = Reach("shm", "host", "@arena", b"token", 0, ARENA_BYTES)
C4_ROW = LAYERS * ROW  # the second half of the arena is c4's, a row of all layers after the other
KV, C4 = (Holds("kv", 0, LAYERS, 0, 1),), (Holds("c4", 0, LAYERS, 0, 1),)  # ranks that hold one component each
Kind = TypeVar("Kind")


def identity(node: str, role: Any, incarnation: int = 1, **changes: Any) -> Identity:
    fields = {"ranks": Ranks(), "model": "m", "weights": b"w", "window": 64} | changes
    return Identity(node, role, incarnation, **fields)


def of(effects: list[Any], kind: type[Kind]) -> list[Kind]:
    """The effects of one kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects: list[Any], kind: type[Kind]) -> list[Kind]:
    """The messages of one kind."""
    return [effect.message for effect in effects if isinstance(effect, fx.Send) and isinstance(effect.message, kind)]


def failure(effects: list[Any]) -> tuple[int, Cause]:
    """The one room that fails, and why."""
    (failed,) = of(effects, fx.RoomFailed)
    return failed.room, failed.cause


def kv_bytes(tokens: int) -> int:
    """The bytes that a room of this many tokens moves: a kv row a token and a c4 row for every 4."""
    return (tokens + -(-tokens // 4)) * LAYERS * ROW


class CoreAndClock:
    """A core without I/O, and what time it is there."""

    core: Any
    now: float
    peer = ""  # of whom a message is, unless it is named

    def receive(self, *messages: Message, peer: str = "") -> list[Any]:
        return [effect for message in messages for effect in self.core.receive(peer or self.peer, message, self.now)]

    def tick(self, seconds: float) -> list[Any]:
        """Lets this much time pass, and does what falls due in it when it does."""
        return [effect for _, effect in self.passing(seconds)]

    def passing(self, seconds: float) -> Iterator[tuple[float, Any]]:
        """The same, each effect with its time."""
        end = self.now + seconds
        while (when := self.core.next_tick()) is not None and when <= end:
            self.now = max(self.now, when)
            yield from [(self.now, effect) for effect in self.core.tick(self.now)]
        self.now = end


class DecodeEnd(CoreAndClock):
    """A DecodeSessions whose prefill ranks are played by the test."""

    reach, peer = REACH, P

    def __init__(
        self, limits: Limits = LIMITS, slots: int = SLOTS, arena: tuple[Component, ...] | None = None, **options: Any
    ) -> None:
        self.now = 0.0
        ids = iter(range(0xA0, 0xFFF))
        self.me = identity("d0", "decode", window=limits.window)
        arena = arena or components(slots, 1, page_first=True)
        self.core = DecodeSessions(self.me, arena, limits, lambda: next(ids), **options)
        self.incarnation = 1

    def live(self, seconds: float, *peers: str) -> list[Any]:
        """The same, while these peers answer every Ping and Hello."""
        effects = []
        for _ in range(round(seconds * 10)):
            for effect in self.tick(0.1):
                effects.append(effect)
                if isinstance(effect, fx.Send) and effect.peer in peers:
                    effects += self.answer(effect)
        return effects

    def answer(self, effect: fx.Send) -> list[Any]:
        match effect.message:
            case Ping():
                return self.receive(Pong(self.incarnation), peer=effect.peer)
            case Hello():
                return self.receive(self.welcome(), peer=effect.peer)
            case _:
                return []

    def welcome(self, incarnation: int | None = None, **changes: Any) -> Welcome:
        self.incarnation = self.incarnation if incarnation is None else incarnation
        return Welcome(VERSION, identity("p0", "prefill", self.incarnation, **changes))

    def up(self, peer: str = P, **changes: Any) -> int:
        """A session with this peer, up; its id."""
        return self.registered(peer, **changes).session

    def registered(self, peer: str = P, bytes_ready: int | None = None, **changes: Any) -> Register:
        """The same; its Register. All memory is ready, unless `bytes_ready` says how much."""
        self.core.dial(peer, self.now)
        (offer,) = of(self.receive(self.welcome(**changes), peer=peer), fx.Offer)
        (register,) = sent(self.core.offered(offer.session, self.reach, self.now), Register)
        bytes_ready = self.reach.arena_bytes if bytes_ready is None else bytes_ready
        self.receive(Registered(register.session, bytes_ready), peer=peer)
        assert self.core.prefill_peers.peers[peer].up is not None
        return register

    def expect(self, room: int, tokens: int = 8, *sources: str, **options: Any) -> list[Any]:
        time_left_s = options.pop("deadline", self.now + 60.0) - self.now
        sources = () if "rest_max" in options else sources or (P,)
        request = RoomRequest(room=room, tokens=tokens, sources=sources, time_left_s=time_left_s, **options)
        return self.core.expect(request, self.now)

    def granted(self, room: int, tokens: int = 8, *sources: str, **options: Any) -> Grant:
        """The Grant of a new room of one rank."""
        (grant,) = sent(self.expect(room, tokens, *sources, **options), Grant)
        return grant

    def land(self, grant: Grant, peer: str = P, aux: bytes = b"", checksum: bytes = b"") -> list[Any]:
        rows = sum(part.rows for part in grant.parts)
        return self.receive(Landed(grant.session, grant.grant, rows * LAYERS * ROW, aux, checksum), peer=peer)

    def verified(self, grant: Grant, checksum: int) -> list[Any]:
        return self.core.settled(grant.session, grant.grant, checksum, "", self.now)

    @property
    def free(self) -> list[int]:
        """Free slots of each component."""
        return [free.free_slots for free in self.core.arena.free]


class PrefillEnd(CoreAndClock):
    """A PrefillSessions whose decode ranks are played by the test."""

    peer = D

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.now = 0.0
        self.components = components(SLOTS, 4, page_first=False)
        self.me = identity("p0", "prefill", 9, window=limits.window)
        self.core = PrefillSessions(self.me, self.components, limits)

    def hello(self, incarnation: int = 1, **changes: Any) -> Hello:
        node = changes.pop("node", "d0")
        return Hello(VERSION, VERSION, identity(node, "decode", incarnation, **changes))

    def register(self, session: int = 0xA0, **changes: Any) -> Register:
        fields = {"components": components(SLOTS, 1, page_first=True), "reach": REACH} | changes
        return Register(session, **fields)

    def up(self, session: int = 0xA0, peer: str = D, incarnation: int = 1) -> int:
        """A session of this peer, up."""
        self.receive(self.hello(incarnation), peer=peer)
        assert of(self.receive(self.register(session), peer=peer), fx.Map)
        assert sent(self.core.mapped(session, ARENA_BYTES), Registered)
        return session

    def open(self, room: int = 1, tokens: int = 8, **options: Any) -> list[Any]:
        options = {"deadline": self.now + 60.0} | options
        return self.core.open(room, tokens=tokens, now=self.now, **options)

    def push(self, room: int = 1, tokens: int = 8, **changes: Any) -> list[Any]:
        """Every cell of the room, one a component, or those that `changes` name."""
        effects = []
        for component in self.components:
            fields = {"first_row": 0, "layers": (0, LAYERS), "source_slots": np.arange(component.rows(tokens))}
            if changes.get("component", component.name) == component.name:
                effects += self.core.push(room, Cell(**({"component": component.name} | fields | changes)), 0.0)
        return effects

    def finish(self, room: int = 1, aux: bytes = b"aux") -> list[Any]:
        return self.core.finish(room, aux=aux, now=self.now)

    def wrote(self, write: fx.Write, outcome: fx.Outcome = fx.Outcome.LANDED, checksum: int = 0) -> list[Any]:
        return self.core.wrote(write.session, write.write, outcome, "so it ended", self.now, checksum=checksum)

    def released(self, number: int, session: int = 0xA0) -> list[Any]:
        return self.receive(Released(session, number))


def grant(
    number: int = 1, room: int = 1, tokens: int = 8, *, at: int = 0, session: int = 0xA0, **changes: Any
) -> Grant:
    """A Grant of all rows of a room, in slots from `at` on."""
    parts = tuple(
        Part(index, 0, component.rows(tokens), pack_extents(np.array([[at, component.rows(tokens)]])))
        for index, component in enumerate(components(SLOTS, 1, page_first=True))
    )
    fields = {"prefix": 0, "parts": parts, "send_aux": True, "time_left_ms": 30_000} | changes
    return Grant(session, number, room, tokens, **fields)


def refusal(effects: list[Any]) -> str:
    """The fields of the one Reject among these effects."""
    (reject,) = sent(effects, Reject)
    return "; ".join(reject.fields)


DENSE_SLOTS = 16


def moved(component: Component, memory: str, *, by: int, slots: int = SLOTS) -> Component:
    """The same component at another address, with this many slots."""
    layout = component.layout.rebase(by)
    return msgspec.structs.replace(component, memory=memory, layout=Layout(layout.planes, layout.page_size, slots))


def twins() -> tuple[Component, ...]:
    """A kv in DRAM, c4 of either kind of room, and behind both a smaller kv in HBM."""
    kv, c4 = components(SLOTS, 1, page_first=True)
    return kv, c4, moved(kv, "hbm", by=c4.layout.end, slots=DENSE_SLOTS)


ARENA = max(component.layout.end for component in twins())


class TwinEnd(DecodeEnd):
    """A decode rank that serves both kinds; its arena's Reach has the bytes that both take."""

    reach = msgspec.structs.replace(REACH, arena_bytes=ARENA)

    def __init__(self, limits: Limits = LIMITS, arena: tuple[Component, ...] = twins(), **options: Any) -> None:
        super().__init__(limits, arena=arena, **{"enable_hisparse": True} | options)
