"""Peers: each rule of Hello, Welcome, Ping, Goodbye and Reject, whichever side has dialled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from pdtransfer.errors import Cause
from pdtransfer.handoff.effects import PeerRefused, Send
from pdtransfer.handoff.liveness import Liveness, PeerProcess
from pdtransfer.handoff.peers import Peers, full
from pdtransfer.handoff.timers import TimerKey, Timers
from pdtransfer.limits import Limits
from pdtransfer.wire import Goodbye, Hello, Identity, Ping, Pong, Ranks, Reject, Welcome

LIMITS = Limits(resend_ms=100, resend_ms_max=400, ping_ms=200, slow_ms=600, silence_ms=1_000, sessions_max=4)


@dataclass(slots=True, eq=False)
class Peer:
    name: str
    liveness: Liveness


@dataclass
class Session:
    peer: str


def identity(incarnation: int, role: Any = "decode") -> Identity:
    return Identity("node", role, incarnation, Ranks(), "m", weights=b"", window=4)


class Side:
    """A table with a clock; `looked` has the peers whose silence it asked about."""

    def __init__(self, *, dials: bool) -> None:
        self.now, self.out, self.looked, self.replaced = 0.0, list[Any](), list[str](), list[str]()
        self.timers: Timers[TimerKey] = Timers()
        self.table: Peers[Peer] = Peers(
            identity(7, "prefill"), LIMITS, self.timers, self.out.append,
            look=lambda peer, _: self.looked.append(peer.name), peers_max=2, refused=self.out.append,
            ping=lambda *_: Ping(7) if dials else None,
        )  # fmt: skip

    def tick(self, seconds: float) -> list[Any]:
        end = self.now + seconds
        while (when := self.timers.next()) is not None and when <= end:
            self.now = when
            while (key := self.timers.pop(when)) is not None:
                assert self.table.tick(key, when)
        self.now = end
        return self.sent()

    def sent(self) -> list[Any]:
        sent = [effect.message if isinstance(effect, Send) else effect for effect in self.out]
        self.out.clear()
        return sent

    def dial(self, name: str = "p") -> Peer:
        peer = Peer(name, Liveness(LIMITS, self.now))
        self.table.add(peer, self.now)
        self.table.greet(peer, self.now)
        return peer

    def hello(
        self, name: str, incarnation: int, *, versions: tuple[int, int] = (1, 1), misfits: Any = ()
    ) -> PeerProcess:
        return self.table.answer(
            name, Hello(*versions, identity(incarnation)), self.now, misfits=misfits,
            new=lambda: Peer(name, Liveness(LIMITS, self.now, incarnation)),
            replaced=lambda peer, _: self.replaced.append(peer.name),
        )  # fmt: skip


def test_hello_repeats_ever_more_slowly_until_the_first_welcome_and_ping_follows() -> None:
    side = Side(dials=True)
    peer = side.dial()
    hellos = [message for message in side.tick(0.75) if isinstance(message, Hello)]
    assert len(hellos) == 4, "at 0, 100, 300 and 700 ms"
    assert side.table.welcome(peer, Welcome(1, identity(1)), side.now) is PeerProcess.SAME
    side.table.met(peer, side.now)
    assert set(side.tick(0.5)) == {Ping(7)}
    assert side.table.welcome(peer, Welcome(1, identity(2)), side.now) is PeerProcess.LATE, "nobody has asked"
    assert peer.liveness.incarnation == 1


def test_a_later_process_is_another_and_the_earlier_one_late() -> None:
    peer = Peer("p", Liveness(LIMITS, 0.0))
    assert peer.liveness.receive(Pong(1), 0.0) is PeerProcess.LATE, "nobody has been met"
    assert peer.liveness.receive(Hello(1, 1, identity(1)), 0.0) is PeerProcess.SAME
    assert peer.liveness.receive(Pong(2), 0.0) is PeerProcess.ANOTHER
    assert peer.liveness.receive(Pong(1), 0.0) is PeerProcess.SAME, "a Pong does not introduce anybody"
    assert peer.liveness.receive(Hello(1, 1, identity(2)), 0.1) is PeerProcess.ANOTHER
    assert [peer.liveness.receive(message, 0.2) for message in (Hello(1, 1, identity(1)), Ping(1), Goodbye(1, ""))] == [
        PeerProcess.LATE
    ] * 3
    assert peer.liveness.receive(Goodbye(2, ""), 0.2) is PeerProcess.LEFT


@pytest.mark.parametrize("reason", ["hello_required", "hello_first"])
def test_a_reject_asks_for_hello_but_not_just_after_a_welcome(reason: str) -> None:
    side = Side(dials=True)
    peer = side.dial()
    side.table.welcome(peer, Welcome(1, identity(1)), side.now)
    side.table.met(peer, side.now)
    side.sent()
    side.now = 0.09
    assert side.table.asks_for_hello(peer, Reject(0, reason, ()), side.now, met=True)
    assert side.sent() == []
    side.now = 0.11
    assert side.table.asks_for_hello(peer, Reject(0, reason, ()), side.now, met=True)
    assert [type(message) for message in side.sent()] == [Hello]
    assert not side.table.asks_for_hello(peer, Reject(0, "refused", ()), side.now, met=True)
    assert not side.table.asks_for_hello(peer, Reject(9, reason, ()), side.now, met=True), "it names a session"


def test_hello_is_answered_and_another_process_of_the_name_replaces_the_first() -> None:
    side = Side(dials=False)
    assert side.hello("d", 1) is PeerProcess.SAME
    assert side.hello("d", 1) is PeerProcess.SAME
    assert side.hello("d", 2) is PeerProcess.ANOTHER
    assert side.sent() == [Welcome(1, identity(7, "prefill"))] * 3
    assert side.replaced == ["d"]
    assert side.hello("d", 1) is PeerProcess.LATE
    assert side.sent() == []
    assert side.tick(0.5) == [], "it was dialled, and sends no Ping"
    assert side.looked == ["d", "d"]


def test_what_does_not_fit_is_refused_each_time_and_reported_once() -> None:
    side = Side(dials=False)
    assert side.hello("d", 1, versions=(2, 3)) is PeerProcess.REFUSED
    rejected, reported = side.sent()
    assert (rejected.session, rejected.reason) == (0, "refused")
    assert all(text in rejected.fields[0] for text in ("2 to 3", "1 to 1"))
    assert isinstance(reported, PeerRefused)
    assert side.hello("d", 1, versions=(2, 3)) is PeerProcess.REFUSED
    assert side.sent() == [rejected]
    assert side.hello("d", 1, misfits=["model: another"]) is PeerProcess.REFUSED
    assert side.sent() == [Reject(0, "refused", ("model: another",)), PeerRefused("d", "d is refused: model: another")]
    side.table.fits("d")
    assert side.hello("d", 1, misfits=["model: another"]) is PeerProcess.REFUSED
    assert len(side.sent()) == 2
    assert not side.table.by_name


def test_a_process_that_does_not_fit_replaces_the_one_that_did() -> None:
    side = Side(dials=False)
    side.hello("d", 1)
    assert side.hello("d", 2, misfits=["model: another"]) is PeerProcess.REFUSED
    assert side.replaced == ["d"]


def test_peers_are_bounded() -> None:
    side = Side(dials=False)
    assert [side.hello(name, 1) for name in "abc"] == [PeerProcess.SAME, PeerProcess.SAME, PeerProcess.REFUSED]
    assert side.sent()[-1] == Reject(0, Cause.FULL.value, ("peers: 2 of 2",))
    side.table.remove(side.table.by_name["a"])
    assert side.hello("c", 1) is PeerProcess.SAME


def test_silence_is_looked_at_every_ping_ms_and_with_evidence_at_once() -> None:
    side = Side(dials=False)
    side.hello("d", 1)
    side.tick(0.45)
    assert side.looked == ["d", "d"]
    side.table.gone("d", "its connection has ended", side.now)
    side.table.gone("nobody", "its connection has ended", side.now)
    assert side.looked == ["d", "d", "d"]
    assert side.table.by_name["d"].liveness.gone


def test_sessions_of_one_peer_and_of_all_are_bounded() -> None:
    limits = Limits(sessions_max=3, peer_sessions_max=2)
    assert full([], "a", limits) == ""
    assert "peer_sessions_max" in full([Session("a"), Session("a")], "a", limits)
    assert full([Session("a"), Session("a")], "b", limits) == ""
    assert "sessions_max is 3" in full([Session("a"), Session("b"), Session("c")], "d", limits)
