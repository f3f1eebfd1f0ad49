"""Defences of prefill's sessions, rooms and grants, taken away."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pdtransfer.errors import Cause
from pdtransfer.handoff import effects as fx
from pdtransfer.handoff.decode.records import LeaseEntry
from pdtransfer.handoff.decode.sessions import DecodeSessions
from pdtransfer.handoff.prefill.decode_peers import DecodePeers
from pdtransfer.handoff.prefill.grant_ends import GrantEnds
from pdtransfer.handoff.prefill.records import WriterGrant, WriterSession
from pdtransfer.handoff.prefill.sessions import PrefillSessions
from pdtransfer.handoff.states import PrefillRoom, WriterGrantEvent, WriterGrantState, WriterState
from pdtransfer.wire import Drained, Landed

from . import Patch


def drained_sent_early(patch: Patch) -> None:
    """The writer says that it has stopped while a write is in flight."""

    def stop(self: WriterGrant, event: WriterGrantEvent) -> None:
        self.step(event)

    patch(WriterGrant, "stop", stop)


def ended_grants_forgotten(patch: Patch) -> None:
    """A number whose end was acknowledged is as good as new."""
    patch(WriterSession, "known_end", lambda self, number: False)


def pages_reused_when_the_room_fails(patch: Patch) -> None:
    """Prefill gives its pages back when the room has ended, whatever still reads them."""

    def drain(self: PrefillSessions, room: Any) -> None:
        if room.id in self.rooms and room.state.value in ("failed", "landed"):
            del self.rooms[room.id]
            self._out.append(fx.RoomDrained(room.id))

    patch(PrefillSessions, "_drain_if_quiet", drain)


def ends_sent_once(patch: Patch) -> None:
    """Landed, Failed and Drained are not repeated."""
    send_end = GrantEnds.send_end

    def once(self: GrantEnds, grant: WriterGrant, now: float) -> None:
        send_end(self, grant, now)
        self._timers.clear(("end", grant.session.id, grant.number))

    patch(GrantEnds, "send_end", once)


def abort_of_an_unknown_grant_forgotten(patch: Patch) -> None:
    """An Abort that comes before its Grant is answered, and nothing is kept of it."""

    def refuse(self: GrantEnds, session: WriterSession, number: int, now: float) -> None:
        self._out(fx.Send(session.peer, Drained(session.id, number)))

    patch(GrantEnds, "refuse", refuse)


def window_unheeded_by_prefill(patch: Patch) -> None:
    """Prefill takes a Grant of any number."""
    patch(WriterSession, "outside", lambda self, number: False)


def mapping_dropped_under_a_write(patch: Patch) -> None:
    """A closed session's mapping goes at once, and with it the lock that says that somebody can write."""

    def settle(self: DecodePeers, session: WriterSession) -> None:
        if session.state is WriterState.CLOSING:
            self._end(session)

    patch(DecodePeers, "settle", settle)


def unknown_taken_for_failed(patch: Patch) -> None:
    """A write that nobody knows the end of counts as ended."""
    wrote = PrefillSessions.wrote

    def sure(self: PrefillSessions, session: int, write: int, outcome: fx.Outcome, *args: Any, checksum: int) -> Any:
        known = fx.Outcome.FAILED if outcome is fx.Outcome.UNKNOWN else outcome
        return wrote(self, session, write, known, *args, checksum=checksum)

    patch(PrefillSessions, "wrote", sure)


def unknown_end_without_a_fence(patch: Patch) -> None:
    """The writer of a write that nobody can tell the end of is left alone."""
    wrote = PrefillSessions.wrote

    def unfenced(self: PrefillSessions, *args: Any, **how: Any) -> list[fx.PrefillEffect]:
        return [effect for effect in wrote(self, *args, **how) if not isinstance(effect, fx.FenceWriter)]

    patch(PrefillSessions, "wrote", unfenced)


def landed_short(patch: Patch) -> None:
    """Prefill lands a room although a cell is missing."""
    complete = PrefillSessions._complete

    def short(self: PrefillSessions, grant: WriterGrant, room: Any, now: float) -> None:
        if room.state is PrefillRoom.FINISHED and not grant.in_flight:
            grant.written_bytes = grant.kv_bytes
        complete(self, grant, room, now)

    patch(PrefillSessions, "_complete", short)


