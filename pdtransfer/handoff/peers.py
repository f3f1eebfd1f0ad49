"""The peers of one node, whichever side has dialled: the rules of Hello, Welcome, Ping, Goodbye and Reject.

A peer is a name behind which one process after another may answer. Which of them is the current one, and whether it
lives, is `Liveness`. The side that dials repeats Hello until Welcome, then sends Ping. The side that was dialled
answers, and asks nothing. Both look at each peer every `ping_ms`, and whenever there is evidence that it is gone. What
its end means for sessions and rooms is the owner's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from ..errors import Cause, RemoteProtocolError
from ..limits import FIELDS_MAX, TEXT_LENGTH_MAX, Limits
from ..wire import VERSION, Hello, Identity, Message, Ping, Reject, Welcome, Withdrawn, negotiate
from .liveness import HELLO_WANTED, Liveness, PeerProcess
from .timers import TimerKey, Timers


class Send(Struct, frozen=True):
    """Send `message` to `peer`: a dialled endpoint, or the authenticated name of a peer that dialled. It may be
    lost."""

    peer: str
    message: Message


class PeerRefused(Struct, frozen=True):
    """The peer and this node cannot work together; `detail` names each field with both values."""

    peer: str
    detail: str


class Peer(Protocol):
    """What the table needs of an owner's record."""

    @property
    def name(self) -> str: ...

    @property
    def liveness(self) -> Liveness: ...


class PeerSession(Protocol):
    """A session, of either side."""

    peer: str


PeerType = TypeVar("PeerType", bound=Peer)


