"""A router's core whose workers are played by a test."""

from __future__ import annotations

from pdtransfer.handoff.peers import Send
from pdtransfer.limits import Limits
from pdtransfer.serve.router.backends.daemons.routing import Routing
from pdtransfer.serve.router.front.json_bodies import AnswerFailedError
from pdtransfer.wire import Load, Ping, Pong, Welcome
from tests.support.routing_world import LIMITS, identity, request

P, P2, D, D2 = "tcp://p0:1", "tcp://p1:1", "tcp://d0:1", "tcp://d1:1"
LOAD = Load(True, False, 0, 0, 1_000, 1_000)


class Bench:
    """A Routing whose workers are simulated by the test."""

    def __init__(self, *, prefill=(P,), decode=(D,), limits: Limits = LIMITS, loads: dict[str, Load] | None = None):
        self.now, self._labels = 0.0, iter(range(1, 1_000))
        self.routing = Routing(
            identity("router", "router"),
            prefill=prefill,
            decode=decode,
            limits=limits,
            mint=lambda: next(self._labels),
        )
        self.effects = self.routing.start(self.now)
        for peer in (*prefill, *decode):
            self.welcome(peer)
            self.receive(peer, (loads or {}).get(peer, LOAD))

    def welcome(self, peer: str, incarnation: int = 1, **who) -> list:
        role = "prefill" if peer.startswith("tcp://p") else "decode"
        return self.receive(peer, Welcome(1, identity(peer[6:8], role, incarnation, **who)))

    def receive(self, peer: str, *messages) -> list:
        self.effects = [effect for message in messages for effect in self.routing.receive(peer, message, self.now)]
        return self.effects

    def submit(self, *args, **more) -> int | AnswerFailedError:
        """The request's id, or why it is not taken."""
        self.effects = []
        try:
            taken, self.effects = self.routing.submit(request(*args, **more), self.now)
        except AnswerFailedError as error:
            return error
        return taken

    def wait(self, seconds: float, *, silent: str = "") -> list:
        """Advances time, while every connected worker but the silent one answers its Pings."""
        end, self.effects = self.now + seconds, []
        while (when := self.routing.next_tick()) is not None and when <= end:
            self.now = when
            for effect in self.routing.tick(self.now):
                self.effects.append(effect)
                if isinstance(effect, Send) and isinstance(effect.message, Ping) and effect.peer != silent:
                    self.effects += self.routing.receive(effect.peer, Pong(1), self.now)
        self.now = end
        return self.effects

    def silence(self, seconds: float) -> list:
        end, self.effects = self.now + seconds, []
        while (when := self.routing.next_tick()) is not None and when <= end:
            self.now = when
            self.effects += self.routing.tick(self.now)
        self.now = end
        return self.effects

    def sent(self, kind: type, peer: str | None = None) -> list:
        return [e.message for e in self.effects if isinstance(e, Send) and isinstance(e.message, kind)
                and peer in (None, e.peer)]  # fmt: skip

    def of(self, kind: type) -> list:
        return [effect for effect in self.effects if isinstance(effect, kind)]


# The simulation
