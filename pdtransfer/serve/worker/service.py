"""The daemon's side of the router, without I/O: rooms are started, streamed and ended, each once.

A room's id belongs to the router that began it. When a router is silent, sends Goodbye or restarts, its rooms are
stopped. Ended rooms are remembered, up to a bound, so that a late Begin revives nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from ...errors import SUCCESSES, Cause, LocalProtocolError, RemoteProtocolError
from ...handoff.liveness import NAME_TAKEN, Liveness, PeerProcess
from ...handoff.peers import Peers, Send
from ...handoff.tables import step
from ...handoff.timers import TimerKey, Timers, backoff_ms
from ...limits import ENDED_ROOMS_MAX, LOAD_MS, ROUTERS_MAX, TEXT_LENGTH_MAX, TOKENS_BURST_MAX, Limits
from ...wire import (
    Begin,
    Begun,
    Cancel,
    End,
    Ended,
    Goodbye,
    Hello,
    Identity,
    Load,
    Message,
    Ping,
    Pong,
    Reject,
    Tokens,
    TokensAcked,
    logprob_bytes,
    pack_ids,
)
from .service_rooms import SERVICE_ROOM, ServedRoom, ServedRouter, ServiceEvent, ServiceRoom


@dataclass(frozen=True, slots=True)
class StartRoom:
    """Do this room's work; sent once a room. Answer with `tokens` and one `end`."""

    peer: str
    begin: Begin


@dataclass(frozen=True, slots=True)
class StopRoom:
    """The room is not needed any more; sent at most once. It still ends with `end`."""

    room: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class IntroducePeers:
    """Rooms may name these prefill ranks: sessions with them may be opened ahead."""

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RefusedRoom:
    """A room was refused at its Begin, and never started."""

    begin: Begin
    end: End


ServiceEffect: TypeAlias = Send | StartRoom | RefusedRoom | StopRoom | IntroducePeers


