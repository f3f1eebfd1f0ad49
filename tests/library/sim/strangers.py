"""Peers that keep to no rules: what they send is well formed, and now and then wrong. They know everybody's rooms and
sessions, and harm nobody but themselves. When the world heals, they are honest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from pdtransfer.handoff.slot_allocator import extents_of
from pdtransfer.layout.layout import Component
from pdtransfer.wire import (
    VERSION,
    Abort,
    Drained,
    Failed,
    Goodbye,
    Grant,
    Granted,
    Hello,
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

from .copies import Backing, Mapping
from .pools import ROW, components, memory
from .process import Process
from .promises import slots_in
from .rooms import Room

TOKENS = 256  # of its arena
OFTEN = 60.0  # moves a second


class Stranger(Process):
    """It lives as long as the world; `_move` is what it does unasked."""

    role: str

    def start(self) -> None:
        rng = self.world.rng
        self.identity = Identity(
            self.name, self.role, rng.getrandbits(64), Ranks(), "sim", b"w", rng.choice([1, 3, 0xFFFF])
        )
        self.later(0.0, self._go_on)

    def _go_on(self) -> None:
        if self.world.healed:
            self._reform()
        else:
            self._move()
        self.later(0.5 if self.world.healed else self.world.rng.expovariate(OFTEN), self._go_on)

    def _move(self) -> None:
        raise NotImplementedError

    def _reform(self) -> None:
        """From now on it is honest, or away."""
        raise NotImplementedError

    def _count(self, what: str) -> None:
        self.world.seen[f"strangers: {what}"] += 1

    @property
    def settled(self) -> bool:
        return True

    def check_end(self) -> None:
        """Nobody asks how it ends."""


@dataclass(eq=False)
class _Opened:
    """A session of a stranger that grants."""

    id: int
    peer: str
    up: bool = False
    next_grant: int = 1
    grants: dict[int, Grant] = field(default_factory=dict[int, Grant])  # sent, and not ended
    rooms: dict[int, Room] = field(default_factory=dict[int, Room])  # granted once


class StrangerDecode(Stranger):
    """Grants what is not its own."""

    role = "decode"
    core = None

    def start(self) -> None:
        super().start()
        self.components = components(TOKENS, 1, page_first=True, kv_first=False)
        words = memory(self.components)
        self.arena = Backing(words, len(words) * ROW)
        self.writers: defaultdict[int, set[Mapping]] = defaultdict(set)
        self.offered: set[int] = set()
        self._opened: dict[str, _Opened] = {}
        self._unused: dict[str, int] = {}  # sessions that were registered, and then another

    def receive(self, source: str, message: Message) -> None:
        opened = self._opened.get(source)
        match message:
            case Welcome() if opened is None:
                self._register(source)
            case Reject(session=0) | Reject() if opened is None or message.session == opened.id:
                self._opened.pop(source, None)
            case _ if opened is None or getattr(message, "session", 0) != opened.id:
                pass
            case Registered():
                opened.up = True
            case Landed(grant=number) | Failed(grant=number, quiescent=True) | Drained(grant=number):
                opened.grants.pop(number, None)
                if self.world.rng.random() < 0.9:
                    self.send(source, Released(opened.id, number))
            case _:
                pass

    def _register(self, peer: str) -> None:
        if peer in self._opened and self._opened[peer].next_grant == 1:
            self._unused[peer] = self._opened[peer].id
        opened = self._opened[peer] = _Opened(self.world.rng.getrandbits(63) + 1, peer)
        self.offered.add(opened.id)
        reach = Reach("shm", "host", self.name, b"token", 0, self.arena.byte_count)
        self.send(peer, Register(opened.id, self.components, reach))

    def _move(self) -> None:
        rng = self.world.rng
        peer = rng.choice(list(self.world.prefills))
        opened = self._opened.get(peer)
        if opened is None:
            self.send(peer, Hello(VERSION, VERSION, self.identity))
        elif not opened.up or rng.random() < 0.05:
            self._register(peer)  # another session, whether or not the last one was used
        else:
            bad = (
                self._overlap, self._change, self._grant_twice, self._grant_foreign, self._grant_beyond,
                self._leave_as_another, self._release_unended, self._abort_others, self._use_an_earlier,
                self._give_up_leased,
            )  # fmt: skip
            move: Callable[[_Opened], None] = rng.choice([self._grant] * 6 + [self._abort] + [*bad])
            move(opened)

    def _reform(self) -> None:
        for peer in self.world.prefills:
            self.send(peer, Goodbye(self.identity.incarnation, "shutdown"))

    # What it says, right and wrong

    def _grant(self, opened: _Opened) -> None:
        room = self._room(opened, own=True)
        if room is not None and room.id not in opened.rooms:
            self._send_grant(opened, opened.next_grant, room, self._slots(opened, room))

    def _overlap(self, opened: _Opened) -> None:
        room = self._room(opened, own=True)
        taken = [slots_in(grant) for grant in opened.grants.values()]
        slots = self._slots(opened, room)
        if room is None or not taken or slots is None:
            return
        theirs = self.world.rng.choice(taken)
        for index, slot in enumerate(slots):
            if slot and (clash := theirs.get(index)):
                slot[0] = min(clash)
                slot.sort()
        self._count("grants that overlap")
        self._send_grant(opened, opened.next_grant, room, slots)

    def _change(self, opened: _Opened) -> None:
        """The same grant, with other slots."""
        if not opened.grants:
            return
        number, grant = self.world.rng.choice(list(opened.grants.items()))
        slots = self._slots(opened, opened.rooms[grant.room])
        if slots is not None:
            self._count("grants sent again with other slots")
            self._send_grant(opened, number, opened.rooms[grant.room], slots)

    def _grant_twice(self, opened: _Opened) -> None:
        rooms = list(opened.rooms.values())
        if rooms:
            self._count("rooms granted twice")
            room = self.world.rng.choice(rooms)
            self._send_grant(opened, opened.next_grant, room, self._slots(opened, room))

    def _grant_foreign(self, opened: _Opened) -> None:
        room = self._room(opened, own=False)
        if room is not None:
            self._count("grants for rooms of others")
            self._send_grant(opened, opened.next_grant, room, self._slots(opened, room))

    def _grant_beyond(self, opened: _Opened) -> None:
        room = self._room(opened, own=True)
        if room is not None:
            self._count("grants beyond the window")
            number = opened.next_grant + min(self.limits.window, self.identity.window) + self.world.rng.randint(0, 4)
            self._send_grant(opened, number, room, self._slots(opened, room))

    def _abort(self, opened: _Opened) -> None:
        if opened.grants:
            number = self.world.rng.choice(list(opened.grants))
            self.send(opened.peer, Abort(opened.id, number, opened.grants[number].room))

    def _leave_as_another(self, opened: _Opened) -> None:
        self._count("Goodbyes of another life")
        self.send(opened.peer, Goodbye(self.world.rng.getrandbits(64), "shutdown"))

    def _release_unended(self, opened: _Opened) -> None:
        if opened.grants:
            self._count("unended grants released")
            self.send(opened.peer, Released(opened.id, self.world.rng.choice(list(opened.grants))))

    def _use_an_earlier(self, opened: _Opened) -> None:
        """The first message on a session that is not the latest."""
        if (session := self._unused.pop(opened.peer, None)) is not None:
            self._count("earlier sessions used")
            self.send(opened.peer, Abort(session, 1))

    def _abort_others(self, opened: _Opened) -> None:
        self._count("words on sessions of others")
        for session in self.world.prefills[opened.peer].core.sessions.values():
            if session.peer != self.name:
                self.send(opened.peer, Abort(session.id, max(session.grants, default=1)))

    def _give_up_leased(self, opened: _Opened) -> None:
        """A room that is for whoever grants it first, and that another decode has leased."""
        prefill = self.world.prefills[opened.peer]
        sources = [source for source in prefill.rooms.values() if source.peers is None and not source.over]
        rooms = [prefill.core.rooms.get(source.room.id) for source in sources]
        leased = [room.id for room in rooms if room is not None and room.leased]
        if leased:
            self._count("rooms given up that another has leased")
            self.send(opened.peer, Abort(opened.id, opened.next_grant, self.world.rng.choice(leased)))
            opened.next_grant += 1

    def _room(self, opened: _Opened, *, own: bool) -> Room | None:
        """One that this peer has open: of its own, or of an honest decode."""
        sources = [room for room in self.world.prefills[opened.peer].rooms.values() if room.peers is not None]
        rooms = [source.room for source in sources if not source.over and (self.name in source.peers) is own]
        return self.world.rng.choice(rooms) if rooms else None

    def _slots(self, opened: _Opened, room: Room | None) -> list[list[int]] | None:
        """For each component, of those in no grant; None if they do not suffice."""
        if room is None:
            return None
        slots: list[list[int]] = []
        for index, component in enumerate(self.components):
            taken = set[int]().union(*(slots_in(grant).get(index, ()) for grant in opened.grants.values()))
            free, rows = (
                [index for index in range(component.layout.slots) if index not in taken],
                component.rows(room.tokens),
            )
            if rows > len(free):
                return None
            slots.append(sorted(self.world.rng.sample(free, rows)))
        return slots

    def _send_grant(self, opened: _Opened, number: int, room: Room, slots: list[list[int]] | None) -> None:
        if slots is None:
            return
        parts = tuple(
            Part(index, 0, len(slot), pack_extents(extents_of(np.array(slot, np.int64))))
            for index, slot in enumerate(slots)
            if slot
        )
        grant = Grant(opened.id, number, room.id, room.tokens, 0, parts, send_aux=True, time_left_ms=2_000)
        if number == opened.next_grant:
            opened.next_grant += 1
            opened.grants[number], opened.rooms[room.id] = grant, room
        self.send(opened.peer, grant)


class StrangerPrefill(Stranger):
    """Reports what has not happened."""

    role = "prefill"

    def start(self) -> None:
        super().start()
        self._sessions: dict[int, tuple[str, tuple[Component, ...], int]] = {}  # whose, and the bytes of its arena
        self._grants: dict[tuple[int, int], Grant] = {}
        self._mappings: dict[int, Mapping] = {}

    def receive(self, source: str, message: Message) -> None:
        rng, healed = self.world.rng, self.world.healed
        match message:
            case Hello():
                self.send(source, Welcome(VERSION, self.identity))
                if not healed and rng.random() < 0.5:
                    self._count("older words that ask for a Hello")
                    self.send(source, Reject(0, "hello_required", ()))
            case Ping():
                self.send(source, Pong(self.identity.incarnation))
            case Register():
                self._map(source, message)
                self.send(source, Registered(message.session, message.reach.arena_bytes))
            case Reject(session=session) if session in self._sessions:
                del self._sessions[session]
                if healed or rng.random() < 0.2:
                    self._unmap(session)
            case Grant(session=session, grant=number) if session in self._sessions:
                self._grants[session, number] = message
                self.send(source, Granted(session, number))
                self.later(rng.expovariate(50.0), lambda: self._land(session, number))
            case Abort(session=session, grant=number):
                self.send(source, Drained(session, number))
            case Released(session=session, grant=number):
                self._grants.pop((session, number), None)
            case _:
                pass

    def _map(self, source: str, message: Register) -> None:
        self._sessions[message.session] = source, message.components, message.reach.arena_bytes
        node = self.world.decodes[source]
        if message.session in node.offered:
            node.offered.discard(message.session)
            mapping = Mapping(node.name, node.arena, node.core, node.writers[message.session])
            mapping.live.add(mapping)
            self._mappings[message.session] = mapping

    def _unmap(self, session: int) -> None:
        if (mapping := self._mappings.pop(session, None)) is not None:
            mapping.live.discard(mapping)

    def _land(self, session: int, number: int, wrong: int = 0) -> None:
        grant = self._grants.get((session, number))
        if grant is not None and session in self._sessions:
            peer, shares, _ = self._sessions[session]
            count = sum(shares[part.component].bytes_of(part.rows) for part in grant.parts)
            self.send(peer, Landed(session, number, count + wrong, b"aux" if grant.send_aux else b""))

    def _move(self) -> None:
        rng = self.world.rng
        if not self._sessions:
            return
        session = rng.choice(list(self._sessions))
        peer, _, arena_bytes = self._sessions[session]
        match rng.randrange(24):
            case 0:
                self._count("bytes landed that were not granted")
                for _, number in [key for key in self._grants if key[0] == session]:
                    self._land(session, number, wrong=8)
            case 1:
                self._count("numbers landed that were not granted")
                self.send(peer, Landed(session, 60_000, 0, b""))
            case 2 | 3 | 4:
                self._count("words on sessions of others")
                others = self.world.decodes[peer].core.prefill_peers.sessions.values()
                for other in [each for each in others if each.peer != self.name]:
                    self.send(peer, rng.choice([Drained, Granted])(other.id, max(1, other.next_grant - 1)))
            case 5 | 6:
                self._count("Goodbyes of another life")
                self.send(peer, Goodbye(rng.getrandbits(64), "shutdown"))
            case 7:
                self._count("calls for a Hello")
                self.send(peer, Reject(0, "hello_required", ()))
            case 8:
                self._count("arenas registered as larger than they are")
                self.send(peer, Registered(session, 2 * arena_bytes))
            case 9 | 10:
                self._count("new lives")
                self.identity = replace(self.identity, incarnation=rng.getrandbits(64))
                self._sessions, self._grants = {}, {}  # what it has mapped stays mapped
            case _:
                pass

    def _reform(self) -> None:
        for session in [mapping for mapping in self._mappings if mapping not in self._sessions]:
            self._unmap(session)