class Peers(Generic[PeerType]):
    """The peers of one side, by name. Effects go to `out`; `look` gets a peer whose silence may mean something."""

    def __init__(
        self, identity: Identity, limits: Limits, timers: Timers[TimerKey], out: Callable[[Send], None], *,
        look: Callable[[PeerType, float], None], peers_max: int,
        refused: Callable[[PeerRefused], None] = lambda _: None,
        ping: Callable[[PeerType, float], Ping | None] = lambda _, __: None,
        withdrawn: Callable[[PeerType, float], tuple[Withdrawn, ...]] = lambda _, __: (),
    ) -> None:  # fmt: skip
        """`refused` gets the peers that are of no use. `ping` returns the Ping that is due to a peer that this node
        dials, if one is; `withdrawn` the rooms that the next Hello to it gives up."""
        self.identity, self._limits, self._timers, self._out = identity, limits, timers, out
        self._refused = refused
        self._look, self._peers_max, self._ping, self._withdrawn = look, peers_max, ping, withdrawn
        self.by_name: dict[str, PeerType] = {}
        self._refusals: dict[str, str] = {}  # what was reported of peers that do not fit, the oldest first

    @property
    def full(self) -> str:
        """Why no further peer may be met; empty if one may."""
        count = len(self.by_name)
        return f"peers: {count} of {self._peers_max}" if count >= self._peers_max else ""

    def add(self, peer: PeerType, now: float) -> None:
        """Takes a peer in, and looks at it from now on."""
        self.by_name[peer.name] = peer
        self._watch(peer, now)

    def remove(self, peer: PeerType) -> None:
        """Forgets a peer: the next Hello, of either side, meets it anew."""
        del self.by_name[peer.name]
        self._timers.clear(("hello", peer.name, 0))
        self._timers.clear(("alive", peer.name, 0))

    def gone(self, name: str, evidence: str, now: float) -> None:
        """There is evidence that the peer is gone; empty: no longer. It is repeated while it stands."""
        if (peer := self.by_name.get(name)) is not None:
            peer.liveness.report(evidence, now)
            self._look(peer, now)

    def tick(self, key: TimerKey, now: float) -> bool:
        """Acts on a due key of its own: repeats Hello, sends Ping, looks for silence. Returns False for other keys."""
        match key:
            case ("hello", str(name), _):
                self.hello(self.by_name[name], now)
            case ("alive", str(name), _):
                peer = self.by_name[name]
                self._watch(peer, now)
                if (ping := self._ping(peer, now)) is not None:
                    self._out(Send(name, ping))
                self._look(peer, now)
            case _:
                return False
        return True

    def _watch(self, peer: PeerType, now: float) -> None:
        # Also while the peer cannot be silent yet: only a timer that fires late separates silence from time in which
        # this process did not run.
        self._timers.set(("alive", peer.name, 0), now + self._limits.ping_ms / 1e3)

    # Peers that this node dials

    def greet(self, peer: PeerType, now: float) -> None:
        """Sends Hello until Welcome, at most one in `resend_ms`."""
        if ("hello", peer.name, 0) in self._timers:
            return
        when = peer.liveness.greeted + self._limits.resend_ms / 1e3
        if when <= now:
            self.hello(peer, now)
        else:
            self._timers.set(("hello", peer.name, 0), when)

    def greet_soon(self, peer: PeerType, now: float) -> None:
        """Sends the Hello that is due at the slowest pace now, or as soon as `resend_ms` after the latest allows."""
        self._timers.clear(("hello", peer.name, 0))
        self.greet(peer, now)

    def greet_later(self, peer: PeerType, now: float) -> None:
        """Sends Hello at the slowest pace: another process may take this one's place."""
        peer.liveness.hello_ms = self._limits.resend_ms_max
        self._timers.set(("hello", peer.name, 0), now + peer.liveness.hello_ms / 1e3)

    def hello(self, peer: PeerType, now: float) -> None:
        """Sends Hello now, and again until it is answered."""
        peer.liveness.greeted = now
        self._timers.set(("hello", peer.name, 0), now + peer.liveness.next_hello_ms() / 1e3)
        self._out(Send(peer.name, Hello(VERSION, VERSION, self.identity, self._withdrawn(peer, now))))

    def welcome(self, peer: PeerType, message: Welcome, now: float) -> PeerProcess:
        """Which process has answered. One that was not asked is late."""
        asked = ("hello", peer.name, 0) in self._timers
        return peer.liveness.receive(message, now) if asked else PeerProcess.LATE

    def met(self, peer: PeerType, now: float) -> None:
        """The peer that has answered fits: no Hello is due."""
        peer.liveness.hello_ms, peer.liveness.welcomed = 0, now
        self._timers.clear(("hello", peer.name, 0))

    def asks_for_hello(self, peer: PeerType, message: Reject, now: float, *, met: bool) -> bool:
        """True if a Reject only asks for Hello, which is sent then. Soon after its Welcome that is a late answer to an
        earlier message: a peer that is `met` stays so."""
        if message.session or message.reason not in HELLO_WANTED:
            return False
        if not met or (now - peer.liveness.welcomed) * 1e3 >= self._limits.resend_ms:
            peer.liveness.hello_ms = 0
            self.greet_soon(peer, now)  # it may be due at the slowest pace, but the peer is there
        return True

    # Peers that have dialled this node

    def answer(
        self, name: str, message: Hello, now: float, *, misfits: Iterable[str], new: Callable[[], PeerType],
        replaced: Callable[[PeerType, float], None],
    ) -> PeerProcess:  # fmt: skip
        """Answers Hello: with Welcome, or with Reject where `misfits` has a line for a field, no version is common, or
        there are too many peers. `new` makes the record of an unknown peer. `replaced` is called with a known one whose
        process is another one."""
        peer = self.by_name.get(name)
        process = PeerProcess.SAME if peer is None else peer.liveness.receive(message, now)
        if process is PeerProcess.LATE:
            return process
        if peer is not None and process is PeerProcess.ANOTHER:
            replaced(peer, now)
        version, lines = VERSION, list(misfits)
        try:
            version = negotiate(ours=(VERSION, VERSION), theirs=(message.version_min, message.version_max))
        except RemoteProtocolError as error:
            lines.insert(0, str(error))
        if lines:
            self.refuse(name, 0, lines)
            return PeerProcess.REFUSED
        if peer is None:
            if full := self.full:
                self.reject(name, 0, Cause.FULL, full)
                return PeerProcess.REFUSED
            peer = new()
            self.add(peer, now)
        peer.liveness.seen(now)
        self._out(Send(name, Welcome(version, self.identity)))
        return process

    # Refusals

    def reject(self, name: str, session_id: int, cause: Cause, *lines: str) -> None:
        """Sends Reject of a session, or 0 for a Hello."""
        self._out(Send(name, Reject(session_id, cause.value, tuple([line[:TEXT_LENGTH_MAX] for line in lines]))))

    def refuse(self, name: str, session_id: int, lines: list[str]) -> None:
        """Rejects a peer that does not fit, and reports it."""
        self.reject(name, session_id, Cause.REFUSED, *lines[:FIELDS_MAX])
        self.report(name, f"{name} is refused: " + "; ".join(lines))

    def report(self, name: str, text: str) -> bool:
        """Reports that a peer is of no use, once until something else is wrong with it or it fits; returns whether that
        is news."""
        news = self._refusals.pop(name, None) != text
        if news:
            self._refused(PeerRefused(name, text))
        self._refusals[name] = text
        if len(self._refusals) > self._limits.sessions_max:
            del self._refusals[next(iter(self._refusals))]
        return news

    def refusal(self, name: str) -> str:
        """What was reported of a peer that has not fitted since; empty for nothing."""
        return self._refusals.get(name, "")

    def fits(self, name: str) -> None:
        """The peer has a session, or has changed: what is wrong with it next is news."""
        self._refusals.pop(name, None)


def full(sessions: Iterable[PeerSession], name: str, limits: Limits) -> str:
    """Why this peer may have no further session now; empty if it may. Sessions that await a fence or a write count."""
    peers = [session.peer for session in sessions]
    for limit, count in (("peer_sessions_max", peers.count(name)), ("sessions_max", len(peers))):
        if count >= (most := getattr(limits, limit)):
            return f"sessions: {count} not over, {limit} is {most}"
    return ""