class Service:
    """One daemon towards its routers: peers whose Hello has role "router"."""

    def __init__(self, identity: Identity, limits: Limits) -> None:
        self.identity, self.limits = identity, limits
        self._rooms: dict[int, ServedRoom] = {}
        self._prompts_bytes = 0  # of these rooms
        self._timers: Timers[TimerKey] = Timers()
        self._load: Load | None = None
        self._load_due = 0.0  # the earliest time for the next Load that is not an answer
        self._effects: list[ServiceEffect] = []
        self._peers: Peers[ServedRouter] = Peers(
            identity, limits, self._timers, self._effects.append, look=self._look, peers_max=ROUTERS_MAX
        )
        self._routers = self._peers.by_name

    def knows(self, peer: str) -> bool:
        """True if this peer sent Hello as a router."""
        return peer in self._routers

    @property
    def room_count(self) -> int:
        """Rooms that have not ended, or whose End was not acknowledged."""
        return len(self._rooms)

    def idle(self, now: float) -> bool:
        """True if nothing runs, and no live router has an End to acknowledge."""
        return all(room.end is not None and room.router.liveness.silent(now) for room in self._rooms.values())

    def next_tick(self) -> float | None:
        """When `tick` has something to do; None when nothing is due."""
        return self._timers.next()

    def receive(self, peer: str, message: Message, now: float) -> list[ServiceEffect]:
        """Takes a message of the router `peer`; raises RemoteProtocolError for a breach.

        Messages before its Hello are dropped: the Pong that answers its Ping makes it send Hello.
        """
        router = self._routers.get(peer)
        match message:
            case Hello():
                self._hello(peer, message, now)
            case Ping():
                self._ping(peer, router, message, now)
            case Goodbye() if router is not None and router.liveness.receive(message, now) is PeerProcess.LEFT:
                router.liveness.leave(now)
                self._stop_all(router, Cause.SHUTDOWN)
            case Reject(reason=reason) if reason == NAME_TAKEN:
                pass  # of this worker or of another: what is under way goes on
            case Reject() if router is not None:
                self._stop_all(router, Cause.of(message.reason, Cause.BREACH))
            case Begin() if router is not None:
                self._begin(router, message, now)
            case Cancel() if router is not None:
                self._cancel(router, message)
            case TokensAcked() if router is not None:
                self._acked(router, message, now)
            case Ended() if router is not None:
                self._acknowledged(router, message)
            case Goodbye() | Reject() | Begin() | Cancel() | TokensAcked() | Ended():
                pass
            case _:
                raise RemoteProtocolError(
                    "kind", f"{type(message).__name__} is not a message from a router to a daemon"
                )
        return self._take()

    def tokens(self, room_id: int, ids: list[int], now: float, *, logprobs: bytes = b"") -> list[ServiceEffect]:
        """The engine generated `ids`, with their packed logprobs. Those of a stopped or ended room are dropped."""
        room = self._rooms.get(room_id)
        if room is None or room.state is not ServiceRoom.RUNNING:
            return []
        if room.generated + len(ids) > room.tokens_max:
            text = f"room {room_id:016x}: {room.generated + len(ids)} tokens generated, max_tokens is {room.tokens_max}"
            raise LocalProtocolError(text)
        if len(logprobs) != room.logprob_bytes * len(ids):
            text = (
                f"room {room_id:016x}: {len(logprobs)} bytes of logprobs for {len(ids)} tokens of {room.logprob_bytes}"
            )
            raise LocalProtocolError(text)
        room.unacked += ids
        room.logprobs += logprobs
        room.generated += len(ids)
        if room.sent == room.acked:
            room.repeat_ms = 0  # Nothing was in flight: the first repetition comes soon.
            self._schedule(room, now)
        self._stream(room)
        return self._take()

    def end(self, end: End, now: float) -> list[ServiceEffect]:
        """The room ended here; only its first end counts. `tokens` is filled in; a stopped room fails."""
        room = self._rooms.get(end.room)
        if room is None or room.state is ServiceRoom.ENDING:
            return []
        reason = room.cause.value if room.cause is not None and end.reason in SUCCESSES else end.reason
        room.end = replace(end, reason=reason, detail=end.detail[:TEXT_LENGTH_MAX], tokens=room.generated)
        room.state = step(SERVICE_ROOM, room.state, ServiceEvent.END)
        room.repeat_ms = 0
        self._send(room, room.end)
        self._schedule(room, now)
        return self._take()

    def load(self, load: Load, now: float) -> list[ServiceEffect]:
        """The daemon's free resources; sent when they change, at a bounded rate. A draining daemon begins no room."""
        if load != self._load:
            self._load = load
            if now >= self._load_due:
                self._send_load(now)
            else:
                self._timers.set(("load", "", 0), self._load_due)
        return self._take()

    def tick(self, now: float) -> list[ServiceEffect]:
        """Repeats what is unacknowledged, and stops the rooms of silent routers."""
        while (key := self._timers.pop(now)) is not None:
            match key:
                case ("room", int(room_id), _):
                    self._repeat(self._rooms[room_id], now)
                case ("load", _, _):
                    self._send_load(now)
                case _:
                    is_known = self._peers.tick(key, now)
                    assert is_known, key
        return self._take()

    def gone(self, peer: str, evidence: str, now: float) -> list[ServiceEffect]:
        """There is evidence that the router is gone; empty: no longer. It is repeated while it stands."""
        self._peers.gone(peer, evidence, now)
        return self._take()

    def goodbye(self, reason: str) -> list[ServiceEffect]:
        """This process ends: informs every router, which gives up the rooms that have not ended."""
        self._effects += [Send(peer, Goodbye(self.identity.incarnation, reason)) for peer in self._routers]
        return self._take()

    def _hello(self, peer: str, message: Hello, now: float) -> None:
        theirs = message.identity
        if theirs.role != "router":
            raise RemoteProtocolError("role", f"{theirs.role}, only a router may request rooms of a daemon")
        process = self._peers.answer(
            peer,
            message,
            now,
            misfits=(),
            new=lambda: ServedRouter(peer, Liveness(self.limits, now, theirs.incarnation)),
            replaced=lambda router, _: self._stop_all(router, Cause.PEER_RESTARTED),
        )
        if process not in (PeerProcess.LATE, PeerProcess.REFUSED) and self._load is not None:
            self._effects.append(Send(peer, self._load))

    def _ping(self, peer: str, router: ServedRouter | None, message: Ping, now: float) -> None:
        if router is not None and router.liveness.receive(message, now) is not PeerProcess.SAME:
            return
        self._effects.append(Send(peer, Pong(self.identity.incarnation)))
        if router is not None:
            router.liveness.seen(now)
            if self._load is not None:
                self._effects.append(Send(peer, self._load))
            if message.peers:
                self._effects.append(IntroducePeers(message.peers))

    def _begin(self, router: ServedRouter, begin: Begin, now: float) -> None:
        room = self._owned(router, begin.room)
        if room is not None:
            self._send(room, Begun(room.id) if room.end is None else room.end)
        elif begin.room in router.ended:
            self._effects.append(Send(router.name, router.ended[begin.room]))
        elif router.liveness.silent(now):
            pass  # Its rooms were just stopped; it repeats Begin once its Ping arrives.
        elif self._load is not None and self._load.draining:
            self._refuse(router, begin, End(begin.room, Cause.SHUTDOWN.value, f"{self.identity.node} is draining", 0))
        elif (text := self._full(begin)) is not None:
            retry_ms = self.limits.resend_ms_max
            self._refuse(router, begin, End(begin.room, Cause.FULL.value, text, 0, retry_ms=retry_ms))
        else:
            sampling = begin.sampling
            room = ServedRoom(
                begin.room, router, sampling.max_tokens, len(begin.prompt), logprob_bytes=logprob_bytes(sampling)
            )
            self._rooms[room.id] = router.rooms[room.id] = room
            self._prompts_bytes += room.prompt_bytes
            self._effects.append(StartRoom(router.name, begin))
            self._send(room, Begun(room.id))
            self._schedule(room, now)

    def _full(self, begin: Begin) -> str | None:
        """Why no such room may be begun now; None if it may."""
        rooms, held_bytes, prompt_bytes, limits = len(self._rooms), self._prompts_bytes, len(begin.prompt), self.limits
        if rooms >= limits.rooms_max:
            return f"rooms: {rooms} of rooms_max {limits.rooms_max}"
        if held_bytes + prompt_bytes > limits.prompts_bytes_max:
            return (
                f"prompts: {held_bytes} bytes and {prompt_bytes} more, prompts_bytes_max is {limits.prompts_bytes_max}"
            )
        return None

    def _refuse(self, router: ServedRouter, begin: Begin, end: End) -> None:
        """Answers with an End that is only remembered: Begin repeats until it arrives."""
        self._remember(router, end)
        self._effects += [Send(router.name, end), RefusedRoom(begin, end)]

    def _cancel(self, router: ServedRouter, message: Cancel) -> None:
        room = self._owned(router, message.room)
        if room is not None:
            self._stop(room, Cause.of(message.reason, Cause.ABORTED))
            if room.end is not None:
                self._send(room, room.end)
            return
        if message.room not in router.ended:
            # Its Begin may still arrive: refuse it from now on.
            self._remember(router, End(message.room, Cause.ABORTED.value, "cancelled before it began", 0))
        self._effects.append(Send(router.name, router.ended[message.room]))

    def _acked(self, router: ServedRouter, message: TokensAcked, now: float) -> None:
        room = self._owned(router, message.room)
        # Beyond what was generated: meant for an earlier process with the same room.
        if room is None or not room.acked < message.next <= room.generated:
            return
        del room.unacked[: message.next - room.acked]
        del room.logprobs[: (message.next - room.acked) * room.logprob_bytes]
        room.acked, room.sent = message.next, max(room.sent, message.next)
        room.repeat_ms = 0
        self._stream(room)
        self._schedule(room, now)

    def _acknowledged(self, router: ServedRouter, message: Ended) -> None:
        room = self._owned(router, message.room)
        if room is None or room.end is None:
            return  # Meant for an earlier process.
        room.state = step(SERVICE_ROOM, room.state, ServiceEvent.ACKNOWLEDGE)
        self._forget(room, room.end)

    def _forget(self, room: ServedRoom, end: End) -> None:
        del self._rooms[room.id], room.router.rooms[room.id]
        self._prompts_bytes -= room.prompt_bytes
        self._timers.clear(("room", room.id, 0))
        self._remember(room.router, end)

    def _remember(self, router: ServedRouter, end: End) -> None:
        router.ended[end.room] = end
        if len(router.ended) > ENDED_ROOMS_MAX:
            router.ended.popitem(last=False)

    def _owned(self, router: ServedRouter, room_id: int) -> ServedRoom | None:
        """The room of that id that has not ended. Raises RemoteProtocolError if it belongs to another router."""
        room = self._rooms.get(room_id)
        if room is not None and room.router is not router:
            raise RemoteProtocolError("room", f"{room_id:016x} is not {router.name}'s")
        return room

    def _stop(self, room: ServedRoom, cause: Cause) -> None:
        if room.state is ServiceRoom.RUNNING:
            room.cause = cause
            self._effects.append(StopRoom(room.id, cause))
        room.state = step(SERVICE_ROOM, room.state, ServiceEvent.STOP)
        room.unacked.clear()
        room.logprobs.clear()
        room.acked = room.sent = room.generated
        if room.end is None:
            room.repeat_ms = 0
            self._timers.clear(("room", room.id, 0))

    def _stop_all(self, router: ServedRouter, cause: Cause) -> None:
        for room in router.rooms.values():
            if room.state is ServiceRoom.RUNNING:
                self._stop(room, cause)

    def _look(self, router: ServedRouter, now: float) -> None:
        """Stops a silent router's rooms. A router that stays away with nothing running is forgotten with its Ends."""
        if router.liveness.silent(now):
            self._stop_all(router, Cause.PEER_LOST)
            away_ms = max(self.limits.room_deadline_ms, 2 * self.limits.silence_ms)
            ended = all(room.end is not None for room in router.rooms.values())
            if ended and router.liveness.silent_ms(now) >= away_ms:
                for room in router.rooms.values():
                    del self._rooms[room.id]
                    self._prompts_bytes -= room.prompt_bytes
                    self._timers.clear(("room", room.id, 0))
                self._peers.remove(router)

    def _stream(self, room: ServedRoom) -> None:
        """Sends what was not sent yet, once all that was is acknowledged. A router that is behind has one message of
        each room to read, however many tokens are generated meanwhile."""
        if room.sent == room.acked < room.generated:
            room.sent = min(room.generated, room.acked + TOKENS_BURST_MAX)
            self._send_tokens(room)

    def _send_tokens(self, room: ServedRoom) -> None:
        count = room.sent - room.acked
        logprobs = bytes(room.logprobs[: count * room.logprob_bytes])
        self._send(room, Tokens(room.id, room.acked, pack_ids(room.unacked[:count]), logprobs))

    def _repeat(self, room: ServedRoom, now: float) -> None:
        """Repeats what is unacknowledged, but not to a silent router. Without tokens or an end it repeats Begun: a
        router that has forgotten the room answers Cancel."""
        if not room.router.liveness.silent(now):
            if room.sent > room.acked:
                self._send_tokens(room)
            if room.end is not None:
                self._send(room, room.end)
            elif not room.unacked:
                self._send(room, Begun(room.id))
        self._schedule(room, now)

    def _schedule(self, room: ServedRoom, now: float) -> None:
        room.repeat_ms = backoff_ms(room.repeat_ms, self.limits.resend_ms, self.limits.resend_ms_max)
        pause_ms = room.repeat_ms if room.unacked or room.end is not None else self.limits.resend_ms_max
        self._timers.set(("room", room.id, 0), now + pause_ms / 1e3)

    def _send_load(self, now: float) -> None:
        assert self._load is not None
        self._load_due = now + LOAD_MS / 1e3
        self._timers.clear(("load", "", 0))
        alive = [peer for peer, router in self._routers.items() if not router.liveness.silent(now)]
        self._effects += [Send(peer, self._load) for peer in alive]

    def _send(self, room: ServedRoom, message: Message) -> None:
        self._effects.append(Send(room.router.name, message))

    def _take(self) -> list[ServiceEffect]:
        effects = self._effects.copy()
        self._effects.clear()
        return effects
