"""The router's core, sans I/O: each request gets a room on two workers, is streamed in order, and ends once.

A request is identified by the id of its first room. A room that fails before its first token is prefilled again once,
under a new id. One that fails later is resumed, if the request allows it: another room goes on after the tokens that
were delivered. A first token that prefill has sent is no end of that: the next room has to pick it again.
Messages about unknown rooms are answered with Cancel or Ended and otherwise ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from msgspec.structs import replace

from .....errors import SUCCESSES, Cause, RemoteProtocolError
from .....handoff.peers import Send
from .....handoff.tables import step
from .....handoff.timers import Timers, backoff_ms
from .....limits import RESUMPTIONS_MAX, TEXT_LENGTH_MAX, Limits
from .....wire import (
    Begin,
    Begun,
    Cancel,
    End,
    Ended,
    Identity,
    Message,
    Reject,
    Tokens,
    TokensAcked,
    logprob_bytes,
    unpack_ids,
    unpack_logprobs,
)
from ...fleet.roles import Departure, NoPair, Role
from ...front.json_bodies import AnswerFailedError
from .placement import WorkerPair
from .router_effects import FINAL_CAUSES, MUTUAL_CAUSES, Emit, RoomEnded, RoutingEffect
from .router_rooms import LEG, AnswerSoFar, CompletionRequest, Leg, LegEvent, RoomLeg, RoutedRoom, dense
from .worker_pool import WorkerPool
from .workers import Worker


class Routing:
    """All requests of one router. A peer is the endpoint of a worker; decode dials prefill by the same endpoint."""

    def __init__(
        self,
        identity: Identity,
        *,
        prefill: Iterable[str],
        decode: Iterable[str],
        limits: Limits,
        mint: Callable[[], int],
    ) -> None:
        self._limits, self._mint = limits, mint
        self._effects: list[RoutingEffect] = []
        self.workers = WorkerPool(identity, prefill, decode, limits, self._effects.append, self._lost)
        self._rooms: dict[int, RoutedRoom] = {}
        self.requests: dict[int, RoutedRoom] = {}  # that have no end yet, by their ids: the room that may still answer
        self._timers: Timers[tuple[str, int]] = Timers()
        self._closed = False
        self.retries = self.resumptions = self.stayed = 0
        self.prefix_tokens = 0  # prompt tokens placed where they were cached

    @property
    def rooms(self) -> Collection[RoutedRoom]:
        """Rooms that have not ended on both workers."""
        return self._rooms.values()

    def start(self, now: float) -> list[RoutingEffect]:
        """Sends the first Hello to each worker."""
        self.workers.start(now)
        return self._take()

    def next_tick(self) -> float | None:
        """Returns when `tick` is due next, None when nothing is."""
        due = [when for when in (self._timers.next(), self.workers.timers.next()) if when is not None]
        return min(due, default=None)

    def submit(self, request: CompletionRequest, now: float) -> tuple[int, list[RoutingEffect]]:
        """Begins a room for the request on the least loaded pair of workers. The request, by the id of that room, ends
        with the RoomEnded of its last room. Raises AnswerFailedError where it cannot begin."""
        retry_ms = self._limits.resend_ms_max
        if self._closed:
            raise AnswerFailedError("the router shuts down", Cause.SHUTDOWN, retry_ms=retry_ms)
        # Rooms being cancelled count, because their workers still hold them.
        if len(self._rooms) >= self._limits.rooms_max:
            text = f"rooms: {len(self._rooms)} of rooms_max {self._limits.rooms_max}"
            raise AnswerFailedError(text, Cause.FULL, retry_ms=retry_ms)
        request, pair = self._choose(request, (), now, may_stay=True)
        if isinstance(pair, NoPair):
            cause = Cause.PEER_LOST if pair.retry_ms is None else Cause.FULL
            raise AnswerFailedError(pair.detail, cause, retry_ms=retry_ms if pair.retry_ms is None else pair.retry_ms)
        return self._open(request, pair, now).request_id, self._take()

    def cancel(self, request: int, now: float) -> list[RoutingEffect]:
        """The client disconnected. Ignores a request that has ended."""
        room = self.requests.get(request)
        if room is not None:
            self._fail(room, Cause.ABORTED, "the client disconnected", now)
        return self._take()

    def stop(self, request: int, now: float) -> list[RoutingEffect]:
        """The answer is complete before decode ends it: finishes the request, and cancels its room. Ignores a request
        that has ended."""
        room = self.requests.get(request)
        if room is not None:
            self.workers.answered(room.decode.worker, room.keys)
            self._end_on_workers(room, Cause.ABORTED, now)
            self._over(room, by_workers=False)
        return self._take()

    def receive(self, peer: str, message: Message, now: float) -> list[RoutingEffect]:
        """Handles a message of the worker `peer`. Raises RemoteProtocolError for a breach."""
        worker = self.workers.by_peer.get(peer)
        if worker is None:
            return []  # It was removed, and its connection is being closed.
        if not self.workers.receive(worker, message, now):
            if not isinstance(message, Begun | Tokens | End):
                raise RemoteProtocolError(
                    "kind", f"{type(message).__name__} is not a message from a daemon to a router"
                )
            room = self._rooms.get(message.room)
            if room is None:
                answer = Ended(message.room) if isinstance(message, End) else Cancel(message.room, Cause.ABORTED.value)
                self._effects.append(Send(peer, answer))
                return self._take()
            leg = next((candidate for candidate in room.legs if candidate.worker is worker), None)
            if leg is None:
                raise RemoteProtocolError("room", f"{room.id:016x} is not on {peer}")
            match message:
                case Begun():
                    self._begun(room, leg)
                case Tokens():
                    self._tokens(room, leg, message, now)
                case End():
                    self._end(room, leg, message, now)
        return self._take()

    def gone(self, peer: str, evidence: str, now: float) -> list[RoutingEffect]:
        """As WorkerPool.gone."""
        self.workers.gone(peer, evidence, now)
        return self._take()

    def breach(self, peer: str, error: RemoteProtocolError, now: float) -> list[RoutingEffect]:
        """The worker `peer` broke the protocol: loses it, and connects again later."""
        worker = self.workers.by_peer.get(peer)
        if worker is None:
            return []
        self._effects.append(Send(peer, Reject(0, Cause.BREACH.value, (str(error)[:TEXT_LENGTH_MAX],))))
        self.workers.refuse(worker, Cause.BREACH, f"{peer} broke the protocol: {error}", now)
        return self._take()

    def tick(self, now: float) -> list[RoutingEffect]:
        """Repeats unanswered messages, and ends rooms at their deadlines."""
        self.workers.tick(now)
        while (key := self._timers.pop(now)) is not None:
            kind, room_id = key
            room = self._rooms[room_id]
            if kind == "deadline":
                self._deadline(room, now)
            else:
                self._repeat(room, next(leg for leg in room.legs if leg.worker.role == kind), now)
        return self._take()

    def add_worker(self, peer: str, role: Role, now: float) -> list[RoutingEffect]:
        """Takes a worker in, or keeps one that was to leave or to drain. Its role must be the one it has."""
        self.workers.add(peer, role, now)
        return self._take()

    def depart_worker(self, peer: str, departure: Departure) -> list[RoutingEffect]:
        """Gives the worker no new rooms, and forgets one that leaves once its rooms have ended (WorkerLeft)."""
        self.workers.depart(peer, departure)
        return self._take()

    def close(self, now: float) -> list[RoutingEffect]:
        """Fails unfinished requests, and sends Goodbye to the workers."""
        self._closed = True
        for room in list(self.requests.values()):
            self._fail(room, Cause.SHUTDOWN, "the router shuts down", now)
        self.workers.goodbye(Cause.SHUTDOWN.value)
        return self._take()

    def _open(
        self, request: CompletionRequest, pair: WorkerPair, now: float, failed: RoutedRoom | None = None
    ) -> RoutedRoom:
        """Begins a room; `failed` is the one before it of the same request."""
        room_id = self._mint()
        while not room_id or room_id in self._rooms or room_id in self.requests:  # 0 names none on the wire
            room_id = self._mint()
        begin = request.begin(room_id)
        if pair.prefill is None:  # decode computes what it has not cached
            rest_max = min(pair.decode.rest_max, self._limits.turn_tokens_max)
            prefill, decode = None, _leg(pair.decode, begin, peers=pair.decode.endpoints, rest_max=rest_max)
        else:
            early = request.early and (failed is None or failed.delivered is None)
            prefill = _leg(pair.prefill, begin, peers=pair.decode.names, first_token=early)
            decode = _leg(pair.decode, begin, peers=pair.prefill.endpoints)
        keys = self.workers.answer_keys(pair.decode, request.prompt, request.salt)
        deadline = now + self._limits.room_deadline_ms / 1e3
        room = RoutedRoom(room_id, room_id, request, prefill, decode, deadline, keys)
        if failed is not None:
            room.request_id, room.deadline, room.so_far = failed.request_id, failed.deadline, failed.so_far
            room.repeats = failed.delivered
            room.retried = failed.retried or failed.prefill is not None  # decode alone was no pair's attempt
        elif request.enable_resume:
            room.so_far = AnswerSoFar(request)
        self._rooms[room_id] = self.requests[room.request_id] = room
        self.prefix_tokens += self.workers.begin(pair, room_id, request)
        self.stayed += pair.prefill is None
        self._timers.set(("deadline", room_id), room.deadline)
        for leg in room.legs:
            self._repeat(room, leg, now)
        return room

    def _begun(self, room: RoutedRoom, leg: RoomLeg) -> None:
        if leg.state is Leg.BEGINNING:
            self._timers.clear((leg.worker.role, room.id))
        leg.state = step(LEG, leg.state, LegEvent.BEGUN)

    def _tokens(self, room: RoutedRoom, leg: RoomLeg, message: Tokens, now: float) -> None:
        ids, early = unpack_ids("Tokens.ids", message.ids), leg is room.prefill
        if early and not (leg.begin.first_token and len(ids) == 1):
            raise RemoteProtocolError("Tokens.room", f"{room.id:016x} is not decoded on {leg.worker.peer}")
        self._begun(room, leg)
        if leg.state is not Leg.RUNNING:
            return  # Its End is in flight or has arrived: the tokens are not needed.
        upto, sampling = message.first + len(ids), room.request.sampling
        tokens_max = 1 if early else sampling.max_tokens
        text = f"sends {upto} tokens, max_tokens is {tokens_max}" if upto > tokens_max else ""
        try:
            unpack_logprobs("Tokens.logprobs", message.logprobs, sampling, len(ids))
        except RemoteProtocolError as error:  # of this room alone: a daemon before v1.3 sends none
            text = text or str(error)
        if text:
            self._fail(room, Cause.BREACH, f"{leg.node}: {text}", now, (leg.worker,))
            return
        if early:
            self._effects.append(Send(leg.worker.peer, TokensAcked(room.id, upto)))
            if room.received == 0 and room.repeats is None:
                room.repeats = int(ids[0])
                self._deliver(room, ids.tolist(), message.logprobs)
            return
        if message.first <= room.received < upto:
            received = room.received - message.first
            if room.received == 0 and room.repeats is not None:
                if (first := int(ids[0])) != room.repeats:
                    text = f"{leg.node}: cannot go on: it picks {first} where {room.repeats} was delivered"
                    self._fail(room, Cause.ENGINE, text, now, (leg.worker,))
                    return
                received = 1
            room.generated(message.ids[4 * (room.received - message.first) :])
            new_ids: list[int] = ids[received:].tolist()
            logprobs = message.logprobs[received * logprob_bytes(sampling) :]
            room.received = upto
            room.deadline = now + self._limits.room_deadline_ms / 1e3
            if new_ids:
                self._deliver(room, new_ids, logprobs)
        # After a gap nothing is kept: the missing tokens are repeated, and these with them.
        self._effects.append(Send(leg.worker.peer, TokensAcked(room.id, room.received)))
        if leg.pending_end is not None and room.received >= leg.pending_end.tokens:
            self._ended(room, leg, leg.pending_end, now)

    def _deliver(self, room: RoutedRoom, ids: list[int], logprobs: bytes) -> None:
        self._effects.append(Emit(room.request_id, ids, logprobs))
        if room.so_far is not None:
            room.so_far.add(ids)

    def _end(self, room: RoutedRoom, leg: RoomLeg, end: End, now: float) -> None:
        if leg.state is Leg.ENDED:
            self._effects.append(Send(leg.worker.peer, Ended(room.id)))
            return
        if leg is room.decode and room.is_open and end.reason in SUCCESSES:
            tokens_max = room.request.sampling.max_tokens
            if not room.received <= end.tokens <= tokens_max:
                text = f"End counts {end.tokens} tokens, {room.received} came, max_tokens is {tokens_max}"
                end = replace(end, reason=Cause.BREACH.value, detail=text)
            elif room.received < end.tokens:
                leg.pending_end = end  # Left unanswered, so that it and the missing tokens are repeated.
                self._begun(room, leg)
                return
        self._ended(room, leg, end, now)

    def _ended(self, room: RoutedRoom, leg: RoomLeg, end: End, now: float) -> None:
        leg.end = end
        self._end_leg(room, leg, LegEvent.END)
        self._effects.append(Send(leg.worker.peer, Ended(room.id)))
        # Prefill ends a room as aborted because decode has given it up: the cause is decode's, whose End is on its way.
        secondary = leg is room.prefill and end.reason == Cause.ABORTED.value and room.decode.state is not Leg.ENDED
        if leg is room.decode and end.reason in SUCCESSES and room.is_open:
            self.workers.answered(leg.worker, room.keys)
        if end.reason not in SUCCESSES and not secondary:
            cause = Cause.of(end.reason, Cause.ENGINE)
            blamed = tuple(faulty.worker for faulty in (room.legs if cause in MUTUAL_CAUSES else (leg,)))
            if room.needs(leg):
                self._fail(room, cause, f"{leg.node}: {end.detail or end.reason}", now, blamed, end.retry_ms)
        self._settle(room)

    def _lost(self, worker: Worker, cause: Cause, detail: str, now: float) -> None:
        for room_id in list(worker.rooms):
            room = self._rooms[room_id]
            leg = next(leg for leg in room.legs if leg.worker is worker)
            self._end_leg(room, leg, LegEvent.LOSE)
            if room.needs(leg):
                self._fail(room, cause, detail, now, (worker,))
            self._settle(room)

    def _settle(self, room: RoutedRoom) -> None:
        """Finishes a room whose legs have both ended, and removes it."""
        for leg in room.legs:
            self.workers.left(leg.worker)
        if any(leg.state is not Leg.ENDED for leg in room.legs):
            return
        if room.is_open:
            assert room.decode.end is not None
            room.is_open = False
            self._over(room)
        del self._rooms[room.id]
        self._timers.clear(("deadline", room.id))

    def _over(self, room: RoutedRoom, **how: Any) -> None:
        """The request ends with this room."""
        del self.requests[room.request_id]
        self._effects.append(_room_ended(room, **how))

    def _end_on_workers(self, room: RoutedRoom, cause: Cause, now: float) -> None:
        """Ends the room for its client, and cancels it on the workers that have not ended it."""
        assert room.is_open
        room.is_open, room.cause = False, cause
        self._timers.set(("deadline", room.id), now + self._limits.room_deadline_ms / 1e3)
        for leg in room.legs:
            if leg.state is not Leg.ENDED:
                leg.state, leg.repeat_ms = step(LEG, leg.state, LegEvent.CANCEL), 0
                self._repeat(room, leg, now)

    def _fail(
        self,
        room: RoutedRoom,
        cause: Cause,
        detail: str,
        now: float,
        blamed: tuple[Worker, ...] = (),
        retry_ms: int = 0,
    ) -> None:
        """Ends this room; retries the request where that can help, else fails it."""
        if cause is Cause.FULL:
            for worker in blamed:
                worker.mark_full(now + retry_ms / 1e3, enable_hisparse=room.request.enable_hisparse)
        retry, so_far = self._retry(room, blamed, cause, now), room.so_far
        self._end_on_workers(room, cause, now)
        if retry is None:
            if cause is Cause.REFUSED and so_far is not None and so_far.lost is not None:
                cause, detail = so_far.lost[0], f"{so_far.lost[1]}; it was not resumed: {detail}"
            self._over(room, cause=cause, detail=detail, retry_ms=retry_ms)
            return
        resumed = so_far is not None and so_far.repeated is not None
        again = self._open(*retry, now, room)
        self._effects.append(_room_ended(room, cause=cause, detail=detail, next_room=again.id, resumed=resumed))
        if so_far is not None and resumed:
            self.resumptions += 1
            so_far.resumptions += 1
            if cause is not Cause.REFUSED:
                so_far.lost = cause, detail
        else:
            self.retries += 1

    def _retry(
        self, room: RoutedRoom, blamed: tuple[Worker, ...], cause: Cause, now: float
    ) -> tuple[CompletionRequest, WorkerPair] | None:
        """Returns the request and pair for a retry, or None. Never retries a pair that refused, or a full worker. A
        HiSparse request that every worker refused is retried without HiSparse."""
        if cause in FINAL_CAUSES or self._closed:
            return None
        asked, so_far = room.request, room.so_far
        if so_far is not None and so_far.repeated is not None:
            if so_far.resumptions == RESUMPTIONS_MAX:
                return None
            asked = so_far.rest(enable_hisparse=asked.enable_hisparse)
        elif room.retried or room.received:
            return None
        request, pair = self._choose(asked, blamed, now)
        if isinstance(pair, NoPair):
            return None
        again = pair.prefill in blamed, pair.decode in blamed
        if cause is Cause.REFUSED and all(again):
            if not request.enable_hisparse:
                return None if asked == request else (request, pair)
            request = dense(request)
            pair = self.workers.choose(request, blamed, now)
            return None if isinstance(pair, NoPair) else (request, pair)
        return None if cause is Cause.FULL and any(again) else (request, pair)

    def _choose(
        self, request: CompletionRequest, avoid: tuple[Worker, ...], now: float, *, may_stay: bool = False
    ) -> tuple[CompletionRequest, WorkerPair | NoPair]:
        """Chooses a pair. A HiSparse request that no worker supports is decoded densely. `may_stay`: as FreeSlots,
        for the first attempt alone, since decode may have lost what it had."""
        pair = self.workers.choose(request, avoid, now, may_stay=may_stay)
        if request.enable_hisparse and isinstance(pair, NoPair) and pair.retry_ms is None:
            request = dense(request)
            pair = self.workers.choose(request, avoid, now)
        return request, pair

    def _deadline(self, room: RoutedRoom, now: float) -> None:
        if room.is_open:
            if now < room.deadline:
                self._timers.set(("deadline", room.id), room.deadline)
            else:
                progress = ", ".join([_progress(room, leg) for leg in room.legs])
                text = f"no progress in {self._limits.room_deadline_ms} ms: {progress}"
                self._fail(room, Cause.DEADLINE, text, now)
            return
        # Its workers are alive and never ended it: their later messages count as those of an unknown room.
        for leg in room.legs:
            if leg.state is not Leg.ENDED:
                self._end_leg(room, leg, LegEvent.LOSE)
        self._settle(room)

    def _end_leg(self, room: RoutedRoom, leg: RoomLeg, event: LegEvent) -> None:
        leg.state = step(LEG, leg.state, event)
        self._timers.clear((leg.worker.role, room.id))
        self.workers.end(leg.worker, room.id, room.request.prompt_tokens)

    def _repeat(self, room: RoutedRoom, leg: RoomLeg, now: float) -> None:
        """Sends the message that this leg's worker must answer, and schedules its repetition."""
        match leg.state:
            case Leg.BEGINNING:
                left_ms = max(0, int((room.deadline - now) * 1e3))
                message = replace(leg.begin, time_left_ms=left_ms)
            case Leg.CANCELLING:
                message = Cancel(room.id, room.cause.value)
            case _:
                return
        leg.repeat_ms = backoff_ms(leg.repeat_ms, self._limits.resend_ms, self._limits.resend_ms_max)
        self._timers.set((leg.worker.role, room.id), now + leg.repeat_ms / 1e3)
        self._effects.append(Send(leg.worker.peer, message))

    def _take(self) -> list[RoutingEffect]:
        effects = self._effects.copy()
        self._effects.clear()  # the workers' are appended to the same list
        return effects


