"""A decode worker: an arena that others write, sessions with prefill ranks, grants, and answers to a router."""

import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.serve.stranger.layout import checksum, packed, places, row_count, row_sum
from tests.serve.stranger.peer import Fields, Link
from tests.serve.stranger.worker import Room, Worker

FENCE_POLL_S = 0.05  # a choice of a host
OF_SESSIONS = ("Register", "Grant", "Abort")


@dataclass(eq=False)
class Session:
    """The right of one prefill rank to write this arena."""

    number: int
    link: Link
    up: bool = False
    reason: str | None = None  # why it has ended, until its fence is proven
    granted: int = 0
    rooms: list[Room] = field(default_factory=list)  # that wait for Registered
    grants: dict[int, Room] = field(default_factory=dict)  # that have not ended


class Decode(Worker):
    """`generate(ids, read, aux, count)` returns an answer's tokens, and `read(component, kind, layer, row)` the KV.

    `arena` is an offer of memory: shm.Arena or mooncake.Arena. Rooms have one source each.
    """

    def __init__(self, arena: Any, components: list[Fields], generate: Callable[..., list[int]], **peer: Any) -> None:
        super().__init__(role="decode", **peer)
        self.arena, self.components, self.generate = arena, components, generate
        # Even slots before odd ones: a room has many extents.
        self.free = {
            index: [*range(0, component["layout"]["slots"], 2), *range(1, component["layout"]["slots"], 2)]
            for index, component in enumerate(components)
        }
        self.sparse = len({component["name"] for component in components}) < len(components)
        self.sessions: dict[int, Session] = {}
        self.by_endpoint: dict[str, Session] = {}
        self.fence_due = 0.0
        self.verify = True
        self.landed: list[int] = []  # KV bytes of each room that has landed and was as its checksum says
        self.granted: list[int] = []
        self.ends: list[str] = []  # of grants
        arena.open(self.watch)

    # Towards routers

    def on_greeted(self, link: Link) -> None:
        super().on_greeted(link)
        if link.identity["role"] == "prefill":
            self._register(self._open(link.endpoint))

    def load(self) -> Fields:
        slots = [component["layout"]["slots"] for component in self.components]
        found = {"slots_free": len(self.free[len(slots) - 1]), "slots_total": slots[-1]}
        if self.sparse:
            found |= {"enable_hisparse": True, "sparse_slots_free": len(self.free[0]), "sparse_slots_total": slots[0]}
        return found

    def begun(self, room: Room) -> None:
        if len(room.begin["peers"]) != 1:
            self.end(room, "refused", "this worker takes the KV of one rank")
        else:
            self._open(room.begin["peers"][0]).rooms.append(room)
            self.grant_all()

    def on_tokens_acked(self, link: Link, acked: Fields) -> None:
        room = self.rooms[acked["room"]]
        if acked["next"] == room.end["tokens"]:
            self.answered(("Tokens", acked["room"]))

    def _answer(self, room: Room, ids: list[int]) -> None:
        packed_ids = struct.pack(f"<{len(ids)}I", *ids)
        self.repeat(("Tokens", room.number), room.router, "Tokens", room=room.number, first=0, ids=packed_ids)
        self.end(room, "length", "", tokens=len(ids))

    # Sessions

    def _open(self, endpoint: str) -> Session:
        """The session with a prefill rank; Register goes out once it is welcome."""
        if endpoint not in self.by_endpoint:
            link = self.dial(endpoint)
            session = self.by_endpoint[endpoint] = Session(secrets.randbits(64) | 1, link)
            self.sessions[session.number] = session
            if link.identity is not None:
                self._register(session)
        return self.by_endpoint[endpoint]

    def _register(self, session: Session) -> None:
        self.repeat(
            ("Register", session.number), session.link, "Register", session=session.number, components=self.components,
            reach=self.arena.reach(session.number), enable_hisparse=self.sparse,
        )  # fmt: skip

    def on_registered(self, link: Link, registered: Fields) -> None:
        session = self._session(link, registered)
        if (
            session is not None
            and registered["bytes_ready"] == self.arena.size
            and self.answered(("Register", session.number))
        ):
            session.up = True
            self.grant_all()

    def on_reject(self, link: Link, reject: Fields) -> None:
        super().on_reject(link, reject)
        session = self.sessions.get(reject["session"])
        if session is not None and session.reason is None:
            self.leave(session, "peer_lost", f"{reject['reason']}: {', '.join(reject['fields'])}")

    def leave(self, session: Session, reason: str, detail: str) -> None:
        """Ends a session: its rooms fail now, and their slots come back after the fence."""
        session.up, session.reason = False, reason
        del self.by_endpoint[session.link.endpoint]
        for key in [key for key in self.repeated if key[0] in OF_SESSIONS and key[1] == session.number]:
            self.answered(key)
        for room in (*session.rooms, *session.grants.values()):
            if room.end is None:
                self.end(room, reason, detail)

    def tick(self, now: float) -> None:
        super().tick(now)
        if now < self.fence_due:
            return
        self.fence_due = now + FENCE_POLL_S
        for session in [session for session in self.sessions.values() if session.reason is not None]:
            if self.arena.fenced(session.number):
                for room in session.grants.values():
                    self._free(room)
                del self.sessions[session.number]
            else:
                session.link.send("Reject", session=session.number, reason=session.reason, fields=[])

    # Grants

    def grant_all(self) -> None:
        """Numbers are dense: a room that was given up meanwhile takes one as well, for the Abort that names it."""
        for session in self.sessions.values():
            while session.up and session.rooms:
                room = session.rooms.pop(0)
                session.granted += 1
                if room.end is None:
                    self._grant(session, room)
                else:
                    self._abort(room, session, session.granted)

    def _grant(self, session: Session, room: Room) -> None:
        sparse = room.begin["enable_hisparse"]
        for index, component in enumerate(self.components):
            twice = [component["name"] for component in self.components].count(component["name"]) == 2
            if twice and component["memory"] != ("dram" if sparse else "hbm"):
                continue  # this room's is in the other memory
            rows = row_count(component, len(room.ids))
            room.slots[index] = [self.free[index].pop(0) for _ in range(rows)]
            room.parts.append({"component": index, "first_row": 0, "rows": rows, "extents": packed(room.slots[index])})
        room.grant = session, session.granted
        session.grants[session.granted] = room
        self.repeat(
            ("Grant", session.number, session.granted), session.link, "Grant", session=session.number,
            grant=session.granted, room=room.number, tokens=len(room.ids), prefix=0, parts=room.parts, send_aux=True,
            time_left_ms=room.begin["time_left_ms"], enable_hisparse=sparse, verify=self.verify,
        )  # fmt: skip

    def on_granted(self, link: Link, granted: Fields) -> None:
        self.granted.append(granted["grant"])
        self.answered(("Grant", granted["session"], granted["grant"]))

    def on_landed(self, link: Link, landed: Fields) -> None:
        room = self._over("Landed", link, landed)
        if room is None or room.end is not None:
            return
        room.kv_bytes = landed["kv_bytes"]
        rows, total, size = {}, 0, 0
        for part in room.parts:
            component = self.components[part["component"]]
            for plane, row, at in places(component, part):
                content = self.arena.read(at, plane["row_bytes"])
                rows[component["name"], plane["kind"], plane["layer"], row] = content
                total, size = total + row_sum(component, plane, row, content), size + len(content)
        self._free(room)  # what was in its slots is in `rows`
        if self.verify and checksum(total) != landed["checksum"]:
            self.end(room, "transfer", "the bytes that landed are not those that were read")
            return
        self.landed.append(size)
        count = room.begin["sampling"]["max_tokens"]
        self._answer(room, self.generate(room.ids, lambda *key: rows[key], landed["aux"], count))

    def on_failed(self, link: Link, failed: Fields) -> None:
        session = self._session(link, failed)
        if session is None:
            return
        room = self._over("Failed", link, failed) if failed["quiescent"] else session.grants.get(failed["grant"])
        if room is not None and room.end is None:
            self.end(room, failed["reason"], failed["detail"])
            if failed["quiescent"]:
                self._free(room)

    def on_drained(self, link: Link, drained: Fields) -> None:
        self._over("Drained", link, drained)

    def _over(self, message: str, link: Link, end: Fields) -> Room | None:
        """The room whose grant has ended just now: nobody will write its slots again."""
        session, key = self._session(link, end), (end["session"], end["grant"])
        if session is None:
            return None
        link.send("Released", session=key[0], grant=key[1])
        self.answered(("Grant", *key))
        self.answered(("Abort", *key))
        room = session.grants.pop(key[1], None)
        if room is not None:
            self.ends.append(message)
        if room is not None and room.end is not None:
            self._free(room)
        return room

    def _session(self, link: Link, fields: Fields) -> Session | None:
        """The one that a message is about; one that is over is unknown."""
        session = self.sessions.get(fields["session"])
        if session is None or session.reason is not None:
            link.send("Reject", session=fields["session"], reason="unknown_session", fields=[])
            return None
        return session

    def given_up(self, room: Room, reason: str) -> None:
        """At once for the router; the slots come back when prefill has ended the grant."""
        self.end(room, reason, "cancelled")
        if room.grant is not None:
            self._abort(room, *room.grant)

    def _abort(self, room: Room, session: Session, number: int) -> None:
        key = session.number, number
        self.answered(("Grant", *key))
        self.repeat(("Abort", *key), session.link, "Abort", session=key[0], grant=number, room=room.number)

    def _free(self, room: Room) -> None:
        for at, slots in room.slots.items():
            self.free[at] += slots
        room.slots = {}

    def close(self) -> None:
        super().close()
        self.arena.close()
