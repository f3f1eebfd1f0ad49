"""Decode's leases: the granted side of each Grant. A lease outlives its room and ends by a proof or a fence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from ...errors import Cause
from ...layout.layout import Component
from ...limits import PART_EXTENTS_MAX, TEXT_LENGTH_MAX, TOKENS_MAX, Limits
from ...wire import Abort, Grant, Part, Released, pack_extents
from ..effects import DecodeEffect, Send
from ..prefix import PrefixCache, piece_rows
from ..slot_allocator import Extents, Holding, cut, slot_count
from ..states import LEASE, Lease, LeaseEvent, SessionState
from ..tables import step
from ..timers import backoff_ms
from .prefill_peers import PrefillPeers
from .records import LeaseEntry, RoomPiece, RoomRecord, SessionRecord
from .staging import StagingBuffer

TIME_LEFT_MS_MAX = 0xFFFF_FFFF  # that a Grant can carry


class Leases:
    """Every lease of one decode node that has not ended."""

    def __init__(
        self,
        peers: PrefillPeers,
        cache: PrefixCache,
        staging: StagingBuffer,
        limits: Limits,
        out: Callable[[DecodeEffect], None],
        *,
        quarantine: Callable[[LeaseEntry, bool], None],
    ) -> None:
        """`quarantine` is called when a lease's quarantine begins (True) and ends."""
        self._peers, self._cache, self._staging, self._limits, self._out = peers, cache, staging, limits, out
        self._quarantine = quarantine
        self.quarantined_bytes = 0
        self._quarantined: dict[Holding, int] = {}  # the number of quarantined leases of each

    def grant(self, room: RoomRecord, session: SessionRecord, piece: RoomPiece, *, verify: bool, now: float) -> None:
        """Leases a piece of the room to one of its sessions; the lease adds its own claim on the slots."""
        assert room.holding is not None
        last = piece.stop == room.tokens
        parts = parts_of(
            session.components,
            session.extents_of(room.holding, piece.staged),
            [piece.first_rows[index] for index in session.component_indices],
            tokens=room.tokens, prefix=piece.prefix, stop=piece.stop,
        )  # fmt: skip
        message = Grant(
            session.id, session.next_grant, room.id, room.tokens, piece.prefix, parts,
            send_aux=last and session.peer == room.sources[0],
            time_left_ms=0, enable_hisparse=room.enable_hisparse, verify=verify and (last or bool(parts)),
            stop=TOKENS_MAX if last else piece.stop,
        )  # fmt: skip
        lease = self._number(session, message, room.holding, room.deadline, piece.staged)
        room.leases.append(lease)
        lease.claim()
        self.repeat(lease, now)

    def withdraw(self, room_id: int, session: SessionRecord, detail: str, now: float) -> None:
        """Informs a writer that a room will never be granted: uses up a number for its Abort, and leases nothing."""
        message = Grant(session.id, session.next_grant, room_id, 0, 0, (), send_aux=False, time_left_ms=0)
        nothing = self._cache.arena.allocate([0] * len(self._cache.arena.components))
        assert nothing is not None
        self.abort(self._number(session, message, nothing, now), detail, now)

    @staticmethod
    def _number(
        session: SessionRecord, message: Grant, holding: Holding, deadline: float, staged: Holding | None = None
    ) -> LeaseEntry:
        lease = LeaseEntry(session, message, holding, deadline, staged)
        session.leases[message.grant] = lease
        session.next_grant += 1
        return lease

    def repeat(self, lease: LeaseEntry, now: float) -> None:
        """Sends what the lease's state requires, and repeats it until it is answered."""
        session, number = lease.session, lease.message.grant
        if lease.state is Lease.GRANTED:
            if lease.confirmed or not session.covers(lease, self._cache.arena.bytes_ready):
                return  # Answered, or sent by `ready` once the slots are backed.
            left_ms = int(min(max(0.0, (lease.deadline - now) * 1e3), TIME_LEFT_MS_MAX))
            self._out(Send(session.peer, msgspec.structs.replace(lease.message, time_left_ms=left_ms)))
        else:
            assert lease.state is not Lease.ENDED
            if session.state is SessionState.FENCING:
                return  # The session's repeated Reject covers it.
            if (now - lease.aborted) * 1e3 >= self._limits.slow_ms:
                self._condemn(lease)
            self._out(Send(session.peer, Abort(session.id, number, lease.message.room, lease.detail)))
        lease.repeat_ms = backoff_ms(lease.repeat_ms, self._limits.resend_ms, self._limits.resend_ms_max)
        self._peers.timers.set(("lease", session.id, number), now + lease.repeat_ms / 1e3)

    def grown(self, now: float) -> None:
        """More of the arena is ready on this node."""
        for session in self._peers.sessions.values():
            if session.state in (SessionState.UP, SessionState.SLOW):
                self.ready(session, now)

    def ready(self, session: SessionRecord, now: float) -> None:
        """More of the arena is ready for this writer: sends the grants that waited for it."""
        for lease in list(session.leases.values()):
            if lease.state is Lease.GRANTED and not lease.repeat_ms:
                self.repeat(lease, now)

    def abort(self, lease: LeaseEntry, detail: str, now: float) -> None:
        """The room does not need the lease, for the reason in `detail`: Abort repeats until a proof. After slow_ms
        without one it is quarantined."""
        if lease.state is Lease.GRANTED:
            lease.detail = detail[:TEXT_LENGTH_MAX]
            lease.state = step(LEASE, lease.state, LeaseEvent.ABORT)
            lease.repeat_ms, lease.aborted = 0, now
            self.repeat(lease, now)

    def proof(self, session: SessionRecord, number: int) -> None:
        """The writer reported an end of the grant: it has stopped writing. Every report is acknowledged."""
        self._out(Send(session.peer, Released(session.id, number)))
        lease = session.leases.get(number)
        if lease is not None:
            self._end(lease, LeaseEvent.PROOF)

    def quarantine(self, session: SessionRecord) -> None:
        """The session was condemned or its peer is silent: its leases wait for a proof or the fence."""
        for lease in session.leases.values():
            self._condemn(lease)

    def quiet(self, session: SessionRecord) -> None:
        """The fence is proven: no lease of this session is written any more."""
        for lease in list(session.leases.values()):
            self._end(lease, LeaseEvent.FENCE)

    def _condemn(self, lease: LeaseEntry) -> None:
        if lease.state is not Lease.QUARANTINED:
            lease.state = step(LEASE, lease.state, LeaseEvent.CONDEMN)
            self._count(lease, 1)
            self._quarantine(lease, True)

    def _end(self, lease: LeaseEntry, event: LeaseEvent) -> None:
        session, number = lease.session, lease.message.grant
        if lease.state is Lease.QUARANTINED:
            self._count(lease, -1)
            self._quarantine(lease, False)
        lease.state = step(LEASE, lease.state, event)
        del session.leases[number]
        self._peers.timers.clear(("lease", session.id, number))
        self._cache.drop(lease.holding)
        self._staging.drop(lease.staged)

    def _count(self, lease: LeaseEntry, sign: int) -> None:
        """Counts the room's whole holding, growth included: none of it can be leased again. A room of several ranks
        counts once in the total, and once for each of its peers."""
        count = self._quarantined.pop(lease.holding, 0) + sign
        if count:
            self._quarantined[lease.holding] = count
        if count == max(sign, 0):  # its first lease came, or its last one went
            self.quarantined_bytes += sign * lease.holding.bytes
        self._peers.peers[lease.session.peer].quarantined_bytes += sign * lease.holding.bytes


