"""Runs the router's Service on the loop: performs its effects, and passes a router's requests to the daemon."""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec.structs import replace

from ...client.core_driver import LoopClock, Ticker
from ...errors import Cause, RemoteProtocolError
from ...handoff.send import Send
from ...limits import TEXT_LENGTH_MAX
from ...wire import Begin, End, Load, Message, Ping, Pong, Reject, WorkerFigures, unpack_ids
from ..engine_api import EngineDescription, Request
from ..sampling import beyond_basic
from .service import IntroducePeers, RefusedRoom, Service, ServiceEffect, StartRoom, StopRoom

log = logging.getLogger(__name__)


def check_sampling_of(begin: Begin, card: EngineDescription) -> None:
    """Raises ValueError for a room that needs more of Sampling than the engine has."""
    if not card.full_sampling and (name := beyond_basic(begin.sampling)) is not None:
        raise ValueError(f"{name}: {getattr(begin.sampling, name)!r}, the engine of this worker does not have it")


def request_of(begin: Begin, serial: int) -> Request:
    """The engine's request under a local id that no other room has had. Another router may use the same room id again;
    late reports of the earlier room must not reach the new one.

    Raises RemoteProtocolError and ValueError for an invalid prompt.
    """
    prompt = unpack_ids("prompt", begin.prompt)
    if not len(prompt):
        raise ValueError("prompt: no tokens")
    return Request(
        room=serial,
        prompt=prompt,
        sampling=begin.sampling,
        enable_hisparse=begin.enable_hisparse,
        salt=begin.salt,
    )


def failure(room: int, cause: Cause, detail: str, retry_ms: int = 0) -> End:
    """The End of a failed room."""
    return End(room, cause.value, detail[:TEXT_LENGTH_MAX], 0, retry_ms=retry_ms)


class RouterLink:
    """Performs the service's effects, and passes `start`, `stop`, `introduce` and `refused` to the daemon."""

    def __init__(
        self,
        service: Service,
        send: Callable[[str, Message], bool],
        *,
        start: Callable[[Begin], None],
        stop: Callable[[int, Cause], None],
        load: Callable[[], Load],
        figures: Callable[[], WorkerFigures],
        introduce: Callable[[tuple[str, ...]], None] = lambda _: None,
        refused: Callable[[Begin, End], None] = lambda _, __: None,
    ) -> None:
        """`refused` gets the rooms that are never started."""
        self.service, self._send, self._load, self._figures = service, send, load, figures
        self._start, self._stop, self._introduce, self._refused = start, stop, introduce, refused
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

    def end(self, end: End) -> None:
        """The room has ended here."""
        self.run(self.service.end(end, self._clock.now()))

    def run(self, effects: list[ServiceEffect]) -> None:
        """Performs effects, then reports the load to the routers."""
        self._perform(effects)
        self.report_load()

    def report_load(self) -> None:
        """Reports the load to the routers where it is another one."""
        self._perform(self.service.load(self._load(), self._clock.now()))
        self.ticker.arm()

    def _perform(self, effects: list[ServiceEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, Pong() as pong) if self.service.knows(peer):
                    self._send(peer, replace(pong, figures=(self._figures(),)))
                case Send(peer, message):
                    self._send(peer, message)
                case StartRoom(_, begin):
                    self._start(begin)
                case StopRoom(room, cause):
                    self._stop(room, cause)
                case RefusedRoom(begin, end):
                    self._refused(begin, end)
                case IntroducePeers(peers):
                    self._introduce(peers)
