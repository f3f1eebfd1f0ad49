"""Runs the router's Service on the loop: a daemon's rooms begin here, and end here once, each with one record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from typing import Protocol

from msgspec.structs import replace

from ...client.core_driver import LoopClock, Ticker
from ...errors import ArenaFullError, Cause, RemoteProtocolError
from ...handoff.peers import Send
from ...limits import TEXT_LENGTH_MAX
from ...wire import Begin, End, Load, Message, Ping, Pong, Reject, WorkerFigures, unpack_ids
from ..engine_api import Request
from ..sampling import beyond_basic
from ..tracing.ended_request import EndedRequests
from ..tracing.timeline import Journeys
from .daemon_figures import DaemonTotals
from .daemon_metrics import RoomMetrics
from .ended_rooms import ended_room, timed
from .service import IntroducePeers, RefusedRoom, Service, ServiceEffect, StartRoom, StopRoom

log = logging.getLogger(__name__)


def request_of(begin: Begin, serial: int) -> Request:
    """The engine's request under a local id that no other room has had. Another router may use the same room id again;
    late reports of the earlier room must not reach the new one.

    Raises RemoteProtocolError and ValueError for an invalid prompt.
    """
    prompt = unpack_ids("prompt", begin.prompt)
    if not len(prompt):
        raise ValueError("prompt: no tokens")
    return Request(
        room=serial, prompt=prompt, sampling=begin.sampling, enable_hisparse=begin.enable_hisparse, salt=begin.salt
    )


def failure(room: int, cause: Cause, detail: str, retry_ms: int = 0) -> End:
    """The End of a failed room."""
    return End(room, cause.value, detail[:TEXT_LENGTH_MAX], 0, retry_ms=retry_ms)


class Rooms(Protocol):
    """A daemon's work for the rooms of its routers."""

    def check(self, begin: Begin, request: Request) -> None:
        """Raises ValueError for a room that cannot be had here, ArenaFullError for one that cannot be had now."""

    def start(self, begin: Begin, request: Request) -> None:
        """Starts the room. It ends once, by RouterLink.end."""

    def stop(self, room_id: int, cause: Cause) -> None:
        """Ends the room, if it is here: its router gave it up."""

    def introduce(self, peers: tuple[str, ...]) -> None:
        """Rooms may name these prefill ranks."""

    def load(self) -> Load:
        """What the daemon has, and what of it is free."""
        ...

    def figures(self) -> WorkerFigures:
        """What it has done."""
        ...


class RouterLink:
    """Performs the service's effects, passes what routers ask to `rooms`, and makes each end known once: to the router,
    in the metrics, and as a record for `ended`."""

    def __init__(
        self,
        service: Service,
        send: Callable[[str, Message], bool],
        rooms: Rooms,
        *,
        full_sampling: bool,
        metrics: RoomMetrics,
        journeys: Journeys,
        ended: EndedRequests,
    ) -> None:
        """`full_sampling`: whether the engine has all of Sampling."""
        self.service, self._send, self._rooms = service, send, rooms
        self._full_sampling, self._metrics, self.totals = full_sampling, metrics, DaemonTotals()
        self._journeys, self._report = journeys, ended
        self._local_ids = count(1)
        self._refusals: dict[str, str] = {}
        self._clock = LoopClock.among_peers(service.limits.ping_ms)
        self.ticker = Ticker(service.next_tick, lambda: self.run(service.tick(self._clock.now())), self._clock)

    @property
    def refusals(self) -> dict[str, str]:
        """Why routers refuse this worker, by their peers: of those that are known and have not sent Ping since."""
        self._refusals = {peer: why for peer, why in self._refusals.items() if self.service.knows(peer)}
        return self._refusals

    @property
    def idle(self) -> bool:
        """As Service.idle."""
        return self.service.idle(self._clock.now())

    def receive(self, peer: str, message: Message) -> None:
        """Takes a message of a router. A breach is answered, and costs only that message."""
        if isinstance(message, Reject) and self.service.knows(peer):
            self.refusals[peer] = "; ".join((message.reason, *message.fields))
            log.error("%s refuses this worker: %s", peer, self.refusals[peer])
        elif isinstance(message, Ping):
            self.refusals.pop(peer, None)
        try:
            self.run(self.service.receive(peer, message, self._clock.now()))
        except RemoteProtocolError as error:
            log.warning("%s: %s", peer, error)
            self._send(peer, Reject(0, Cause.BREACH.value, (str(error)[:TEXT_LENGTH_MAX],)))

    def gone(self, peer: str, evidence: str) -> None:
        """As Service.gone."""
        self.run(self.service.gone(peer, evidence, self._clock.now()))

    def tokens(self, room: int, ids: list[int], logprobs: bytes) -> None:
        """The engine has generated these ids, with these packed logprobs."""
        self.run(self.service.tokens(room, ids, self._clock.now(), logprobs=logprobs))

    def end(self, begin: Begin, end: End, *, tokens: int = 0, cached: int | None = None) -> None:
        """The room has ended here. `tokens` were generated; `cached` ones of its prompt were not transferred."""
        journey = self._journeys.of(begin.room)
        end = timed(end, journey)
        self._send_end(end)
        self._report(ended_room(self.service.identity, begin, end, journey, tokens=tokens, cached=cached))

    def _begin(self, begin: Begin) -> None:
        self._metrics.begun.inc()
        try:
            request = request_of(begin, next(self._local_ids))
            if not self._full_sampling and (name := beyond_basic(begin.sampling)) is not None:
                value = getattr(begin.sampling, name)
                raise ValueError(f"{name}: {value!r}, the engine of this worker does not support it")
            self._rooms.check(begin, request)
        except (ValueError, RemoteProtocolError) as error:
            self._refuse(begin, failure(begin.room, Cause.REFUSED, str(error)))
        except ArenaFullError as error:
            self._refuse(begin, failure(begin.room, Cause.FULL, str(error), error.retry_ms or 0))
        else:
            self._rooms.start(begin, request)

    def _refuse(self, begin: Begin, end: End) -> None:
        """Another room may have the same id: this one has no journey."""
        self._send_end(end)
        self._report(ended_room(self.service.identity, begin, end, None))

    def _send_end(self, end: End) -> None:
        self._metrics.ended.labels(end.reason).inc()
        self.totals.ended(end)
        self.run(self.service.end(end, self._clock.now()))

    def run(self, effects: list[ServiceEffect]) -> None:
        """Performs effects, then reports the load to the routers."""
        self._perform(effects)
        self.report_load()

    def report_load(self) -> None:
        """Reports the load to the routers where it is another one."""
        self._perform(self.service.load(self._rooms.load(), self._clock.now()))
        self.ticker.arm()

    def _perform(self, effects: list[ServiceEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, Pong() as pong) if self.service.knows(peer):
                    self._send(peer, replace(pong, figures=(self._rooms.figures(),)))
                case Send(peer, message):
                    self._send(peer, message)
                case StartRoom(_, begin):
                    self._begin(begin)
                case StopRoom(room, cause):
                    self._rooms.stop(room, cause)
                case RefusedRoom(begin, end):
                    self._report(ended_room(self.service.identity, begin, end, None))
                case IntroducePeers(peers):
                    self._rooms.introduce(peers)
