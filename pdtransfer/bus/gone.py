"""The kernel's evidence that peers are gone: a connection that has ended and does not come back, a host that
acknowledges nothing.

A frozen process looks like a busy one here: its kernel still accepts and acknowledges. That is not evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .connections import Connection
from .limits import BusLimits


@dataclass(frozen=True, slots=True)
class Gone:
    """The evidence, for people. With `host` it is about the peer's host or the network to it: the peer's process may
    still be there when the network is back."""

    text: str
    host: bool = False


UNACKNOWLEDGED = Gone("its host sends no acknowledgements", host=True)
ENDED = Gone("its connection has ended, and no new one was made")


class AbsentPeers:
    """Peers of a listener: whose connection has ended, and for how long. It cannot dial them."""

    def __init__(self, limits: BusLimits) -> None:
        self._limits = limits
        self._ended: dict[str, tuple[float, Gone]] = {}  # by name: since when
        self._unacknowledged = frozenset[str]()

    def end(self, name: str, now: float) -> None:
        """The connection that owned this name has ended. Where its host had acknowledged nothing before, the kernel
        ended it for that, and it proves nothing about the process."""
        evidence = UNACKNOWLEDGED if name in self._unacknowledged else ENDED
        self._ended.setdefault(name, (now, evidence))
        if len(self._ended) > self._limits.named_max:
            del self._ended[next(iter(self._ended))]

    def back(self, name: str) -> None:
        """The peer has sent Hello, or goes on by another connection."""
        self._ended.pop(name, None)

    def check(self, named: Iterable[Connection], lives: Callable[[str], bool], now: float) -> dict[str, Gone]:
        """Returns the evidence by peer, which may have several connections: all have to show it. `lives` returns
        whether a line of the peer's process stands."""
        ended, silent, answering = set[str](), set[str](), set[str]()
        for connection in named:
            tcp, name = connection.tcp, connection.name
            if tcp is not None and not tcp.is_open:
                ended.add(name)
            elif tcp is not None and tcp.unacknowledged(self._limits):
                silent.add(name)
            else:
                answering.add(name)
        gone = dict.fromkeys(silent - answering, UNACKNOWLEDGED)
        for name in ended - silent - answering:
            self.end(name, now)
        for name in silent | answering:
            self.back(name)
        self._unacknowledged = frozenset(gone)
        for name, (since, evidence) in list(self._ended.items()):
            if (now - since) * 1e3 >= self._limits.absent_kept_ms:
                del self._ended[name]
            elif evidence.host or not lives(name):
                gone[name] = evidence
        return gone
