"""The life of a peer: which of its processes is the current one, and when it was last seen."""

from __future__ import annotations

from collections import deque

from ..limits import EARLIER_INCARNATIONS_MAX, Limits
from ..wire import Goodbye, Hello, Ping, Pong, Welcome
from .tables import Word
from .timers import backoff_ms

NAME_TAKEN = "name_taken"  # reason of a Reject for two workers of one name
HELLO_WANTED = frozenset({"hello_required", "hello_first"})  # reasons of a Reject that only asks for a Hello


class PeerProcess(Word):
    """Which process of a peer has sent a message, as far as the message names it."""

    LATE = "late"  # an earlier process, one that has left, or one that was never met: the message means nothing
    SAME = "same"  # the current process
    ANOTHER = "another"  # another process than the current one, whose sessions and rooms are over
    LEFT = "left"  # the current process, which has sent Goodbye
    REFUSED = "refused"  # a process that does not fit this node, or one too many


class Liveness:
    """One peer, dialled or not. The dialling side repeats Hello until Welcome, then sends Ping and expects Pong.

    Silence alone proves little: a process that gets no processor answers late. A peer is slow after `slow_ms`. It is
    lost then if there is evidence that it is gone, and without evidence after `silence_ms`. Evidence comes from the
    kernel: the peer's connection has ended and no other is accepted, or its host acknowledges nothing. It has to stand
    for half of `slow_ms`, in which a connection that only broke is made again.

    Incarnations have no order, and the first message of an earlier process may arrive after one of its successor. So an
    earlier process counts as gone for `silence_ms` only: one that still sends after that is the current one.
    """

    __slots__ = (
        "_earlier",
        "_gone_since",
        "_left",
        "_limits",
        "_silence_ms",
        "gone",
        "greeted",
        "hello_ms",
        "incarnation",
        "last_seen",
        "welcomed",
    )

    def __init__(
        self, limits: Limits, now: float, incarnation: int | None = None, *, silence_ms: int | None = None
    ) -> None:
        """`silence_ms`: how much silence makes the peer silent, where that is not the limit of this name."""
        self.incarnation, self.last_seen = incarnation, now
        self.gone = ""  # the evidence that the peer is gone; empty for none
        self._gone_since = now
        self.greeted = self.welcomed = float("-inf")  # when Hello was last sent to it, and when it last answered one
        self.hello_ms = 0  # between the latest Hello and the next
        self._limits, self._silence_ms = limits, limits.silence_ms if silence_ms is None else silence_ms
        self._left: int | None = None  # the process that said Goodbye last
        self._earlier: deque[tuple[int, float]] = deque(maxlen=EARLIER_INCARNATIONS_MAX)

    def receive(self, message: Hello | Welcome | Ping | Pong | Goodbye, now: float) -> PeerProcess:
        """Which process has sent this. Hello and Welcome make theirs the current one. Whether that is life is the
        caller's rule: it differs between the sides."""
        if isinstance(message, Hello | Welcome):
            if self.late(message.identity.incarnation, now):
                return PeerProcess.LATE
            return PeerProcess.ANOTHER if self.restarted(message.identity.incarnation, now) else PeerProcess.SAME
        if isinstance(message, Goodbye):
            return PeerProcess.LEFT if message.incarnation == self.incarnation else PeerProcess.LATE
        if self.incarnation is None or self.late(message.incarnation, now):
            return PeerProcess.LATE
        return PeerProcess.SAME if message.incarnation == self.incarnation else PeerProcess.ANOTHER

    def late(self, incarnation: int, now: float) -> bool:
        """True if a message of this incarnation comes from an earlier process, or from one that said Goodbye."""
        if incarnation == self._left:
            return True
        late_ms = self._limits.silence_ms
        return any(earlier == incarnation and (now - when) * 1e3 < late_ms for earlier, when in self._earlier)

    def restarted(self, incarnation: int, now: float) -> bool:
        """Takes this incarnation for the current one; returns whether it replaces another."""
        before, self.incarnation = self.incarnation, incarnation
        if before is None or before == incarnation:
            return False
        self._earlier.append((before, now))
        return True

    def seen(self, now: float) -> None:
        """The peer has sent something. What is gone all the same is reported again."""
        self.last_seen, self.gone = now, ""

    def unread(self, now: float) -> None:
        """What the peer has sent waits to be read: it is slow, but its silence is this node's."""
        self.last_seen = max(self.last_seen, now - self._slow_ms / 1e3)

    def report(self, evidence: str, now: float) -> None:
        """There is evidence that the peer is gone; empty: no longer. It is repeated while it stands."""
        if not self.gone:
            self._gone_since = now
        self.gone = evidence

    def silent_ms(self, now: float) -> float:
        """Milliseconds since the peer was last seen."""
        return (now - self.last_seen) * 1e3

    def silent(self, now: float) -> bool:
        """True if the peer counts as lost."""
        return now >= self.silent_at

    def slow(self, now: float) -> bool:
        """True if the peer gets nothing new until it is seen again."""
        return self.silent_ms(now) >= self._slow_ms

    @property
    def silent_at(self) -> float:
        """When the peer counts as lost, unless it is seen before."""
        without = self.last_seen + self._silence_ms / 1e3
        slow_s = self._slow_ms / 1e3
        return min(max(self.last_seen + slow_s, self._gone_since + slow_s / 2), without) if self.gone else without

    def why(self, name: str, now: float) -> str:
        """Why the peer counts as lost, for people: without the key of an endpoint."""
        silence = f"{name.rpartition('@')[2]} has been silent for {self.silent_ms(now):.0f} ms"
        return f"{silence}: {self.gone}" if self.gone else silence

    @property
    def _slow_ms(self) -> int:
        return min(self._limits.slow_ms, self._silence_ms)

    def part(self, incarnation: int) -> None:
        """This process said Goodbye. Its answers to earlier messages may still come: they mean nothing."""
        self._left = incarnation

    def leave(self, now: float) -> None:
        """The peer said Goodbye: it is silent from now on."""
        self.last_seen = min(self.last_seen, now - self._silence_ms / 1e3)

    def next_hello_ms(self) -> int:
        """Hello is sent now; returns the delay before the next one."""
        self.hello_ms = backoff_ms(self.hello_ms, self._limits.resend_ms, self._limits.resend_ms_max)
        return self.hello_ms
