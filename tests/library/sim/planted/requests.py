"""Defences of routers, and of workers towards them, taken away."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pdtransfer.serve.router.backends.daemons.router_rooms import Leg
from pdtransfer.serve.router.backends.daemons.routing import Routing
from pdtransfer.serve.router.backends.daemons.worker_pool import WorkerPool
from pdtransfer.serve.router.backends.daemons.workers import Worker
from pdtransfer.serve.worker.service import Service
from pdtransfer.wire import Begun, End, Pong, Tokens

from . import Patch


def restart_of_a_router_unnoticed(patch: Patch) -> None:
    """A router's new process is taken for the old one, its rooms run on."""
    patch(Service, "_stop_all", lambda self, router, cause: None)


def ended_rooms_forgotten(patch: Patch) -> None:
    """A late Begin starts a room again that has ended."""
    begin = Service._begin

    def forgetful(self: Service, router: Any, message: Any, now: float) -> None:
        router.ended.clear()
        begin(self, router, message, now)

    patch(Service, "_begin", forgetful)


def tokens_sent_once(patch: Patch) -> None:
    """Tokens and End are not repeated."""

    def silent(self: Service, room: Any, now: float) -> None:
        self._schedule(room, now)

    patch(Service, "_repeat", silent)


def retried_after_a_token(patch: Patch) -> None:
    """A room that fails is tried again, whatever its client has seen."""
    second = Routing._retry

    def again(self: Routing, room: Any, *args: Any) -> Any:
        received, room.received = room.received, 0
        pair = second(self, room, *args)
        room.received = received
        return pair

    patch(Routing, "_retry", again)


def resumed_with_a_token_twice(patch: Patch) -> None:
    """A room that goes on with an answer passes on the token that it picks again."""
    begin = Routing._open

    def careless(self: Routing, *args: Any) -> Any:
        room = begin(self, *args)
        room.repeats = None
        return room

    patch(Routing, "_open", careless)


def other_side_not_cancelled(patch: Patch) -> None:
    """When a room fails on one worker, the other is left to find out."""
    repeat = Routing._repeat

    def mute(self: Routing, room: Any, leg: Any, now: float) -> None:
        if leg.state is not Leg.CANCELLING:
            repeat(self, room, leg, now)

    patch(Routing, "_repeat", mute)


def end_before_its_tokens(patch: Patch) -> None:
    """The router takes an End although tokens that it counts have not come."""
    end = Routing._end

    def hasty(self: Routing, room: Any, leg: Any, message: End, now: float) -> None:
        end(self, room, leg, replace(message, tokens=min(message.tokens, room.received)), now)

    patch(Routing, "_end", hasty)


def restart_of_a_worker_unnoticed(patch: Patch) -> None:
    """The router takes a worker's new process for the old one."""

    def pong(self: WorkerPool, worker: Any, message: Pong, now: float) -> None:
        worker.liveness.last_seen = now

    def welcome(self: WorkerPool, worker: Any, message: Any, now: float) -> None:
        worker.liveness.incarnation = None
        known(self, worker, message, now)

    known = WorkerPool._welcome
    patch(WorkerPool, "_pong", pong)
    patch(WorkerPool, "_welcome", welcome)


def cancel_before_begin_forgotten(patch: Patch) -> None:
    """A Cancel that comes before its Begin is answered, and nothing is kept of it."""
    cancel = Service._cancel

    def forgetful(self: Service, router: Any, message: Any) -> None:
        known = message.room in self._rooms or message.room in router.ended
        cancel(self, router, message)
        if not known:
            del router.ended[message.room]

    patch(Service, "_cancel", forgetful)


def begun_sent_once(patch: Patch) -> None:
    """A room that has nothing to send does not ask whether anybody still wants it."""
    repeat = Service._repeat

    def quiet(self: Service, room: Any, now: float) -> None:
        if room.end is not None or room.unacked:
            repeat(self, room, now)
        else:
            self._schedule(room, now)

    patch(Service, "_repeat", quiet)


def unknown_rooms_unanswered(patch: Patch) -> None:
    """What a worker says of a room that the router does not know is not answered."""
    receive = Routing.receive

    def mute(self: Routing, peer: str, message: Any, now: float) -> Any:
        unknown = isinstance(message, Begun | Tokens | End) and message.room not in self._rooms
        return [] if unknown else receive(self, peer, message, now)

    patch(Routing, "receive", mute)


def leader_dialled_alone(patch: Patch) -> None:
    """The router names one rank of a prefill worker to decode."""
    whole: Any = Worker.endpoints
    patch(Worker, "endpoints", property(lambda self: whole.fget(self)[: 1 if self.role == "prefill" else None]))


def leader_let_in_alone(patch: Patch) -> None:
    """The router names one rank of a decode worker to prefill."""
    patch(Worker, "names", property(lambda self: (self.identity.node,)))


def sent_to_who_drains(patch: Patch) -> None:
    """The router goes on choosing a worker that has reported that it drains."""
    patch(Worker, "usable", property(lambda self: self.connected and self.load is not None))


def never_tried_again(patch: Patch) -> None:
    """What a worker that drains has refused has failed."""
    patch(Routing, "_retry", lambda self, *args: None)