def _progress(room: RoutedRoom, leg: RoomLeg) -> str:
    """What a worker has reported of a room, and how many rooms are queued there."""
    if leg.state is Leg.BEGINNING:
        done = "has not answered"
    elif leg is room.decode:
        done = f"has sent {room.received} tokens"
    else:
        landed = room.received > 0 or (leg.end is not None and leg.end.reason in SUCCESSES)
        done = "has sent the KV" if landed else "has not sent all of the KV"
    queued = 0 if leg.worker.load is None or room.received else leg.worker.load.rooms_queued
    return f"{leg.worker.role} {leg.node} {done}" + (f" ({queued} rooms are queued there)" if queued else "")


def _room_ended(room: RoutedRoom, *, by_workers: bool = True, **how: Any) -> RoomEnded:
    """`by_workers`: they were left to end it, so that their Ends count."""
    prefill, so_far = room.prefill, room.so_far
    return RoomEnded(
        request=room.request_id,
        id=room.id,
        prefill_node="" if prefill is None else prefill.node,
        decode_node=room.decode.node,
        prefill=prefill.end if by_workers and prefill is not None else None,
        decode=room.decode.end if by_workers else None,
        prompt_tokens=room.request.prompt_tokens,
        enable_hisparse=room.request.enable_hisparse,
        resumptions=0 if so_far is None else so_far.resumptions,
        **how,
    )


def _leg(worker: Worker, begin: Begin, **of_leg: Any) -> RoomLeg:
    assert worker.identity is not None
    return RoomLeg(worker, replace(begin, **of_leg), worker.identity.node)
