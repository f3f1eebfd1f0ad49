"""Prefill's rooms: open, push cells, finish. Grants meet rooms, cells meet grants, and each byte is written once.

The engine may reuse a room's pages after RoomDrained: the room has ended and no write of it is in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...errors import Cause, LocalProtocolError, RemoteProtocolError
from ...layout.layout import Component
from ...limits import AUX_BYTES_MAX, TEXT_LENGTH_MAX, Limits
from ...wire import Abort, Grant, Granted, Identity, Member, Message, Released
from ..effects import (
    FenceWriter,
    Outcome,
    PrefillEffect,
    RoomAsked,
    RoomDrained,
    RoomFailed,
    RoomLanded,
    RoomLeased,
    Send,
)
from ..states import PREFILL_ROOM, WRITER_GRANT_ENDS, PrefillRoom, PrefillRoomEvent, WriterGrantEvent, WriterGrantState
from ..tables import step
from ..timers import TimerKey, Timers
from .cells import Cell, OpenRoom, started
from .decode_peers import DecodePeer, DecodePeers
from .grant_ends import GrantEnds
from .records import WriterGrant, WriterSession


class PrefillSessions:
    """One prefill rank: its peers, its open rooms, and the writes in flight."""

    def __init__(
        self, identity: Identity, components: Sequence[Component], limits: Limits, *, group_is_known: bool = True
    ) -> None:
        """Unless its `group_is_known` it answers no Hello before `set_group`."""
        self.identity, self._limits = identity, limits
        self._components = {component.name: component for component in components}
        self.rooms: dict[int, OpenRoom] = {}  # not ended, or ended with writes in flight
        self._waiting: dict[int, dict[WriterGrant, None]] = {}  # grants by room, which is not open yet
        self._ended: dict[int, tuple[Cause, str]] = {}  # of the latest rooms, whose late grants must not wait
        # The latest rooms that decode gave up before `open`: by whom, and why.
        self._withdrawn: dict[int, dict[str, str]] = {}
        self.draining = False
        self._timers: Timers[TimerKey] = Timers()
        self._out: list[PrefillEffect] = []
        self.decode_peers = DecodePeers(
            identity, self._components, limits, self._timers, self._out.append,
            closed=self._session_closed, withdraw=self._withdraw_ungranted, group_is_known=group_is_known,
        )  # fmt: skip
        self._grant_ends = GrantEnds(limits, self._timers, self._out.append)

    @property
    def peers(self) -> dict[str, DecodePeer]:
        """Decode nodes that sent Hello, by name."""
        return self.decode_peers.peers

    @property
    def sessions(self) -> dict[int, WriterSession]:
        """Sessions that are not over, by id."""
        return self.decode_peers.sessions

    # Calls of the engine

    def set_group(self, members: tuple[Member, ...]) -> None:
        """The ranks that this one leads, itself first: each Welcome from now on names them."""
        self.decode_peers.set_group(members)

    def open(
        self, room_id: int, *, tokens: int | None, now: float, deadline: float, grants: int | None = 1,
        peers: Collection[str] | None = None,
    ) -> list[PrefillEffect]:  # fmt: skip
        """Opens a room; grants that came before are waiting for it. Only `peers`, if given, may grant.

        Without `tokens` the room has as many as the first Grant, and without `grants` every rank of its group grants.
        Raises LocalProtocolError for a label in use.
        """
        if room_id in self.rooms:
            raise LocalProtocolError(f"room: {room_id:016x} is open already")
        if (tokens is not None and tokens < 1) or (grants is not None and grants < 1):
            raise LocalProtocolError(f"room: {tokens} tokens for {grants} grants are invalid")
        if self.draining:
            return [RoomFailed(room_id, Cause.SHUTDOWN, "this node is draining"), RoomDrained(room_id)]
        if len(self.rooms) >= self._limits.rooms_max:
            text = f"rooms: {len(self.rooms)} of rooms_max {self._limits.rooms_max}"
            return [RoomFailed(room_id, Cause.FULL, text, 1_000), RoomDrained(room_id)]
        self._ended.pop(room_id, None)
        room = OpenRoom(room_id, tokens, grants, None if peers is None else frozenset(peers), deadline)
        self.rooms[room_id] = room
        self._timers.set(("room", room_id, 0), deadline)
        for peer, detail in self._withdrawn.pop(room_id, {}).items():
            self._withdraw(room_id, peer, detail, now)
        for grant in list(self._waiting.get(room_id, ())):
            self._attach(grant, room, now)
        return self._effects()

    def push(self, room_id: int, cell: Cell, now: float) -> list[PrefillEffect]:
        """Offers a computed cell, which is read until the room is drained. A room that has failed ignores it.

        Raises LocalProtocolError for cells that overlap, lie outside the room or the pool, or come after finish.
        """
        room = self.rooms.get(room_id)
        if room is None or room.state is PrefillRoom.FAILED:
            return []
        if room.state is not PrefillRoom.OPEN:
            raise LocalProtocolError(f"room: {room_id:016x} is {room.state.value}; no cell may follow")
        room.offer(cell, self._components)
        for grant in list(room.grants.values()):
            if grant.state is WriterGrantState.ACTIVE:
                self._out += started(grant, cell)
                self._complete(grant, room, now)
        return self._effects()

    def finish(self, room_id: int, *, aux: bytes, now: float) -> list[PrefillEffect]:
        """No more cells: the room lands when every grant has all its bytes. A room that has failed ignores it.

        Raises LocalProtocolError for a second finish, and for more than AUX_BYTES_MAX of aux.
        """
        room = self.rooms.get(room_id)
        if room is None or room.state is PrefillRoom.FAILED:
            return []
        if room.state is not PrefillRoom.OPEN:
            raise LocalProtocolError(f"room: {room_id:016x} is {room.state.value} already")
        if len(aux) > AUX_BYTES_MAX:
            raise LocalProtocolError(f"aux: {len(aux)} bytes of at most {AUX_BYTES_MAX}")
        room.state = step(PREFILL_ROOM, room.state, PrefillRoomEvent.FINISH)
        room.aux = aux
        for grant in list(room.grants.values()):
            self._complete(grant, room, now)
        return self._effects()

    def abort(self, room_id: int, now: float, cause: Cause = Cause.ABORTED, detail: str = "") -> list[PrefillEffect]:
        """Gives a room up; RoomDrained reports when its pages are safe. Grants of a room that is not open fail, now and
        when they come. Ended rooms are ignored."""
        room = self.rooms.get(room_id)
        if room is not None:
            self._fail(room, cause, detail, now)
        elif room_id not in self._ended:
            self._remember(room_id, cause, detail)
            for grant in list(self._waiting.get(room_id, ())):
                self._fail_grant(grant, cause, detail, now)
        return self._effects()

    def drain(self) -> None:
        """Opens no room from now on; present rooms run to their end."""
        self.draining = True

    @property
    def idle(self) -> bool:
        """True if no room is open, no write is in flight, and each end is acknowledged or its session is gone."""
        return not self.rooms and not any(s.writes or (s.open and s.grants) for s in self.sessions.values())

    # Reports of the shell

    def mapped(self, session_id: int, bytes_ready: int, *, hbm_direct: bool = False) -> list[PrefillEffect]:
        """Answers Map, and reports more later: the arena's first `bytes_ready` bytes are ready. `hbm_direct` is the
        same each time: rows of HBM components go to the memory of the GPU that Reach names."""
        self.decode_peers.mapped(session_id, bytes_ready, hbm_direct=hbm_direct)
        return self._effects()

    def unmappable(self, session_id: int, text: str, now: float) -> list[PrefillEffect]:
        """Answers Map with a failure."""
        self.decode_peers.unmappable(session_id, text, now)
        return self._effects()

    def wake_hint(self, session_id: int, write: int) -> list[PrefillEffect]:
        """A write that the end of its grant may wait for is about to end: repeats Granted. That wakes the threads and
        processes that carry messages before the end is sent."""
        session = self.sessions.get(session_id)
        if session is not None and session.open and write in session.writes:
            grant = session.writes[write][0]
            if grant.state is WriterGrantState.ACTIVE:
                self._out.append(Send(session.peer, Granted(session.id, grant.number)))
        return self._effects()

    def wrote(
        self, session_id: int, write: int, outcome: Outcome, detail: str, now: float, *, checksum: int = 0
    ) -> list[PrefillEffect]:
        """Answers Write, with a checksum where Write wants one. A write that a fence has ended is ignored."""
        session = self.sessions.get(session_id)
        if session is None or write not in session.writes:
            return []
        if outcome is Outcome.UNKNOWN:
            # It stays in flight until the fence: neither its target nor its source may be touched.
            self._out.append(FenceWriter(session_id))
            self._fail_grant(session.writes[write][0], Cause.TRANSFER, detail, now)
            return self._effects()
        grant = session.end(write, checksum if outcome is Outcome.LANDED else None)
        if outcome is not Outcome.LANDED:
            self._fail_grant(grant, Cause.TRANSFER, detail, now)
        self._settle(grant, now)
        return self._effects()

    def fenced(self, session_id: int, now: float) -> list[PrefillEffect]:
        """Answers FenceWriter: nothing of this session is sent or read any more, and the session is over.

        That is no proof for decode, since a socket may still hold bytes. Decode is informed that the session ended, and
        fences it.
        """
        session = self.sessions.get(session_id)
        if session is not None:
            if session.open:
                self.decode_peers.expel(session, Cause.TRANSFER, "its writer was fenced", now)
            for grant in [session.end(write) for write in list(session.writes)]:
                self._settle(grant, now)
        return self._effects()

    def gone(self, peer: str, evidence: str, now: float) -> list[PrefillEffect]:
        """There is evidence that the decode node's process is gone, such as a connection that has ended for good;
        empty: no longer. It is repeated while it stands."""
        self.decode_peers.gone(peer, evidence, now)
        return self._effects()

    def next_tick(self) -> float | None:
        """When `tick` is due; None if nothing is."""
        return self._timers.next()

    def tick(self, now: float) -> list[PrefillEffect]:
        """Repeats ends, drops silent peers, and fails what is past its deadline."""
        while (key := self._timers.pop(now)) is not None:
            match key:
                case ("room", int(room_id), _):
                    room = self.rooms[room_id]
                    text = f"not landed in time, still {room.state.value}: {room.awaited}"
                    self._fail(room, Cause.DEADLINE, text, now)
                case ("grant", int(session_id), number):
                    grant = self.sessions[session_id].grants[number]
                    self._fail_grant(grant, Cause.DEADLINE, "the room was not opened in time", now)
                case ("end", int(session_id), number):
                    self._grant_ends.send_end(self.sessions[session_id].grants[number], now)
                case _:
                    handled = self.decode_peers.tick(key, now)
                    assert handled, key
        return self._effects()

    def receive(self, name: str, message: Message, now: float) -> list[PrefillEffect]:
        """Takes one message of a decode node. A breach ends only the session that the message was about."""
        try:
            if not isinstance(message, Grant | Abort | Released):
                self.decode_peers.receive(name, message, now)
            elif (session := self.decode_peers.session_of(name, message, now)) is not None:
                self._on_grant_message(session, message, now)
        except RemoteProtocolError as error:
            self.decode_peers.breach(name, getattr(message, "session", 0), str(error), now)
        return self._effects()

    # Grants

    def _on_grant_message(self, session: WriterSession, message: Grant | Abort | Released, now: float) -> None:
        number = message.grant
        if not session.granting:
            raise RemoteProtocolError(f"{type(message).__name__}.session", f"{session.id:#x} is not yet Registered")
        if isinstance(message, Released):
            self._grant_ends.released(session, number)
        elif session.known_end(number) or session.outside(number):
            return
        elif isinstance(message, Grant):
            self._grant(session, message, now)
        elif number in session.grants:
            self._abort(session.grants[number], message.detail, now)
        else:
            self._grant_ends.refuse(session, number, now)
            self._withdraw_ungranted(message.room, session.peer, message.detail, now)

    def _grant(self, session: WriterSession, message: Grant, now: float) -> None:
        grant = session.grants.get(message.grant)
        if grant is None:
            grant = session.admit(message, now)
            self._out.append(Send(session.peer, Granted(session.id, message.grant)))
            self._find_room(grant, message.room, now)
            return
        grant.check_same(message)
        if grant.end is not None:
            self._grant_ends.send_end(grant, now)
        else:
            self._out.append(Send(session.peer, Granted(session.id, message.grant)))

    def _find_room(self, grant: WriterGrant, room_id: int, now: float) -> None:
        """Finds the room of a new grant; it may have ended, or may not be open yet."""
        room = self.rooms.get(room_id)
        if room is not None:
            self._attach(grant, room, now)
        elif room_id in self._ended:
            self._fail_grant(grant, *self._ended[room_id], now)
        else:
            if room_id not in self._waiting:
                assert grant.message is not None
                self._out.append(RoomAsked(room_id, grant.message.tokens, grant.message.prefix))
            self._waiting.setdefault(room_id, {})[grant] = None
            self._timers.set(("grant", grant.session.id, grant.number), grant.deadline)

    def _abort(self, grant: WriterGrant, detail: str, now: float) -> None:
        self._stop_waiting(grant)
        self._grant_ends.abort(grant, now)
        if grant.room is not None:
            self._withdraw(grant.room, grant.session.peer, detail, now)

    def _withdraw_ungranted(self, room_id: int, peer: str, detail: str, now: float) -> None:
        """A decode node gives up a room that it has granted nothing for. The engine may know its request by a room that
        it opens only when asked."""
        withdrawn_already = room_id in self._withdrawn
        self._withdraw(room_id, peer, detail, now)
        if not withdrawn_already and room_id in self._withdrawn:
            self._out.append(RoomAsked(room_id, 0, 0))

    def _withdraw(self, room_id: int, peer: str, detail: str, now: float) -> None:
        """A decode node gives up a room: the room fails if that node has granted for it or still may, now or once it is
        opened."""
        room = self.rooms.get(room_id)
        if room is not None:
            has_granted = any(grant.session.peer == peer for grant in room.grants.values())
            if has_granted or (room.admits(peer) and not room.leased):
                self._fail(room, Cause.ABORTED, f"{peer} gave it up: {detail}" if detail else f"{peer} gave it up", now)
        elif room_id and room_id not in self._ended:
            self._withdrawn.setdefault(room_id, {})[peer] = detail
            if len(self._withdrawn) > self._limits.rooms_max:
                del self._withdrawn[next(iter(self._withdrawn))]

    def _attach(self, grant: WriterGrant, room: OpenRoom, now: float) -> None:
        """Adds a grant to its room. A grant that does not fit the room fails alone."""
        message, peer = grant.message, grant.session.peer
        assert message is not None
        self._stop_waiting(grant)
        grant.step(WriterGrantEvent.OPEN)
        further = grant.session.id in room.grants
        if room.state is PrefillRoom.FAILED:
            self._grant_ends.fail(grant, room.cause, room.detail, now)
        elif not room.admits(peer):
            text = f"room: {room.id:016x} is for {sorted(room.peers or ())}, not for {peer}"
            self._grant_ends.fail(grant, Cause.BREACH, text, now)
        elif further and (text := room.misplaced(message)):
            self._grant_ends.fail(grant, Cause.BREACH, text, now)
        elif room.leased and not further:
            text = f"grants: one more than the {room.grant_count} that the engine expects"
            self._grant_ends.fail(grant, Cause.BREACH, text, now)
        else:
            room.meet(grant, self.decode_peers.group_size(peer))
            if message.tokens != room.tokens:
                text = f"tokens: the grant has {message.tokens}, the engine {room.tokens}"
                self._fail_grant(grant, Cause.BREACH, text, now)
                return
            if room.leased and not further:
                self._out.append(RoomLeased(room.id, message.tokens, room.prefix))
            for cell in room.cells:
                self._out += started(grant, cell)
            self._complete(grant, room, now)

    def _complete(self, grant: WriterGrant, room: OpenRoom, now: float) -> None:
        """Lands an active grant whose bytes are all written, once the engine has finished the room. A grant that
        another one follows lands once the engine has offered rows for that."""
        if grant.state is not WriterGrantState.ACTIVE or grant.in_flight:
            return
        finished, whole = room.state is PrefillRoom.FINISHED, grant.written_bytes == grant.kv_bytes
        assert grant.message is not None
        followed = not grant.last and room.offered_tokens > grant.message.stop
        if not finished and not (whole and followed):
            return
        if not whole:
            text = f"cells: {grant.written_bytes} bytes were offered, the grant is {grant.kv_bytes}"
            self._fail_grant(grant, Cause.ENGINE, text, now)
            return
        self._grant_ends.end(grant, WriterGrantEvent.COMPLETE, now, aux=room.aux)
        if room.landed:
            room.state = step(PREFILL_ROOM, room.state, PrefillRoomEvent.LAND)
            room.detail = "the room has landed already"
            self._timers.clear(("room", room.id, 0))
            self._out.append(RoomLanded(room.id, room.granted_bytes))
            self._drain_if_quiet(room)

    def _fail_grant(self, grant: WriterGrant, cause: Cause, detail: str, now: float) -> None:
        """Fails a grant that is not over, and its room. If that is not open yet, decode has given it up by then."""
        waits = grant.state is WriterGrantState.WAITING
        self._stop_waiting(grant)
        self._grant_ends.fail(grant, cause, detail, now)
        if waits and grant.room is not None:
            self._withdraw(grant.room, grant.session.peer, f"{cause.value}: {detail}", now)
        room = self._room_of(grant)
        if room is not None:
            self._fail(room, cause, detail, now)

    def _stop_waiting(self, grant: WriterGrant) -> None:
        if grant.state is WriterGrantState.WAITING and grant.room is not None:
            self._timers.clear(("grant", grant.session.id, grant.number))
            waiting = self._waiting.get(grant.room, {})
            waiting.pop(grant, None)
            if not waiting:
                self._waiting.pop(grant.room, None)

    def _settle(self, grant: WriterGrant, now: float) -> None:
        """A write of this grant has ended."""
        room = self._room_of(grant)
        if room is not None:
            self._complete(grant, room, now)
        if grant.state is WriterGrantState.STOPPING and not grant.in_flight:  # that was its last one: the proof
            self._grant_ends.end(grant, WriterGrantEvent.QUIET, now)
        if room is not None:
            self._drain_if_quiet(room)
        self.decode_peers.settle(grant.session)

    # Rooms

    def _room_of(self, grant: WriterGrant) -> OpenRoom | None:
        """The room of this grant, if the grant was added to it."""
        room = None if grant.room is None else self.rooms.get(grant.room)
        return room if room is not None and room.grants.get(grant.session.id) is grant else None

    def _fail(self, room: OpenRoom, cause: Cause, detail: str, now: float) -> None:
        """Fails a room, once, and its grants; its pages are safe when nothing is in flight."""
        if room.state in (PrefillRoom.FAILED, PrefillRoom.LANDED):
            return
        room.state = step(PREFILL_ROOM, room.state, PrefillRoomEvent.FAIL)
        room.cause, room.detail = cause, detail[:TEXT_LENGTH_MAX]
        self._timers.clear(("room", room.id, 0))
        self._out.append(RoomFailed(room.id, cause, room.detail))
        for grant in list(room.grants.values()):
            self._fail_grant(grant, cause, detail, now)
        self._drain_if_quiet(room)

    def _drain_if_quiet(self, room: OpenRoom) -> None:
        ended = room.state in (PrefillRoom.FAILED, PrefillRoom.LANDED)
        if ended and room.id in self.rooms and not any(grant.in_flight for grant in room.grants.values()):
            del self.rooms[room.id]
            self._remember(room.id, room.cause, room.detail)
            self._out.append(RoomDrained(room.id))

    def _remember(self, room_id: int, cause: Cause, detail: str) -> None:
        """The cause with which late grants of this room fail."""
        self._ended[room_id] = cause, detail[:TEXT_LENGTH_MAX]
        if len(self._ended) > self._limits.rooms_max:
            del self._ended[next(iter(self._ended))]

    # Reports of decode peers

    def _session_closed(self, session: WriterSession, cause: Cause, detail: str, now: float) -> None:
        for grant in list(session.grants.values()):
            self._timers.clear(("end", session.id, grant.number))
            if grant.state not in WRITER_GRANT_ENDS:
                self._fail_grant(grant, cause, detail, now)
        for room in list(self.rooms.values()):
            if (latest := room.grants.get(session.id)) is not None and not latest.last:
                self._fail(room, cause, detail, now)  # the piece that should follow will not come

    def _effects(self) -> list[PrefillEffect]:
        out = self._out.copy()
        self._out.clear()
        return out