def reason_of(cause: Cause, detail: str) -> str:
    """Why a room has ended, as its writers learn it."""
    if cause is Cause.ABORTED:
        return detail  # Abort says the rest
    return f"{cause.value}: {detail}" if detail else cause.value


_GRANT_BYTES = 256  # upper bound of a Grant's frame without its parts


_PART_BYTES = 32  # upper bound of a part without its extents


def parts_of(
    components: Sequence[Component],
    extents: Sequence[Extents],
    first_rows: Sequence[int],
    *,
    tokens: int,
    prefix: int,
    stop: int,
) -> tuple[Part, ...]:
    """One Part for each of a session's components that has rows in this piece of a room, without growth. Rows for which
    the room has no slots are in no Part. `first_rows`: the row of each component's first slot."""
    parts: list[Part] = []
    for index, (component, part_extents, slots_from) in enumerate(zip(components, extents, first_rows, strict=True)):
        first, end = piece_rows(component, tokens=tokens, prefix=prefix, stop=stop)
        first, end = max(first, slots_from), min(end, slots_from + slot_count(part_extents))
        if first < end:
            granted = cut(part_extents, first=first - slots_from, count=end - first)
            parts.append(Part(index, first, end - first, pack_extents(granted)))
    return tuple(parts)


def too_many_extents(sessions: Iterable[SessionRecord], holding: Holding, staged: Holding | None = None) -> str:
    """Why one Grant to each of these sessions cannot name the slots; empty where it can. The protocol bounds the
    extents of a part, the peer the bytes of a frame."""
    for session in sessions:
        counts = [len(extents) for extents in session.extents_of(holding, staged)]
        frame_bytes = _GRANT_BYTES + sum([_PART_BYTES + 8 * count for count in counts])
        if max(counts, default=0) > PART_EXTENTS_MAX or frame_bytes > session.frame_bytes_max:
            return f"extents: {counts} are more than one Grant can hold"
    return ""
