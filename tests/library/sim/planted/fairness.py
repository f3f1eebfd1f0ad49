"""Defences of who comes first, and of when, taken away."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pdtransfer.handoff import liveness
from pdtransfer.handoff.admission import Admission, Demand
from pdtransfer.handoff.decode import leases, prefill_peers
from pdtransfer.handoff.decode.prefill_peers import PrefillPeers
from pdtransfer.handoff.decode.records import SessionRecord
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.decode.waiting_rooms import WindowSlots
from pdtransfer.handoff.peers import Peers
from pdtransfer.handoff.prefill import grant_ends
from pdtransfer.handoff.prefill.records import WriterGrant, WriterSession
from pdtransfer.handoff.slot_allocator import Holding
from pdtransfer.handoff.timers import Timers
from pdtransfer.wire import Grant

from . import Patch


def last_come_first_served(patch: Patch) -> None:
    """Who comes last is at the head of the queue."""
    enqueue = Admission.enqueue

    def to_the_front(self: Admission, room: int, demand: Demand) -> None:
        enqueue(self, room, demand)
        self._queue.move_to_end(room, last=False)

    patch(Admission, "enqueue", to_the_front)


def head_passed_over(patch: Patch) -> None:
    """The first room that fits is leased its slots, whoever is before it."""
    head = Admission.head

    def first_that_fits(self: Admission) -> int | None:
        for room, demand in self._queue.items():
            if not any(self._arena.lacking(demand.rows)):
                self._queue.move_to_end(room, last=False)
                return room
        return head(self)

    patch(Admission, "head", first_that_fits)


def newest_room_first_in_a_window(patch: Patch) -> None:
    """A free place in a window goes to the room that came last."""
    assign = WindowSlots.assign

    def newest(self: WindowSlots, session: SessionRecord) -> list[Any]:
        for room_id, room in reversed(self.rooms.pop_line(session.peer).items()):
            self.rooms.put(session.peer, room_id, room)
        return assign(self, session)

    patch(WindowSlots, "assign", newest)


def bytes_in_flight_without_a_bound(patch: Patch) -> None:
    """A room is leased its slots however many bytes are in flight already."""
    admit = Admission.admit

    def boundless(self: Admission, now: float, held: Holding | None = None) -> Holding | None:
        before, self.inflight_bytes = self.inflight_bytes, 0
        holding = admit(self, now, held)
        self.inflight_bytes += before
        return holding

    patch(Admission, "admit", boundless)


def nobody_admitted_after_a_fence(patch: Patch) -> None:
    """Slots that a fence frees wait for another call."""

    def fenced(self: DecodeSessions, session_id: int, now: float) -> list[Any]:
        self.prefill_peers.fenced(session_id, now)
        out, self._out[:] = [*self._out], []
        return out

    patch(DecodeSessions, "fenced", fenced)


def timers_lost_in_compaction(patch: Patch) -> None:
    """The heap drops live entries with the stale ones."""
    set_timer = Timers.set

    def forget(self: Timers[Any], key: Any, when: float) -> None:
        if len(self._heap) > 64 + 4 * len(self._live):
            self._heap.clear()
        set_timer(self, key, when)

    patch(Timers, "set", forget)


def timers_not_moved(patch: Patch) -> None:
    """What has a time keeps it."""
    set_ = Timers.set

    def once(self: Timers[Any], key: Any, when: float) -> None:
        if key not in self:
            set_(self, key, when)

    patch(Timers, "set", once)


def backoff_without_a_cap(patch: Patch) -> None:
    """Each pause is twice the one before."""
    for module in (liveness, leases, prefill_peers, grant_ends):
        patch(module, "backoff_ms", lambda last_ms, first_ms, max_ms: max(2 * last_ms, first_ms))


def backoff_that_does_not_grow(patch: Patch) -> None:
    """All pauses are as short as the first."""
    for module in (liveness, leases, prefill_peers, grant_ends):
        patch(module, "backoff_ms", lambda last_ms, first_ms, max_ms: first_ms)


def deadlines_doubled(patch: Patch) -> None:
    """A Grant waits for its room twice as long as it says."""
    admit = WriterSession.admit

    def longer(self: WriterSession, message: Grant, now: float) -> WriterGrant:
        grant = admit(self, replace(message, time_left_ms=2 * message.time_left_ms), now)
        grant.message = message
        return grant

    patch(WriterSession, "admit", longer)


def flood_of_hellos(patch: Patch) -> None:
    """Whoever asks for a Hello gets one at once."""
    patch(Peers, "greet", lambda self, peer, now: self.hello(peer, now))


def silent_peer_stays_silent(patch: Patch) -> None:
    """A silent peer's session is not granted on when the peer is back: its rooms wait for their deadlines."""

    def mark_seen(self: PrefillPeers, session: SessionRecord, now: float) -> None:
        peer = self.peers[session.peer]
        if peer.session is session:
            peer.liveness.last_seen = now

    patch(PrefillPeers, "mark_seen", mark_seen)


def window_free_again_untold(patch: Patch) -> None:
    """That an end has freed a place in its peer's window is not passed on to the rooms that wait for one."""
    on_grant_message, connect = DecodeSessions._on_grant_message, DecodeSessions._connect

    def untold(self: DecodeSessions, *args: Any) -> None:
        busy.append(self)
        on_grant_message(self, *args)
        busy.clear()

    busy: list[DecodeSessions] = []
    patch(DecodeSessions, "_on_grant_message", untold)
    patch(DecodeSessions, "_connect", lambda self, name: None if busy else connect(self, name))
