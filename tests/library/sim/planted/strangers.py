"""Defences against peers that keep to no rules, taken away."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from pdtransfer.errors import Cause
from pdtransfer.handoff.decode import prefill_peers
from pdtransfer.handoff.decode.prefill_peers import PrefillPeers
from pdtransfer.handoff.decode.records import SessionRecord
from pdtransfer.handoff.prefill import decode_peers, records
from pdtransfer.handoff.prefill.cells import OpenRoom
from pdtransfer.handoff.prefill.decode_peers import DecodePeers
from pdtransfer.handoff.prefill.records import WriterGrant, WriterSession
from pdtransfer.handoff.prefill.sessions import PrefillSessions
from pdtransfer.wire import Goodbye, Message, Registered, Reject, Welcome

from . import Patch


def overlapping_grants_taken(patch: Patch) -> None:
    """Prefill writes for two grants to the same slots."""

    class Anything:
        def add(self, extents: object) -> bool:
            return True

        def remove(self, extents: object) -> None:
            pass

    patch(records, "ExtentSet", Anything)


def other_slots_taken_for_a_repeat(patch: Patch) -> None:
    """A Grant that names other slots than before is a repeat."""
    check = WriterGrant.check_same

    def check_but_for_parts(self: WriterGrant, message: Any) -> None:
        if self.message is not None:
            check(self, replace(message, parts=self.message.parts))

    patch(WriterGrant, "check_same", check_but_for_parts)


def second_grant_of_a_session_taken(patch: Patch) -> None:
    """A room is written twice over one session."""
    patch(OpenRoom, "misplaced", lambda self, message: "")


def anybody_may_grant(patch: Patch) -> None:
    """Who knows a room's label may have its rows."""
    patch(OpenRoom, "admits", lambda self, peer: True)


def anybody_may_give_up_a_leased_room(patch: Patch) -> None:
    """An Abort of a decode that has not granted for the room fails it, whoever has leased it."""
    withdraw = PrefillSessions._withdraw

    def fail(self: PrefillSessions, room_id: int, peer: str, detail: str, now: float) -> None:
        room = self.rooms.get(room_id)
        if room is not None and room.admits(peer):
            self._fail(room, Cause.ABORTED, f"{peer} gave it up", now)
        else:
            withdraw(self, room_id, peer, detail, now)

    patch(PrefillSessions, "_withdraw", fail)


def anybody_may_end_a_grant(patch: Patch) -> None:
    """Whoever knows a session's number speaks for its peer, at prefill."""

    def of(self: DecodePeers, name: str, session_id: int) -> WriterSession | None:
        session = self.sessions.get(session_id)
        return session if session is not None and session.open else None

    patch(DecodePeers, "_of", of)


def anybody_may_end_a_lease(patch: Patch) -> None:
    """Whoever knows a session's number speaks for its peer, at decode."""
    patch(PrefillPeers, "session_of", lambda self, name, session_id: self.sessions.get(session_id))


def window_of_prefill_unheeded(patch: Patch) -> None:
    """Decode grants as many as it likes to have unended itself, whatever the writer takes."""
    welcome = PrefillPeers.welcome

    def wide(self: PrefillPeers, name: str, message: Welcome, now: float) -> None:
        welcome(self, name, replace(message, identity=replace(message.identity, window=0xFFFF)), now)

    patch(PrefillPeers, "welcome", wide)


def window_of_decode_taken_as_it_is(patch: Patch) -> None:
    """Prefill keeps as many unended grants as decode says that it may send."""
    hello = DecodePeers._hello

    def wide(self: DecodePeers, name: str, message: Any, now: float) -> None:
        hello(self, name, message, now)
        if (peer := self.peers.get(name)) is not None:
            peer.window = message.identity.window

    patch(DecodePeers, "_hello", wide)


def sessions_of_a_decode_unbounded(patch: Patch) -> None:
    """Prefill maps as many arenas of one peer as that registers."""
    patch(decode_peers, "full", lambda sessions, name, limits: "")


def sessions_of_a_prefill_unbounded(patch: Patch) -> None:
    """Decode opens a session with each life of a peer, however many wait for their fence."""
    patch(prefill_peers, "full", lambda sessions, name, limits: "")


def more_ready_than_the_arena_taken(patch: Patch) -> None:
    """Decode takes a writer's word for more bytes than its arena has."""
    registered = PrefillPeers.registered

    def cut(self: PrefillPeers, session: SessionRecord, message: Registered) -> None:
        most = message.bytes_ready if session.reach is None else session.reach.arena_bytes
        registered(self, session, replace(message, bytes_ready=min(message.bytes_ready, most)))

    patch(PrefillPeers, "registered", cut)


def any_goodbye_heeded_by_decode(patch: Patch) -> None:
    """Decode takes any Goodbye for the live process's."""
    goodbye = PrefillPeers.goodbye

    def heed(self: PrefillPeers, name: str, message: Goodbye, now: float) -> None:
        goodbye(self, name, replace(message, incarnation=self.peers[name].liveness.incarnation), now)

    patch(PrefillPeers, "goodbye", heed)


def any_goodbye_heeded_by_prefill(patch: Patch) -> None:
    """Prefill takes any Goodbye for the live process's."""
    receive = DecodePeers.receive

    def heed(self: DecodePeers, name: str, message: Message, now: float) -> None:
        if isinstance(message, Goodbye) and (peer := self.peers.get(name)) is not None:
            message = replace(message, incarnation=peer.incarnation)
        receive(self, name, message, now)

    patch(DecodePeers, "receive", heed)


def older_word_asks_for_a_hello(patch: Patch) -> None:
    """A peer that has just welcomed this node is greeted again when an older message asks for that."""
    rejected = PrefillPeers.rejected

    def heed(self: PrefillPeers, name: str, message: Reject, now: float) -> None:
        self.peers[name].liveness.welcomed = -math.inf
        rejected(self, name, message, now)

    patch(PrefillPeers, "rejected", heed)
