"""The router's Service on the loop: performs its effects, and hands what a router starts and stops to the daemon."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..engine_api import Request
from ..errors import Cause, RemoteProtocolError
from ..handoff.effects import Send
from ..limits import TEXT_LENGTH_MAX
from ..node.core_driver import Clock, Ticker
from ..wire import Begin, End, Load, Message, Reject, unpack_ids
from .service import Introduce, Service, ServiceEffect, Start, Stop

log = logging.getLogger(__name__)


def request_of(begin: Begin, serial: int) -> Request:
    """What the engine has to do, under a number that no other room has had. A label may come again from another router:
    what is then still said of the room before it must not find the new one.

    Raises RemoteProtocolError and ValueError for a prompt that is none.
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
    """The End of a room that failed."""
    return End(room, cause.value, detail[:TEXT_LENGTH_MAX], 0, retry_ms=retry_ms)


class Desk:
    """The service on the loop: performs its effects, and hands `start`, `stop` and `introduce` to the daemon."""

    def __init__(
        self,
        service: Service,
        send: Callable[[str, Message], bool],
        *,
        start: Callable[[Begin], None],
        stop: Callable[[int, Cause], None],
        load: Callable[[], Load],
        introduce: Callable[[tuple[str, ...]], None] = lambda _: None,
    ) -> None:
        self.service, self._send, self._load = service, send, load
        self._start, self._stop, self._introduce = start, stop, introduce
        self._clock = Clock(service.limits.ping_ms / 2e3)
        self.ticker = Ticker(service.next_tick, lambda: self.run(service.tick(self._clock.now())), self._clock)

    @property
    def idle(self) -> bool:
        """As Service.idle."""
        return self.service.idle(self._clock.now())

    def receive(self, peer: str, message: Message) -> None:
        """A message of a router; a breach is answered, and costs only that message."""
        try:
            self.run(self.service.receive(peer, message, self._clock.now()))
        except RemoteProtocolError as error:
            log.warning("%s: %s", peer, error)
            self._send(peer, Reject(0, Cause.BREACH.value, (str(error)[:TEXT_LENGTH_MAX],)))

    def tokens(self, room: int, ids: list[int]) -> None:
        """The engine has generated these."""
        self.run(self.service.tokens(room, ids, self._clock.now()))

    def end(self, end: End) -> None:
        """The room has ended here."""
        self.run(self.service.end(end, self._clock.now()))

    def run(self, effects: list[ServiceEffect]) -> None:
        """Performs, and tells the routers what is left then."""
        self._perform(effects)
        self._perform(self.service.load(self._load(), self._clock.now()))
        self.ticker.arm()

    def _perform(self, effects: list[ServiceEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message):
                    self._send(peer, message)
                case Start(_, begin):
                    self._start(begin)
                case Stop(room, cause):
                    self._stop(room, cause)
                case Introduce(peers):
                    self._introduce(peers)
