"""Prefill's rooms: open, push cells, finish; grants find their room, cells find their grants, bytes are written once.

The engine may reuse a room's pages when Drained says so: the room has ended and no write of it is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..arena import ExtentSet
from ..effects import (
    Drained,
    FenceWriter,
    Landed,
    Leased,
    Map,
    Outcome,
    PrefillEffect,
    RoomFailed,
    Send,
    StopWriting,
    Unmap,
    Write,
)
from ..errors import Cause, LayoutMismatchError, LocalProtocolError, RemoteProtocolError
from ..layout import Component, pair
from ..lease import DUTY_ENDS, Duty, DutyEvent
from ..limits import Limits
from ..room import PREFILL_ROOM, PrefillRoom, PrefillRoomEvent
from ..states import step
from ..timers import Timers
from ..wire import (
    VERSION,
    Abort,
    Failed,
    Goodbye,
    Grant,
    Granted,
    Hello,
    Identity,
    Message,
    Ping,
    Pong,
    Register,
    Registered,
    Reject,
    Released,
    Welcome,
    negotiate,
)
from .duties import DutyEntry, WriterSession, WriterState, end_message, layer_bytes


@dataclass(frozen=True, slots=True)
class Cell:
    """Rows [first_row, first_row + len(source_slots)) of layers [first, end) of one component, computed and ready to be read."""

    component: str
    first_row: int
    layers: tuple[int, int]
    source_slots: NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Room:
    """One request on the prefill side."""

    id: int
    tokens: int
    grants: int  # how many decode ranks will grant
    deadline: float
    state: PrefillRoom = PrefillRoom.OPEN
    cells: list[Cell] = field(default_factory=list[Cell])
    offered: dict[tuple[str, int, int], ExtentSet] = field(default_factory=dict[tuple[str, int, int], ExtentSet])
    duties: list[DutyEntry] = field(default_factory=list[DutyEntry])
    aux: bytes = b""
    cause: Cause = Cause.REFUSED
    detail: str = ""


@dataclass(slots=True, eq=False)
class DecodePeer:
    """One decode node that has said Hello."""

    name: str
    incarnation: int
    window: int
    heard: float


class PrefillSessions:
    """One prefill rank: who may be written to, which rooms are open, what is in flight."""

    def __init__(self, identity: Identity, components: Sequence[Component], limits: Limits) -> None:
        self.identity, self._limits = identity, limits
        self._components = {component.name: component for component in components}
        self.peers: dict[str, DecodePeer] = {}
        self.sessions: dict[int, WriterSession] = {}
        self._closing: dict[int, WriterSession] = {}  # closed, with writes in flight
        self.rooms: dict[int, Room] = {}  # unended, or ended with writes in flight
        self._waiting: dict[int, list[DutyEntry]] = {}  # by room, which is not open yet
        self._ended: dict[int, tuple[Cause, str]] = {}  # the latest labels that a late Grant must not wait for
        self.draining = False
        self._timers: Timers[tuple[str, str | int, int]] = Timers()
        self._out: list[PrefillEffect] = []

    # What the engine asks

    def open(self, room_id: int, *, tokens: int, now: float, deadline: float, grants: int = 1) -> list[PrefillEffect]:
        """Opens a room; grants that came before are waiting for it. Raises LocalProtocolError for a label in use."""
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
        room = self.rooms[room_id] = Room(room_id, tokens, grants, deadline)
        self._timers.set(("room", room_id, 0), deadline)
        for duty in self._waiting.pop(room_id, []):
            self._attach(duty, room, now)
        return self._effects()

    def push(self, room_id: int, cell: Cell) -> list[PrefillEffect]:
        """Offers a computed cell, which is read until the room is drained. A room that has failed takes it and ignores it.

        Raises LocalProtocolError for cells that overlap, lie outside the room or the pool, or come after finish.
        """
        room = self.rooms.get(room_id)
        if room is None or room.state is PrefillRoom.FAILED:
            return []
        if room.state is not PrefillRoom.OPEN:
            raise LocalProtocolError(f"room: {room_id:#x} is {room.state.value}, a cell comes too late")
        self._check(room, cell)
        room.cells.append(cell)
        for duty in room.duties:
            if duty.state is Duty.ACTIVE:
                self._write(duty, cell)
        return self._effects()

    def finish(self, room_id: int, *, aux: bytes, now: float) -> list[PrefillEffect]:
        """No more cells: the room lands when every grant has all its bytes. A room that has failed ignores it."""
        room = self.rooms.get(room_id)
        if room is None or room.state is PrefillRoom.FAILED:
            return []
        if room.state is not PrefillRoom.OPEN:
            raise LocalProtocolError(f"room: {room_id:#x} is {room.state.value} already")
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
        return not self.rooms and not self._closing and not any(s.duties for s in self.sessions.values())

    # What the shell reports

    def mapped(self, session_id: int, bytes_ready: int) -> list[PrefillEffect]:
        """Answers Map: this many bytes of the arena are ready."""
        session = self.sessions.get(session_id)
        if session is None:
            return [Unmap(session_id)]  # closed meanwhile
        session.state, session.bytes_ready = WriterState.UP, bytes_ready
        return [Send(session.peer, Registered(session_id, bytes_ready))]

    def unmappable(self, session_id: int, text: str, now: float) -> list[PrefillEffect]:
        """Answers Map: it cannot be done."""
        session = self.sessions.get(session_id)
        if session is not None:
            self._out.append(Send(session.peer, Reject(session_id, Cause.TRANSFER.value, (text[:500],))))
            self._close(session, Cause.TRANSFER, text, now)
        return self._effects()

    def wrote(self, session_id: int, write: int, outcome: Outcome, detail: str, now: float) -> list[PrefillEffect]:
        """Answers Write."""
        session = self.sessions.get(session_id) or self._closing[session_id]
        duty, byte_count = session.writes[write]
        if outcome is Outcome.UNKNOWN:
            session.unknown.add(write)
            self._out.append(FenceWriter(session_id))
            self._fail_duty(duty, Cause.TRANSFER, detail, now)
            return self._effects()
        del session.writes[write]
        duty.in_flight -= 1
        if outcome is Outcome.LANDED:
            duty.written_bytes += byte_count
            if duty.state is Duty.ACTIVE:
                self._complete(duty, self.rooms[duty.room], now)
        elif duty.state is Duty.ACTIVE:
            self._fail_duty(duty, Cause.TRANSFER, detail, now)
        self._settle(duty, now)
        return self._effects()

    def fenced(self, session_id: int, now: float) -> list[PrefillEffect]:
        """Answers FenceWriter: nothing of this session is in flight any more, and nothing will be."""
        session = self.sessions.get(session_id) or self._closing.get(session_id)
        if session is not None:
            for write in list(session.unknown):
                session.unknown.discard(write)
                duty, _ = session.writes.pop(write)
                duty.in_flight -= 1
                self._settle(duty, now)
            self._close(session, Cause.TRANSFER, "its writer was fenced", now)
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
                    self._say_end(self.sessions[session_id].duties[number], now)
                case ("alive", str(name), _):
                    self._alive(self.peers[name], now)
                case _:
                    raise AssertionError(key)
        return self._effects()

    def receive(self, name: str, message: Message, now: float) -> list[PrefillEffect]:
        """One message of a decode node. A breach ends the session it was about, and nobody else's."""
        try:
            self._receive(name, message, now)
        except RemoteProtocolError as error:
            session_id = getattr(message, "session", 0)
            self._out.append(Send(name, Reject(session_id, Cause.BREACH.value, (str(error)[:500],))))
            session = self.sessions.get(session_id)
            if session is not None and session.peer == name:
                self._close(session, Cause.BREACH, f"{name} broke the protocol: {error}", now)
        return self._effects()

    def _receive(self, name: str, message: Message, now: float) -> None:
        if isinstance(message, Hello):
            self._hello(name, message, now)
            return
        peer = self.peers.get(name)
        if peer is None:
            self._out.append(Send(name, Reject(0, "hello_required", ())))
            return
        peer.heard = now
        match message:
            case Ping():
                self._out.append(Send(name, Pong(self.identity.incarnation)))
            case Register():
                self._register(peer, message, now)
            case Goodbye():
                self._depart(peer, Cause.PEER_LOST, f"{name} says goodbye: {message.reason}", now)
            case Grant() | Abort() | Released() | Reject():
                session = self.sessions.get(message.session)
                if session is not None and session.peer != name:
                    raise RemoteProtocolError("session", f"{message.session:#x} is not {name}'s")
                if session is None:
                    if not isinstance(message, Reject):
                        self._out.append(Send(name, Reject(message.session, "unknown_session", ())))
                    return
                self._of_session(session, message, now)
            case _:
                raise RemoteProtocolError("kind", f"{type(message).__name__} is nothing that decode sends to a prefill")

    def _of_session(self, session: WriterSession, message: Grant | Abort | Released | Reject, now: float) -> None:
        match message:
            case Grant():
                self._grant(session, message, now)
            case Abort():
                self._abort(session, message.grant, now)
            case Released():
                duty = session.duties.get(message.grant)
                if duty is not None and duty.state not in DUTY_ENDS:
                    raise RemoteProtocolError(
                        "Released.grant", f"{message.grant} has not ended, it is {duty.state.value}"
                    )
                if duty is not None:
                    self._timers.clear(("end", session.id, message.grant))
                    session.acknowledge(message.grant)
            case Reject():
                self._close(session, Cause.PEER_LOST, f"{session.peer} ended the session: {message.reason}", now)

    # Peers and sessions

    def _hello(self, name: str, message: Hello, now: float) -> None:
        theirs, ours = message.identity, self.identity
        version = negotiate(ours=(VERSION, VERSION), theirs=(message.version_min, message.version_max))
        differences = [
            f"{field}: {theirs.node} has {there!r}, {ours.node} {here!r}"
            for field, there, here in (
                ("role", theirs.role, "decode"),
                ("model", theirs.model, ours.model),
                ("weights", theirs.weights.hex(), ours.weights.hex()),
            )
            if there != here
        ]
        if differences:
            self._out.append(Send(name, Reject(0, Cause.REFUSED.value, tuple(differences))))
            return
        known = self.peers.get(name)
        if known is not None and known.incarnation != theirs.incarnation:
            self._depart(known, Cause.PEER_RESTARTED, f"{name} is a new process", now)
        if name not in self.peers:
            self._timers.set(("alive", name, 0), now + self._limits.session_silence_ms / 1e3)
        self.peers[name] = DecodePeer(name, theirs.incarnation, min(theirs.window, self._limits.window), now)
        self._out.append(Send(name, Welcome(version, ours)))

    def _register(self, peer: DecodePeer, message: Register, now: float) -> None:
        session = self.sessions.get(message.session)
        if session is None and message.session not in self._closing:
            self._unfit(message)
            if len(self.sessions) + len(self._closing) >= self._limits.sessions_max:
                text = f"sessions: {len(self.sessions)} of sessions_max {self._limits.sessions_max}"
                self._out.append(Send(peer.name, Reject(message.session, Cause.FULL.value, (text,))))
                return
            for other in [s for s in self.sessions.values() if s.peer == peer.name]:
                self._close(other, Cause.PEER_RESTARTED, f"{peer.name} opened another session", now)
            self.sessions[message.session] = WriterSession(message.session, peer.name, message.components, peer.window)
            self._out.append(Map(message.session, message.reach, message.components))
        elif session is None or session.peer != peer.name:
            raise RemoteProtocolError("Register.session", f"{message.session:#x} is in use")
        elif session.state is WriterState.UP:
            self._out.append(Send(peer.name, Registered(session.id, session.bytes_ready)))

    def _unfit(self, message: Register) -> None:
        """Raises RemoteProtocolError where what is registered is not what this prefill holds."""
        names = [component.name for component in message.components]
        if not names or len(set(names)) != len(names):
            raise RemoteProtocolError("Register.components", f"{names}: none, or one twice")
        for index, theirs in enumerate(message.components):
            where = f"Register.components[{index}]"
            ours = self._components.get(theirs.name)
            if ours is None:
                raise RemoteProtocolError(
                    f"{where}.name", f"{theirs.name!r}, this prefill has {sorted(self._components)}"
                )
            for name in ("tokens_per_row", "span"):
                if getattr(theirs, name) != getattr(ours, name):
                    text = f"decode has {getattr(theirs, name)}, prefill {getattr(ours, name)}"
                    raise RemoteProtocolError(f"{where}.{name}", text)
            try:
                theirs.layout.check_within(message.reach.arena_bytes, where)
                pair(ours.layout, theirs.layout)
            except (ValueError, LayoutMismatchError) as error:
                raise RemoteProtocolError(f"{where}.layout", str(error)) from None

    def _alive(self, peer: DecodePeer, now: float) -> None:
        silent_ms = (now - peer.heard) * 1e3
        if silent_ms >= self._limits.session_silence_ms:
            self._depart(peer, Cause.PEER_LOST, f"{peer.name} has been silent for {silent_ms:.0f} ms", now)
        else:
            self._timers.set(("alive", peer.name, 0), peer.heard + self._limits.session_silence_ms / 1e3)

    def _depart(self, peer: DecodePeer, cause: Cause, detail: str, now: float) -> None:
        del self.peers[peer.name]
        self._timers.clear(("alive", peer.name, 0))
        for session in [s for s in self.sessions.values() if s.peer == peer.name]:
            self._close(session, cause, detail, now)

    def _close(self, session: WriterSession, cause: Cause, detail: str, now: float) -> None:
        """The session says nothing any more; its mapping goes with its last write."""
        if session.state is WriterState.CLOSED:
            return
        session.state = WriterState.CLOSED
        del self.sessions[session.id]
        self._closing[session.id] = session
        for duty in list(session.duties.values()):
            self._timers.clear(("end", session.id, duty.number))
            if duty.state not in DUTY_ENDS:
                self._fail_duty(duty, cause, detail, now)
        self._unmap_if_quiet(session)

    def _unmap_if_quiet(self, session: WriterSession) -> None:
        if session.state is WriterState.CLOSED and not session.writes and session.id in self._closing:
            del self._closing[session.id]
            self._out.append(Unmap(session.id))

    # Grants

    def _grant(self, session: WriterSession, message: Grant, now: float) -> None:
        if session.state is not WriterState.UP:
            raise RemoteProtocolError("Grant.session", "a Grant before Registered")
        if session.known_end(message.grant) or session.outside(message.grant):
            return
        duty = session.duties.get(message.grant)
        if duty is None:
            duty = session.admit(message, now)
            self._out.append(Send(session.peer, Granted(session.id, message.grant)))
            room = self.rooms.get(message.room)
            if room is not None:
                self._attach(duty, room, now)
                return
            self._waiting.setdefault(message.room, []).append(duty)
            self._timers.set(("grant", session.id, message.grant), duty.deadline)
            if message.room in self._ended:
                self._fail_duty(duty, *self._ended[message.room], now)
        elif duty.end is not None:
            self._say_end(duty, now)
        else:
            self._out.append(Send(session.peer, Granted(session.id, message.grant)))

    def _abort(self, session: WriterSession, number: int, now: float) -> None:
        if session.known_end(number) or session.outside(number):
            return
        duty = session.duties.get(number)
        if duty is None:
            duty = session.refuse(number)
        elif duty.state in DUTY_ENDS:
            self._say_end(duty, now)
            return
        elif duty.state is not Duty.STOPPING:
            self._unwait(duty)
            duty.stop(DutyEvent.ABORT)
            room = self.rooms.get(duty.room)
            if room is not None:
                self._fail(room, Cause.ABORTED, f"{session.peer} aborted it", now)
        if duty.state is Duty.STOPPING:
            self._out.append(StopWriting(session.id, number))
        else:
            self._end(duty, Cause.ABORTED, "", now)

    def _attach(self, duty: DutyEntry, room: Room, now: float) -> None:
        """Grant and room have met."""
        self._timers.clear(("grant", duty.session.id, duty.number))
        duty.step(DutyEvent.OPEN)
        room.duties.append(duty)
        if room.state is PrefillRoom.FAILED:
            self._fail_duty(duty, room.cause, room.detail, now)
        elif duty.tokens != room.tokens:
            self._fail_duty(duty, Cause.BREACH, f"tokens: the grant says {duty.tokens}, the engine {room.tokens}", now)
        elif len(room.duties) > room.grants:
            self._fail_duty(duty, Cause.BREACH, f"grants: {len(room.duties)}, the engine expects {room.grants}", now)
        else:
            if len(room.duties) == room.grants:
                self._out.append(Leased(room.id))
            for cell in room.cells:
                self._write(duty, cell)
            self._complete(duty, room, now)

    def _write(self, duty: DutyEntry, cell: Cell) -> None:
        """Starts the write of what this cell and this grant have in common."""
        session = duty.session
        for share in duty.shares:
            component = session.components[share.component]
            low = max(share.first_row, cell.first_row)
            high = min(share.first_row + share.rows, cell.first_row + len(cell.source_slots))
            layers = component.layout.layer_range
            first, end = max(layers[0], cell.layers[0]), min(layers[1], cell.layers[1])
            if component.name != cell.component or low >= high or first >= end:
                continue
            byte_count = (high - low) * layer_bytes(component.layout, first, end)
            write = session.next_write
            session.next_write += 1
            session.writes[write] = duty, byte_count
            duty.in_flight += 1
            self._out.append(
                Write(
                    session=session.id,
                    grant=duty.number,
                    room=duty.room,
                    write=write,
                    component=share.component,
                    layers=(first, end),
                    source_slots=cell.source_slots[low - cell.first_row : high - cell.first_row],
                    target_slots=share.target_slots[low - share.first_row : high - share.first_row],
                )
            )

    def _complete(self, duty: DutyEntry, room: Room, now: float) -> None:
        """Lands an active duty whose bytes are all written, once the engine has said that there are no more."""
        if duty.state is not Duty.ACTIVE or duty.in_flight or room.state is not PrefillRoom.FINISHED:
            return
        if duty.written_bytes != duty.kv_bytes:
            text = f"cells: {duty.written_bytes} bytes were offered, the grant is {duty.kv_bytes}"
            self._fail_duty(duty, Cause.ENGINE, text, now)
            return
        duty.step(DutyEvent.COMPLETE)
        self._end(duty, Cause.REFUSED, "", now, aux=room.aux)
        if len(room.duties) == room.grants and all(d.state is Duty.LANDED for d in room.duties):
            room.state = step(PREFILL_ROOM, room.state, PrefillRoomEvent.LAND)
            self._timers.clear(("room", room.id, 0))
            self._out.append(Landed(room.id, sum(d.kv_bytes for d in room.duties)))
            room.detail = "the room has landed already"
            self._drain_if_quiet(room)

    def _fail_duty(self, duty: DutyEntry, cause: Cause, detail: str, now: float) -> None:
        """Ends a duty that is not over, and the room it is for."""
        if duty.state in (Duty.WAITING, Duty.ACTIVE):
            self._unwait(duty)
            duty.stop(DutyEvent.FAIL)
            if duty.state is Duty.STOPPING:
                self._out.append(StopWriting(duty.session.id, duty.number))
                if duty.session.state is WriterState.UP:
                    message = Failed(duty.session.id, duty.number, cause.value, detail[:500], quiescent=False)
                    self._out.append(Send(duty.session.peer, message))
            else:
                self._end(duty, cause, detail, now)
        room = self.rooms.get(duty.room)
        if room is not None and duty in room.duties:
            self._fail(room, cause, detail, now)

    def _unwait(self, duty: DutyEntry) -> None:
        if duty.state is Duty.WAITING:
            self._timers.clear(("grant", duty.session.id, duty.number))
            waiting = self._waiting[duty.room]
            waiting.remove(duty)
            if not waiting:
                del self._waiting[duty.room]

    def _settle(self, duty: DutyEntry, now: float) -> None:
        """A write of this duty is over."""
        if duty.state is Duty.STOPPING and not duty.in_flight:
            duty.step(DutyEvent.QUIET)
            self._end(duty, Cause.ABORTED, "", now)
        room = self.rooms.get(duty.room)
        if room is not None:
            self._drain_if_quiet(room)
        self._unmap_if_quiet(duty.session)

    def _end(self, duty: DutyEntry, cause: Cause, detail: str, now: float, *, aux: bytes = b"") -> None:
        duty.end = end_message(duty, aux=aux, cause=cause, detail=detail)
        self._say_end(duty, now)

    def _say_end(self, duty: DutyEntry, now: float) -> None:
        """Says how the grant ended, until Released; a closed session has nobody to say it to."""
        session = duty.session
        if session.state is WriterState.UP:
            assert duty.end is not None
            self._out.append(Send(session.peer, duty.end))
            duty.repeat_ms = min(max(2 * duty.repeat_ms, self._limits.resend_ms), self._limits.resend_ms_max)
            self._timers.set(("end", session.id, duty.number), now + duty.repeat_ms / 1e3)

    # Rooms

    def _check(self, room: Room, cell: Cell) -> None:
        component = self._components.get(cell.component)
        if component is None:
            raise LocalProtocolError(f"component: {cell.component!r} is none of {sorted(self._components)}")
        end_row, rows = cell.first_row + len(cell.source_slots), component.rows(room.tokens)
        if not 0 <= cell.first_row < end_row <= rows:
            raise LocalProtocolError(f"rows: [{cell.first_row}, {end_row}) of a room of {rows}")
        first, end = component.layout.layer_range
        if not first <= cell.layers[0] < cell.layers[1] <= end:
            raise LocalProtocolError(f"layers: {list(cell.layers)} of [{first}, {end})")
        low, high = int(cell.source_slots.min()), int(cell.source_slots.max())
        if low < 0 or high >= component.layout.slots:
            raise LocalProtocolError(f"slots: {low}..{high} of a pool of {component.layout.slots}")
        rows_here = np.array([[cell.first_row, len(cell.source_slots)]], dtype=np.int64)
        for (name, other_first, other_end), offered in room.offered.items():
            apart = other_end <= cell.layers[0] or cell.layers[1] <= other_first
            if name == cell.component and not apart and offered.overlaps(rows_here):
                raise LocalProtocolError(f"cell: rows [{cell.first_row}, {end_row}) were offered already")
        room.offered.setdefault((cell.component, *cell.layers), ExtentSet()).add(rows_here)

    def _fail(self, room: Room, cause: Cause, detail: str, now: float) -> None:
        """Ends a room, once; every grant of it ends too, and its pages are safe when nothing is in flight."""
        if room.state in (PrefillRoom.FAILED, PrefillRoom.LANDED):
            return
        room.state = step(PREFILL_ROOM, room.state, PrefillRoomEvent.FAIL)
        room.cause, room.detail = cause, detail
        self._timers.clear(("room", room.id, 0))
        self._out.append(RoomFailed(room.id, cause, detail))
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

    def _effects(self) -> list[PrefillEffect]:
        out = self._out.copy()
        self._out.clear()
        return out
