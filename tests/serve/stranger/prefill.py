"""A prefill worker: rooms that a router begins, grants that decode ranks make for them, and the rows that go there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.serve.stranger.layout import checksum, fault, landing, places, row_sum
from tests.serve.stranger.peer import Fields, Link, Unusable
from tests.serve.stranger.worker import Room, Worker


@dataclass(eq=False)
class Session:
    """What a decode rank has registered, and its grants."""

    link: Link
    register: Fields
    target: Any  # its arena, once it is mapped
    waiting: dict[int, Fields] = field(default_factory=dict)  # grants whose room has not begun
    ends: dict[int, tuple[str, Fields]] = field(default_factory=dict)  # of grants: the message and its fields
    stops: dict[int, int] = field(default_factory=dict)  # by room: where its latest piece has ended
    acknowledged: set[int] = field(default_factory=set)


class Prefill(Worker):
    """`row(ids, component, plane, row)` are the bytes of one row, `aux(ids)` what decode needs beside the KV.

    `target` makes a way to write of a Register's session and reach: shm.Target or mooncake.Target.
    """

    def __init__(
        self,
        target: Callable[[int, Fields], Any],
        row: Callable[[list[int], str, Fields, int], bytes],
        aux: Callable[[list[int]], bytes],
        **peer: Any,
    ) -> None:
        super().__init__(role="prefill", **peer)
        self.target, self.row, self.aux = target, row, aux
        self.sessions: dict[int, Session] = {}
        self.landed: list[int] = []  # KV bytes of each grant

    # Towards routers

    def load(self) -> Fields:
        return {"slots_free": 2_048, "slots_total": 2_048, "enable_hisparse": True}

    def begun(self, room: Room) -> None:
        for session in self.sessions.values():
            for grant in [each for each in session.waiting.values() if each["room"] == room.number]:
                del session.waiting[grant["grant"]]
                self._serve(session, grant)

    # Sessions

    def on_register(self, link: Link, register: Fields) -> None:
        number = register["session"]
        if number not in self.sessions:
            try:
                target = self.target(number, register["reach"])
            except (Unusable, OSError) as error:
                link.send("Reject", session=number, reason="transfer", fields=[str(error)[:512]])
                return
            self.sessions[number] = Session(link, register, target)
        link.send("Registered", session=number, bytes_ready=register["reach"]["arena_bytes"])

    def on_reject(self, link: Link, reject: Fields) -> None:
        super().on_reject(link, reject)
        if reject["session"] in self.sessions:
            self._leave(reject["session"])

    def _leave(self, number: int) -> None:
        """No write is started any more, and no mapping kept: decode's fence waits for that."""
        self.sessions.pop(number).target.close()
        for key in [key for key in self.repeated if key[:2] == ("end of grant", number)]:
            self.answered(key)

    # Grants

    def on_grant(self, link: Link, grant: Fields) -> None:
        session, number = self._session(link, grant), grant["grant"]
        if session is None or number in session.acknowledged:
            return  # a number that is over is over forever
        if number in session.ends:
            self._send_grant_end(session, number)
            return
        if wrong := fault(landing(session.register), grant):
            link.send("Reject", session=grant["session"], reason="breach", fields=[wrong])
            self._leave(grant["session"])
            return
        link.send("Granted", session=grant["session"], grant=number)
        if grant["room"] in self.rooms:
            self._serve(session, grant)
        else:
            session.waiting[number] = grant

    def _serve(self, session: Session, grant: Fields) -> None:
        """Writes every row of a grant. Nothing is in flight when this returns."""
        room = self.rooms[grant["room"]]
        if room.end is not None:
            self._fail(session, grant, room.end["reason"], "the room has ended")
            return
        before = session.stops.get(grant["room"], grant["prefix"])
        if before != grant["prefix"]:
            self._fail(session, grant, "breach", f"Grant.prefix: {grant['prefix']}, the grant before ends at {before}")
            return
        session.stops[grant["room"]] = grant["stop"]
        total = size = 0
        for part in grant["parts"]:
            component = landing(session.register)[part["component"]]
            for plane, row, at in places(component, part):
                content = self.row(room.ids, component["name"], plane, row)
                session.target.write(at, content)
                total, size = total + row_sum(component, plane, row, content), size + len(content)
        session.target.flush()
        self._end_grant(
            session,
            grant,
            "Landed",
            kv_bytes=size,
            aux=self.aux(room.ids) if grant["send_aux"] else b"",
            checksum=checksum(total) if grant["verify"] else b"",
        )
        self.landed.append(size)
        last = grant["stop"] >= grant["tokens"]
        room.grants_landed, room.kv_bytes = room.grants_landed + last, room.kv_bytes + size
        if room.grants_landed == len(room.begin["peers"]):
            self.end(room, "done", "")

    def on_abort(self, link: Link, abort: Fields) -> None:
        session, number = self._session(link, abort), abort["grant"]
        if session is None or number in session.acknowledged:
            return
        room = self.rooms.get(abort["room"])
        if room is None:
            self.refused.add(abort["room"])  # 0 where none is named: no room's number
        elif room.end is None:
            self.end(room, "aborted", "decode has given it up")
        session.waiting.pop(number, None)
        if number in session.ends:
            self._send_grant_end(session, number)
        else:
            self._end_grant(session, abort, "Drained")

    def on_released(self, link: Link, released: Fields) -> None:
        session = self._session(link, released)
        if session is not None:
            self.answered(("end of grant", released["session"], released["grant"]))
            session.acknowledged.add(released["grant"])  # a peer in earnest keeps a floor, and what is above

    def _fail(self, session: Session, grant: Fields, reason: str, detail: str) -> None:
        self._end_grant(session, grant, "Failed", reason=reason, detail=detail, quiescent=True)

    def _end_grant(self, session: Session, grant: Fields, message: str, **fields: Any) -> None:
        named = {"session": grant["session"], "grant": grant["grant"], **fields}
        session.ends[grant["grant"]] = message, named
        self._send_grant_end(session, grant["grant"])

    def _send_grant_end(self, session: Session, number: int) -> None:
        message, fields = session.ends[number]
        self.repeat(("end of grant", fields["session"], number), session.link, message, **fields)

    def _session(self, link: Link, fields: Fields) -> Session | None:
        session = self.sessions.get(fields["session"])
        if session is None:
            link.send("Reject", session=fields["session"], reason="unknown_session", fields=[])
        return session

    def close(self) -> None:
        super().close()
        for session in self.sessions.values():
            session.target.close()
