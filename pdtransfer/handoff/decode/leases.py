"""Decode's leases: what each says until it is answered, and the proof that ends it. They outlive their rooms."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ...limits import Limits
from ...wire import Abort, Grant, Released
from ..effects import DecodeEffect, Send
from ..lease import LEASE, Lease, LeaseEvent
from ..prefix import PrefixCache
from ..slot_allocator import Holding
from ..states import step
from .parts import parts_of
from .prefill_peers import Links
from .records import LeaseEntry, Room, Session, SessionState

TIME_LEFT_MS_MAX = 0xFFFF_FFFF  # that a Grant can say


class Leases:
    """Every unended lease of one decode node."""

    def __init__(self, links: Links, cache: PrefixCache, limits: Limits, out: Callable[[DecodeEffect], None]) -> None:
        self._links, self._cache, self._limits, self._out = links, cache, limits, out
        self.quarantined_bytes = 0
        self._quarantined: dict[Holding, int] = {}  # how many leases of each are in quarantine

    def grant(self, room: Room, session: Session, *, send_aux: bool, verify: bool, now: float) -> None:
        """Leases the room's slots, once more, to one of its sessions; the lease's own claim on them begins."""
        assert room.holding is not None
        extents = session.extents_of(room.holding)
        parts = parts_of(session.components, extents, tokens=room.tokens, prefix=room.prefix)
        message = Grant(
            session.id, session.next_grant, room.id, room.tokens, room.prefix, parts, send_aux,
            time_left_ms=0, enable_hisparse=room.enable_hisparse, verify=verify,
        )  # fmt: skip
        lease = LeaseEntry(session, message, room.holding, room.deadline)
        room.leases.append(lease)
        session.leases[lease.message.grant] = lease
        session.next_grant += 1
        lease.holding.claims += 1
        self.repeat(lease, now)

    def repeat(self, lease: LeaseEntry, now: float) -> None:
        """Says what the lease's state has to say, and again until that is answered."""
        session, number = lease.session, lease.message.grant
        if lease.state is Lease.GRANTED:
            if lease.granted or not session.covers(lease.holding, self._cache.arena.bytes_ready):
                return  # Answered, or `ready` will say it.
            left_ms = int(min(max(0.0, (lease.deadline - now) * 1e3), TIME_LEFT_MS_MAX))
            self._out(Send(session.peer, msgspec.structs.replace(lease.message, time_left_ms=left_ms)))
        else:
            assert lease.state is not Lease.ENDED
            if session.state is SessionState.FENCING:
                return  # Its Reject repeats, and says as much.
            if (now - lease.aborted) * 1e3 >= self._limits.silence_ms:
                self._condemn(lease)
            self._out(Send(session.peer, Abort(session.id, number)))
        lease.repeat_ms = self._links.repeat_ms(lease.repeat_ms)
        self._links.timers.set(("lease", session.id, number), now + lease.repeat_ms / 1e3)

    def grown(self, now: float) -> None:
        """This node has more of the arena ready."""
        for session in self._links.sessions.values():
            if session.state is SessionState.UP:
                self.ready(session, now)

    def ready(self, session: Session, now: float) -> None:
        """More of the arena is ready for this writer: grants whose slots were not are said now."""
        for lease in list(session.leases.values()):
            if lease.state is Lease.GRANTED and not lease.repeat_ms:
                self.repeat(lease, now)

    def abort(self, lease: LeaseEntry, now: float) -> None:
        """The room needs it no more: Abort repeats until a proof. After silence_ms without one it is quarantined."""
        if lease.state is Lease.GRANTED:
            lease.state = step(LEASE, lease.state, LeaseEvent.ABORT)
            lease.repeat_ms, lease.aborted = 0, now
            self.repeat(lease, now)

    def proof(self, session: Session, number: int) -> None:
        """An end of the grant has arrived: writing has ended. Answered whether or not it is news."""
        self._out(Send(session.peer, Released(session.id, number)))
        lease = session.leases.get(number)
        if lease is not None:
            self._end(lease, LeaseEvent.PROOF)

    def quarantine(self, session: Session) -> None:
        """The session was condemned or fell silent: its leases wait for a proof or the fence."""
        for lease in session.leases.values():
            self._condemn(lease)

    def quiet(self, session: Session) -> None:
        """The fence holds: no lease of this session is written any more."""
        for lease in list(session.leases.values()):
            self._end(lease, LeaseEvent.FENCE)

    def _condemn(self, lease: LeaseEntry) -> None:
        if lease.state is not Lease.QUARANTINED:
            lease.state = step(LEASE, lease.state, LeaseEvent.CONDEMN)
            self._count(lease, 1)

    def _end(self, lease: LeaseEntry, event: LeaseEvent) -> None:
        session, number = lease.session, lease.message.grant
        if lease.state is Lease.QUARANTINED:
            self._count(lease, -1)
        lease.state = step(LEASE, lease.state, event)
        del session.leases[number]
        self._links.timers.clear(("lease", session.id, number))
        self._cache.drop(lease.holding)

    def _count(self, lease: LeaseEntry, sign: int) -> None:
        """Counted by what the room holds, growth included: so much cannot be leased again. In all, a room of several
        ranks counts once; of each of these peers it counts whole."""
        count = self._quarantined.pop(lease.holding, 0) + sign
        if count:
            self._quarantined[lease.holding] = count
        if count == max(sign, 0):  # the first of it came, or the last one went
            self.quarantined_bytes += sign * lease.holding.bytes
        self._links.peers[lease.session.peer].quarantined_bytes += sign * lease.holding.bytes