def landed_bytes_unchecked(patch: Patch) -> None:
    """Prefill lands short and reports that, and decode does not look."""
    landed = DecodeSessions._landed

    def blind(self: DecodeSessions, lease: LeaseEntry, message: Landed, *args: Any) -> str:
        return landed(self, lease, replace(message, kv_bytes=lease.kv_bytes), *args)

    def land(self: PrefillSessions, grant: WriterGrant, room: Any, now: float) -> None:
        if grant.state is WriterGrantState.ACTIVE and not grant.in_flight and room.state is PrefillRoom.FINISHED:
            self._grant_ends.end(grant, WriterGrantEvent.COMPLETE, now, aux=room.aux)

    patch(DecodeSessions, "_landed", blind)
    patch(PrefillSessions, "_complete", land)


def landed_before_it_is_written(patch: Patch) -> None:
    """Landed leaves when every cell was offered, not when all are written."""
    complete = PrefillSessions._complete

    def early(self: PrefillSessions, grant: WriterGrant, room: Any, now: float) -> None:
        flying, grant.in_flight = grant.in_flight, 0
        if room.state is PrefillRoom.FINISHED:
            grant.written_bytes = grant.kv_bytes
        complete(self, grant, room, now)
        grant.in_flight = flying

    patch(PrefillSessions, "_complete", early)


def waiting_grants_wait_forever(patch: Patch) -> None:
    """A Grant whose room is not opened has no deadline at prefill."""
    place = PrefillSessions._find_room

    def patient(self: PrefillSessions, grant: WriterGrant, room_id: int, now: float) -> None:
        place(self, grant, room_id, now)
        self._timers.clear(("grant", grant.session.id, grant.number))

    patch(PrefillSessions, "_find_room", patient)


def silent_decode_kept(patch: Patch) -> None:
    """Prefill keeps the sessions of a decode node that is silent, forever."""
    patch(DecodePeers, "_depart", lambda self, peer, cause, detail, now: None)


def ended_labels_forgotten(patch: Patch) -> None:
    """A Grant for a room that has ended at prefill waits for it to be opened."""
    place = PrefillSessions._find_room

    def forgetful(self: PrefillSessions, grant: WriterGrant, room_id: int, now: float) -> None:
        self._ended.clear()
        place(self, grant, room_id, now)

    patch(PrefillSessions, "_find_room", forgetful)


def given_up_before_open_forgotten(patch: Patch) -> None:
    """A room that decode gives up before it is open waits for another Grant."""
    withdraw = PrefillSessions._withdraw

    def forgetful(self: PrefillSessions, room_id: int, peer: str, detail: str, now: float) -> None:
        if room_id in self.rooms:
            withdraw(self, room_id, peer, detail, now)

    patch(PrefillSessions, "_withdraw", forgetful)


def grant_that_waited_in_vain_forgotten(patch: Patch) -> None:
    """A room that is opened after its Grant has failed waits for another one."""
    fail = PrefillSessions._fail_grant

    def forgetful(self: PrefillSessions, grant: WriterGrant, *args: Any) -> None:
        known = grant.room in self._withdrawn
        fail(self, grant, *args)
        if not known and grant.room is not None:
            self._withdrawn.pop(grant.room, None)

    patch(PrefillSessions, "_fail_grant", forgetful)


def given_up_before_open_untold(patch: Patch) -> None:
    """Grants wait for a room that prefill's engine gave up before it was opened."""
    abort = PrefillSessions.abort

    def deaf(self: PrefillSessions, room_id: int, *args: Any) -> Any:
        return abort(self, room_id, *args) if room_id in self.rooms else []

    patch(PrefillSessions, "abort", deaf)


def replaced_by_register(patch: Patch) -> None:
    """A Register ends the session before it, though a dead process may have sent it."""
    register = DecodePeers._open

    def hasty(self: DecodePeers, peer: Any, message: Any, now: float) -> None:
        for other in self._open_of(peer.name):
            self.close(other, Cause.PEER_RESTARTED, "another session", now)
        register(self, peer, message, now)

    patch(DecodePeers, "_open", hasty)


def landed_with_the_first_grant(patch: Patch) -> None:
    """Prefill's room has landed when it has in one rank of a decode worker."""
    attach = PrefillSessions._attach

    def first(self: PrefillSessions, grant: WriterGrant, room: Any, now: float) -> None:
        attach(self, grant, room, now)
        room.grant_count = len(room.grants)

    patch(PrefillSessions, "_attach", first)


def newer_session_superseded(patch: Patch) -> None:
    """The first message on a session ends those that were opened after it, not those before."""

    def backwards(self: DecodePeers, session: WriterSession, now: float) -> None:
        opened = self._open_of(session.peer)
        for other in opened[opened.index(session) + 1 :]:
            self.close(other, Cause.PEER_RESTARTED, "another session", now)

    patch(DecodePeers, "_supersede", backwards)
