"""Prefill's rooms: open, push cells, finish; grants find their room, cells find their grants, bytes are written once.

The engine may reuse a room's pages when Drained says so: the room has ended and no write of it is in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...errors import Cause, LocalProtocolError, RemoteProtocolError
from ...layout.layout import Component
from ...limits import AUX_BYTES_MAX, TEXT_LENGTH_MAX, Limits
from ...wire import Abort, Grant, Granted, Identity, Message, Released
from ..effects import Drained, FenceWriter, Landed, Leased, Outcome, PrefillEffect, RoomFailed, Send
from ..lease import DUTY_ENDS, Duty, DutyEvent
from ..room import PREFILL_ROOM, PrefillRoom, PrefillRoomEvent
from ..states import step
from ..timers import Timers
from .cells import Cell, Room
from .decode_peers import DecodePeer, TimerKey, Writers
from .grants import Grants
from .writer_grants import DutyEntry, WriterSession
from .writes import ended, started


class PrefillSessions:
    """One prefill rank: who may be written to, which rooms are open, what is in flight."""

    def __init__(self, identity: Identity, components: Sequence[Component], limits: Limits) -> None:
        self.identity, self._limits = identity, limits
        self._components = {component.name: component for component in components}
        self.rooms: dict[int, Room] = {}  # unended, or ended with writes in flight
        self._waiting: dict[int, dict[DutyEntry, None]] = {}  # by room, which is not open yet
        self._ended: dict[int, tuple[Cause, str]] = {}  # the latest labels that a late Grant must not wait for
        self.draining = False
        self._timers: Timers[TimerKey] = Timers()
        self._out: list[PrefillEffect] = []
        self.writers = Writers(
            identity, self._components, limits, self._timers, self._out.append,
            told=self._told, closed=self._session_closed,
        )  # fmt: skip
        self._grants = Grants(limits, self._timers, self._out.append)

    @property
    def peers(self) -> dict[str, DecodePeer]:
        """Decode nodes that have said Hello, by name."""
        return self.writers.peers

    @property
    def sessions(self) -> dict[int, WriterSession]:
        """Sessions that are not over, by id."""
        return self.writers.sessions

    # What the engine asks

    def open(
        self,
        room_id: int,
        *,
        tokens: int,
        now: float,
        deadline: float,
        grants: int = 1,
        peers: Collection[str] | None = None,
    ) -> list[PrefillEffect]:
        """Opens a room; grants that came before are waiting for it. `peers`, if given, are the only ones it is for.

        Raises LocalProtocolError for a label in use.
        """
        if room_id in self.rooms:
            raise LocalProtocolError(f"room: {room_id:#x} is open already")
        if tokens < 1 or grants < 1:
            raise LocalProtocolError(f"room: {tokens} tokens for {grants} grants make no sense")
        if self.draining:
            return [RoomFailed(room_id, Cause.SHUTDOWN, "this node is draining"), Drained(room_id)]
        if len(self.rooms) >= self._limits.rooms_max:
            text = f"rooms: {len(self.rooms)} of rooms_max {self._limits.rooms_max}"
            return [RoomFailed(room_id, Cause.FULL, text, 1_000), Drained(room_id)]
        self._ended.pop(room_id, None)
        room = Room(room_id, tokens, grants, None if peers is None else frozenset(peers), deadline)
        self.rooms[room_id] = room
        self._timers.set(("room", room_id, 0), deadline)
        for duty in list(self._waiting.get(room_id, ())):
            self._attach(duty, room, now)
        return self._effects()

    def push(self, room_id: int, cell: Cell) -> list[PrefillEffect]:
        """Offers a computed cell, which is read until the room is drained. A room that has failed ignores it.

        Raises LocalProtocolError for cells that overlap, lie outside the room or the pool, or come after finish.
        """
        room = self.rooms.get(room_id)
        if room is None or room.state is PrefillRoom.FAILED:
            return []
        if room.state is not PrefillRoom.OPEN:
            raise LocalProtocolError(f"room: {room_id:#x} is {room.state.value}, a cell comes too late")
        room.offer(cell, self._components)
        for duty in room.duties:
            if duty.state is Duty.ACTIVE:
                self._out += started(duty, cell)
        return self._effects()

    def finish(self, room_id: int, *, aux: bytes, now: float) -> list[PrefillEffect]:
        """No more cells: the room lands when every grant has all its bytes. A room that has failed ignores it.

        Raises LocalProtocolError for a second finish, and for more than AUX_BYTES_MAX of aux.
        """
        room = self.rooms.get(room_id)
        if room is None or room.state is PrefillRoom.FAILED:
            return []
        if room.state is not PrefillRoom.OPEN:
            raise LocalProtocolError(f"room: {room_id:#x} is {room.state.value} already")
        if len(aux) > AUX_BYTES_MAX:
            raise LocalProtocolError(f"aux: {len(aux)} bytes of at most {AUX_BYTES_MAX}")
        room.state = step(PREFILL_ROOM, room.state, PrefillRoomEvent.FINISH)
        room.aux = aux
        for duty in list(room.duties):
            self._complete(duty, room, now)
        return self._effects()

    def abort(self, room_id: int, now: float, cause: Cause = Cause.ABORTED, detail: str = "") -> list[PrefillEffect]:
        """Gives a room up; Drained says when its pages are safe. Unknown and ended rooms are ignored."""
        room = self.rooms.get(room_id)
        if room is not None:
            self._fail(room, cause, detail, now)
        return self._effects()

    def drain(self) -> None:
        """Opens no room from here on; what there is runs to its end."""
        self.draining = True

    @property
    def idle(self) -> bool:
        """No room, nothing in flight, every end acknowledged or its session gone."""
        return not self.rooms and not any(s.writes or (s.open and s.duties) for s in self.sessions.values())

    # What the shell reports

    def mapped(self, session_id: int, bytes_ready: int, *, hbm_direct: bool = False) -> list[PrefillEffect]:
        """Answers Map, and follows it: this many of the arena's first bytes are ready. `hbm_direct`, the same each
        time: rows of HBM components go to the card's memory that Reach names."""
        self.writers.mapped(session_id, bytes_ready, hbm_direct=hbm_direct)
        return self._effects()

    def unmappable(self, session_id: int, text: str, now: float) -> list[PrefillEffect]:
        """Answers Map: it cannot be done."""
        self.writers.unmappable(session_id, text, now)
        return self._effects()

    def near(self, session_id: int, write: int) -> list[PrefillEffect]:
        """A write that the end of its grant may wait for is about to end. Decode hears of the grant once more: all who
        carry messages have slept while the prompt was computed, and are awake when its end is said."""
        session = self.sessions.get(session_id)
        if session is not None and session.open and write in session.writes:
            duty = session.writes[write][0]
            if duty.state is Duty.ACTIVE:
                self._out.append(Send(session.peer, Granted(session.id, duty.number)))
        return self._effects()

    def wrote(
        self, session_id: int, write: int, outcome: Outcome, detail: str, now: float, *, checksum: int = 0
    ) -> list[PrefillEffect]:
        """Answers Write, with its checksum where it asked for one. A write that a fence has ended is ignored."""
        session = self.sessions.get(session_id)
        if session is None or write not in session.writes:
            return []
        if outcome is Outcome.UNKNOWN:
            # It stays in flight until the fence: neither its target nor its source may be touched.
            self._out.append(FenceWriter(session_id))
            self._fail_duty(session.writes[write][0], Cause.TRANSFER, detail, now)
            return self._effects()
        duty, byte_count = ended(session, write)
        if outcome is Outcome.LANDED:
            duty.wrote(byte_count, checksum)
        else:
            self._fail_duty(duty, Cause.TRANSFER, detail, now)
        self._settle(duty, now)
        return self._effects()

    def fenced(self, session_id: int, now: float) -> list[PrefillEffect]:
        """Answers FenceWriter: nothing of this session is sent any more, and no source is read. It is over.

        That is no proof for decode, where bytes may still be on their way from a socket: it is told that the session is
        over, and fences it.
        """
        session = self.sessions.get(session_id)
        if session is not None:
            if session.open:
                self.writers.expel(session, Cause.TRANSFER, "its writer was fenced", now)
            for duty, _ in [ended(session, write) for write in list(session.writes)]:
                self._settle(duty, now)
        return self._effects()

    def next_tick(self) -> float | None:
        """When `tick` has something to do."""
        return self._timers.next()

    def tick(self, now: float) -> list[PrefillEffect]:
        """Repeats ends, drops silent peers, ends what is past its deadline."""
        while (key := self._timers.pop(now)) is not None:
            match key:
                case ("room", int(room_id), _):
                    room = self.rooms[room_id]
                    self._fail(room, Cause.DEADLINE, f"not landed in time, still {room.state.value}", now)
                case ("grant", int(session_id), number):
                    duty = self.sessions[session_id].duties[number]
                    self._fail_duty(duty, Cause.DEADLINE, "the room was not opened in time", now)
                case ("end", int(session_id), number):
                    self._grants.say(self.sessions[session_id].duties[number], now)
                case _:
                    assert self.writers.tick(key, now), key
        return self._effects()

    def receive(self, name: str, message: Message, now: float) -> list[PrefillEffect]:
        """One message of a decode node. A breach ends the session it was about, and nobody else's."""
        try:
            self.writers.receive(name, message, now)
        except RemoteProtocolError as error:
            self.writers.breach(name, getattr(message, "session", 0), str(error), now)
        return self._effects()

    # Grants

    def _told(self, session: WriterSession, message: Grant | Abort | Released, now: float) -> None:
        number = message.grant
        if not session.granting:
            raise RemoteProtocolError(f"{type(message).__name__}.session", f"{session.id:#x} is not yet Registered")
        if isinstance(message, Released):
            self._grants.released(session, number)
        elif session.known_end(number) or session.outside(number):
            return
        elif isinstance(message, Grant):
            self._grant(session, message, now)
        elif number in session.duties:
            self._abort(session.duties[number], now)
        else:
            self._grants.refuse(session, number, now)

    def _grant(self, session: WriterSession, message: Grant, now: float) -> None:
        duty = session.duties.get(message.grant)
        if duty is None:
            duty = session.admit(message, now)
            self._out.append(Send(session.peer, Granted(session.id, message.grant)))
            self._place(duty, message.room, now)
            return
        duty.check_same(message)
        if duty.end is not None:
            self._grants.say(duty, now)
        else:
            self._out.append(Send(session.peer, Granted(session.id, message.grant)))

    def _place(self, duty: DutyEntry, room_id: int, now: float) -> None:
        """Finds the room of a new grant, which may be over already, or not open yet."""
        room = self.rooms.get(room_id)
        if room is not None:
            self._attach(duty, room, now)
        elif room_id in self._ended:
            self._fail_duty(duty, *self._ended[room_id], now)
        else:
            self._waiting.setdefault(room_id, {})[duty] = None
            self._timers.set(("grant", duty.session.id, duty.number), duty.deadline)

    def _abort(self, duty: DutyEntry, now: float) -> None:
        self._unwait(duty)
        self._grants.abort(duty, now)
        room = self._room_of(duty)
        if room is not None:
            self._fail(room, Cause.ABORTED, f"{duty.session.peer} aborted it", now)

    def _attach(self, duty: DutyEntry, room: Room, now: float) -> None:
        """Grant and room have met. A grant that the room is not for fails alone."""
        message, peer = duty.message, duty.session.peer
        assert message is not None
        self._unwait(duty)
        duty.step(DutyEvent.OPEN)
        if room.state is PrefillRoom.FAILED:
            self._grants.fail(duty, room.cause, room.detail, now)
        elif room.peers is not None and peer not in room.peers:
            text = f"room: {room.id:#x} is for {sorted(room.peers)}, not for {peer}"
            self._grants.fail(duty, Cause.BREACH, text, now)
        elif any(each.session is duty.session for each in room.duties):
            text = f"grants: a second one of session {duty.session.id:#x} for room {room.id:#x}"
            self._grants.fail(duty, Cause.BREACH, text, now)
        elif len(room.duties) == room.grants:
            text = f"grants: one more than the {room.grants} that the engine expects"
            self._grants.fail(duty, Cause.BREACH, text, now)
        else:
            room.duties.append(duty)
            if message.tokens != room.tokens:
                text = f"tokens: the grant says {message.tokens}, the engine {room.tokens}"
                self._fail_duty(duty, Cause.BREACH, text, now)
                return
            if len(room.duties) == room.grants:
                self._out.append(Leased(room.id))
            for cell in room.cells:
                self._out += started(duty, cell)
            self._complete(duty, room, now)

    def _complete(self, duty: DutyEntry, room: Room, now: float) -> None:
        """Lands an active duty whose bytes are all written, once the engine has said that there are no more."""
        if duty.state is not Duty.ACTIVE or duty.in_flight or room.state is not PrefillRoom.FINISHED:
            return
        if duty.written_bytes != duty.kv_bytes:
            text = f"cells: {duty.written_bytes} bytes were offered, the grant is {duty.kv_bytes}"
            self._fail_duty(duty, Cause.ENGINE, text, now)
            return
        self._grants.land(duty, room.aux, now)
        if len(room.duties) == room.grants and all(each.state is Duty.LANDED for each in room.duties):
            room.state = step(PREFILL_ROOM, room.state, PrefillRoomEvent.LAND)
            room.detail = "the room has landed already"
            self._timers.clear(("room", room.id, 0))
            self._out.append(Landed(room.id, sum(each.kv_bytes for each in room.duties)))
            self._drain_if_quiet(room)

    def _fail_duty(self, duty: DutyEntry, cause: Cause, detail: str, now: float) -> None:
        """Ends a duty that is not over, and the room it is for."""
        self._unwait(duty)
        self._grants.fail(duty, cause, detail, now)
        room = self._room_of(duty)
        if room is not None:
            self._fail(room, cause, detail, now)

    def _unwait(self, duty: DutyEntry) -> None:
        if duty.state is Duty.WAITING and duty.room is not None:
            self._timers.clear(("grant", duty.session.id, duty.number))
            waiting = self._waiting.get(duty.room, {})
            waiting.pop(duty, None)
            if not waiting:
                self._waiting.pop(duty.room, None)

    def _settle(self, duty: DutyEntry, now: float) -> None:
        """A write of this duty is over."""
        room = self._room_of(duty)
        if room is not None:
            self._complete(duty, room, now)
        self._grants.settle(duty, now)
        if room is not None:
            self._drain_if_quiet(room)
        self.writers.settle(duty.session)

    # Rooms

    def _room_of(self, duty: DutyEntry) -> Room | None:
        """The room that this duty is one of."""
        room = None if duty.room is None else self.rooms.get(duty.room)
        return room if room is not None and duty in room.duties else None

    def _fail(self, room: Room, cause: Cause, detail: str, now: float) -> None:
        """Ends a room, once; every grant of it ends too, and its pages are safe when nothing is in flight."""
        if room.state in (PrefillRoom.FAILED, PrefillRoom.LANDED):
            return
        room.state = step(PREFILL_ROOM, room.state, PrefillRoomEvent.FAIL)
        room.cause, room.detail = cause, detail[:TEXT_LENGTH_MAX]
        self._timers.clear(("room", room.id, 0))
        self._out.append(RoomFailed(room.id, cause, room.detail))
        for duty in list(room.duties):
            self._fail_duty(duty, cause, detail, now)
        self._drain_if_quiet(room)

    def _drain_if_quiet(self, room: Room) -> None:
        ended = room.state in (PrefillRoom.FAILED, PrefillRoom.LANDED)
        if ended and room.id in self.rooms and not any(duty.in_flight for duty in room.duties):
            del self.rooms[room.id]
            self._ended[room.id] = room.cause, room.detail
            if len(self._ended) > self._limits.rooms_max:
                del self._ended[next(iter(self._ended))]
            self._out.append(Drained(room.id))

    # What the writers report

    def _session_closed(self, session: WriterSession, cause: Cause, detail: str, now: float) -> None:
        for duty in list(session.duties.values()):
            self._timers.clear(("end", session.id, duty.number))
            if duty.state not in DUTY_ENDS:
                self._fail_duty(duty, cause, detail, now)

    def _effects(self) -> list[PrefillEffect]:
        out = self._out.copy()
        self._out.clear()
        return out
