"""The daemon's side of the router: rooms start once, stream, stop and end once, whatever repeats or comes late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdtransfer.errors import Cause, LocalProtocolError, RemoteProtocolError
from pdtransfer.handoff.peers import Send
from pdtransfer.limits import ENDED_ROOMS_MAX, LOAD_MS, ROUTERS_MAX, TEXT_LENGTH_MAX, TOKENS_BURST_MAX
from pdtransfer.serve.worker.service import IntroducePeers, RefusedRoom, Service, StartRoom, StopRoom
from pdtransfer.wire import (
    Begin,
    Begun,
    Cancel,
    End,
    Ended,
    Goodbye,
    Hello,
    Load,
    Logprobs,
    Ping,
    Pong,
    Reject,
    Sampling,
    Tokens,
    TokensAcked,
    Welcome,
    decode,
    encode,
    pack_ids,
)
from tests.support.routing_world import LIMITS, Faults, Net, World, identity, request

A, B = "node:a", "node:b"
LOAD = Load(True, False, 0, 0, 100, 100)


def begin(room: int, *, max_tokens: int = 100) -> Begin:
    return Begin(room, pack_ids([1, 2, 3]), Sampling(max_tokens), ("peer",), 1_000)


def hello(node: str = "a", incarnation: int = 1, versions: tuple[int, int] = (1, 1)) -> Hello:
    return Hello(*versions, identity(node, "router", incarnation))


class Daemon:
    """A Service with two routers that said Hello."""

    def __init__(self, **limits) -> None:
        self.limits = replace(LIMITS, **limits)
        self.service, self.now = Service(identity("d", "decode"), self.limits), 0.0
        self.receive(A, hello("a"))
        self.receive(B, hello("b"))

    def receive(self, peer: str, *messages) -> list:
        return [effect for message in messages for effect in self.service.receive(peer, message, self.now)]

    def tokens(self, room: int, *ids: int) -> list:
        return self.service.tokens(room, list(ids), self.now)

    def end(self, room: int, reason: str = "length", **fields) -> list:
        return self.service.end(End(room, reason, "", 0, **fields), self.now)

    def wait(self, seconds: float, *, alive: tuple[str, ...] = (A, B)) -> list:
        """Lets time pass; routers that are alive ping."""
        end, effects = self.now + seconds, []
        while self.now < end:
            for peer in alive:
                self.service.receive(peer, Ping(1), self.now)
            step = min(end, self.now + LIMITS.ping_ms / 1e3)
            while (when := self.service.next_tick()) is not None and when <= step:
                self.now = max(self.now, when)
                effects += self.service.tick(self.now)
            self.now = step
        return effects


def messages(effects: list, kind: type) -> list:
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


def test_hello_is_answered_and_a_version_that_we_do_not_speak_is_refused_with_both_ranges() -> None:
    service = Service(identity("d", "decode"), LIMITS)
    service.load(LOAD, 0.0)
    assert service.receive(A, hello(), 0.0) == [Send(A, Welcome(1, identity("d", "decode"))), Send(A, LOAD)]
    (refused,) = service.receive(B, hello("b", versions=(2, 3)), 0.0)
    assert isinstance(refused.message, Reject)
    assert all(part in refused.message.fields[0] for part in ("version", "2 to 3", "1 to 1"))
    assert not service.knows(B)


def test_routers_are_bounded() -> None:
    service = Service(identity("d", "decode"), LIMITS)
    for place in range(ROUTERS_MAX):
        service.receive(f"node:{place}", hello(str(place)), 0.0)
    (refused,) = service.receive("node:more", hello("more"), 0.0)
    assert refused.message.reason == "full"
    assert messages(service.receive("node:0", hello("0"), 0.0), Welcome)


def test_pong_carries_our_incarnation_even_to_a_stranger_and_brings_the_load(daemon: Daemon) -> None:
    daemon.service.load(LOAD, 0.0)
    assert daemon.receive(A, Ping(1)) == [Send(A, Pong(1)), Send(A, LOAD)]
    assert daemon.receive("node:stranger", Ping(9)) == [Send("node:stranger", Pong(1))]
    assert daemon.receive("node:stranger", begin(5)) == []


def test_a_routers_ping_names_peers_that_rooms_may_name_and_a_strangers_or_a_dead_processs_does_not() -> None:
    daemon = Daemon()
    assert daemon.receive(A, Ping(1, ("tcp://p:1", "tcp://p:2"))) == [
        Send(A, Pong(1)),
        IntroducePeers(("tcp://p:1", "tcp://p:2")),
    ]
    assert daemon.receive(A, Ping(7, ("tcp://p:1",))) == [], "another process than said Hello"
    assert daemon.receive("node:stranger", Ping(1, ("tcp://p:1",))) == [Send("node:stranger", Pong(1))]


def test_begin_starts_once_and_repeats_are_answered_begun(daemon: Daemon) -> None:
    assert daemon.receive(A, begin(7)) == [StartRoom(A, begin(7)), Send(A, Begun(7))]
    assert daemon.receive(A, begin(7), begin(7)) == [Send(A, Begun(7))] * 2


def test_late_begin_after_the_end_is_answered_with_that_end(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    end = End(7, "done", "", 0, kv_bytes=5)
    assert daemon.end(7, "done", kv_bytes=5) == [Send(A, end)]
    assert daemon.receive(A, begin(7)) == [Send(A, end)], "before Ended"
    daemon.receive(A, Ended(7))
    assert daemon.service.room_count == 0
    assert daemon.receive(A, begin(7)) == [Send(A, end)], "and after"


def test_memory_of_ended_rooms_is_bounded_a_router(daemon: Daemon) -> None:
    daemon.receive(B, Cancel(1, "aborted"))
    for room in range(ENDED_ROOMS_MAX + 10):
        daemon.receive(A, Cancel(room, "aborted"))
    assert len(daemon.service._routers[A].ended) == ENDED_ROOMS_MAX
    assert messages(daemon.receive(A, begin(ENDED_ROOMS_MAX + 9)), End)
    assert messages(daemon.receive(B, begin(1)), End), "one router cannot push out another's"


def test_cancel_that_overtakes_its_begin_refuses_it_forever(daemon: Daemon) -> None:
    (ended,) = daemon.receive(A, Cancel(7, "deadline"))
    assert ended.message == End(7, "aborted", "cancelled before it began", 0)
    assert daemon.receive(A, begin(7)) == [ended]
    daemon.receive(A, Ended(7))
    assert daemon.receive(A, begin(7)) == [ended]


def test_cancel_stops_once_and_the_end_is_a_failure_whatever_the_daemon_reports(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    daemon.tokens(7, 1, 2)
    assert daemon.receive(A, Cancel(7, "deadline")) == [StopRoom(7, Cause.DEADLINE)]
    assert daemon.receive(A, Cancel(7, "deadline")) == []
    assert daemon.tokens(7, 3) == []
    assert daemon.end(7, "length") == [Send(A, End(7, "deadline", "", 2))]
    assert daemon.end(7, "stop") == [], "only the first end counts"
    assert daemon.receive(A, Cancel(7, "deadline")) == [Send(A, End(7, "deadline", "", 2))]


def test_a_hello_of_another_role_is_a_breach_and_no_router(daemon: Daemon) -> None:
    with pytest.raises(RemoteProtocolError, match="role: prefill, only a router"):
        daemon.receive("node:p", Hello(1, 1, identity("p", "prefill", 1)))
    assert daemon.receive("node:p", begin(7)) == []


def test_another_routers_room_is_a_breach_and_stays_as_it_is(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    daemon.tokens(7, 1)
    for message in (begin(7), Cancel(7, "aborted"), TokensAcked(7, 1), Ended(7)):
        with pytest.raises(RemoteProtocolError, match="room: 0000000000000007 is not node:b's"):
            daemon.receive(B, message)
    assert messages(daemon.wait(0.06), Tokens) == [Tokens(7, 0, pack_ids([1]))]
    with pytest.raises(RemoteProtocolError, match="kind: Tokens is not a message from a router to a daemon"):
        daemon.receive(A, Tokens(7, 0, b""))


def test_tokens_repeat_from_the_first_unacknowledged_one_until_acknowledged(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    assert daemon.tokens(7, 5, 6) == [Send(A, Tokens(7, 0, pack_ids([5, 6])))]
    assert daemon.tokens(7, 8) == [], "it goes when those before are acknowledged"
    assert messages(daemon.wait(0.06), Tokens) == [Tokens(7, 0, pack_ids([5, 6]))]
    assert messages(daemon.receive(A, TokensAcked(7, 2)), Tokens) == [Tokens(7, 2, pack_ids([8]))]
    assert set(messages(daemon.wait(1), Tokens)) == {Tokens(7, 2, pack_ids([8]))}
    daemon.receive(A, TokensAcked(7, 1), TokensAcked(7, 99))
    assert messages(daemon.wait(1), Tokens), "late and wild acknowledgements change nothing"
    daemon.receive(A, TokensAcked(7, 3))
    assert not messages(daemon.wait(1), Tokens)


def test_a_router_that_is_behind_has_one_message_of_each_room_to_read(daemon: Daemon) -> None:
    daemon.receive(A, begin(7, max_tokens=500))
    sent = [message for token in range(400) for message in messages(daemon.tokens(7, token), Tokens)]
    assert sent == [Tokens(7, 0, pack_ids([0]))]
    assert set(messages(daemon.wait(5.0), Tokens)) == set(sent), "repeats do not grow"
    assert messages(daemon.receive(A, TokensAcked(7, 1)), Tokens) == [Tokens(7, 1, pack_ids(list(range(1, 400))))]


def test_a_slow_router_gets_one_window_and_holds_no_more_than_max_tokens(daemon: Daemon) -> None:
    total = TOKENS_BURST_MAX + 1_000
    daemon.receive(A, begin(7, max_tokens=total))
    ids = list(range(total))
    (first,) = messages(daemon.tokens(7, *ids), Tokens)
    assert first == Tokens(7, 0, pack_ids(ids[:TOKENS_BURST_MAX]))
    assert daemon.receive(A, TokensAcked(7, 100)) == [], "the rest of the window is on its way"
    assert messages(daemon.wait(0.06), Tokens) == [Tokens(7, 100, pack_ids(ids[100:TOKENS_BURST_MAX]))]
    assert daemon.receive(A, TokensAcked(7, TOKENS_BURST_MAX)) == [
        Send(A, Tokens(7, TOKENS_BURST_MAX, pack_ids(ids[TOKENS_BURST_MAX:])))
    ]
    with pytest.raises(LocalProtocolError, match="max_tokens is"):
        daemon.tokens(7, 1)


def test_logprobs_travel_with_their_ids_and_are_as_many_as_the_request_asks_for() -> None:
    daemon, sampling = Daemon(), Sampling(9_000, logprobs=True, top_logprobs=1)
    daemon.receive(A, Begin(7, pack_ids([1]), sampling, ("peer",), 1_000))
    total = TOKENS_BURST_MAX + 3
    rows = [Logprobs(-float(index), ((index, -0.5),)).pack() for index in range(total)]
    (first,) = messages(daemon.service.tokens(7, list(range(total)), 0.0, logprobs=b"".join(rows)), Tokens)
    assert first.logprobs == b"".join(rows[:TOKENS_BURST_MAX])
    assert not messages(daemon.receive(A, TokensAcked(7, 3)), Tokens)
    (again, *_) = messages(daemon.wait(0.06), Tokens)
    assert (again.first, again.logprobs) == (3, b"".join(rows[3:TOKENS_BURST_MAX]))
    (rest,) = messages(daemon.receive(A, TokensAcked(7, TOKENS_BURST_MAX)), Tokens)
    assert (rest.first, rest.logprobs) == (TOKENS_BURST_MAX, b"".join(rows[TOKENS_BURST_MAX:]))
    for wrong in (b"", rows[0][:-1], rows[0] * 2):
        with pytest.raises(LocalProtocolError, match="logprobs"):
            daemon.service.tokens(7, [1], 0.0, logprobs=wrong)


def test_end_repeats_until_ended_with_what_is_unacknowledged(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    daemon.tokens(7, 1, 2)
    daemon.end(7, "stop")
    again = daemon.wait(1)
    assert set(messages(again, End)) == {End(7, "stop", "", 2)}
    assert set(messages(again, Tokens)) == {Tokens(7, 0, pack_ids([1, 2]))}
    daemon.receive(A, Ended(7))
    assert not daemon.wait(1)


def test_a_long_reason_is_cut_to_what_the_wire_takes(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    (end,) = daemon.service.end(End(7, "engine", "x" * 10_000, 0), daemon.now)
    assert decode(encode(end.message)).detail == "x" * TEXT_LENGTH_MAX


def test_ended_for_a_room_that_runs_changes_nothing(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    assert daemon.receive(A, Ended(7)) == []
    assert daemon.tokens(7, 1)


def test_a_quiet_room_sends_begun_so_that_a_router_which_forgot_it_can_cancel(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    assert messages(daemon.wait(LIMITS.resend_ms_max / 1e3 + 0.01), Begun) == [Begun(7)]


def test_a_silent_routers_rooms_stop_and_nobody_elses(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    daemon.receive(B, begin(8))
    effects = daemon.wait(LIMITS.silence_ms / 1e3 + 0.3, alive=(B,))
    assert [effect for effect in effects if isinstance(effect, StopRoom)] == [StopRoom(7, Cause.PEER_LOST)]
    daemon.end(7, "aborted")
    assert not [each for each in daemon.wait(1, alive=(B,)) if each.peer == A], "nothing is said to the silent"
    assert daemon.receive(A, begin(9)) == [], "not before it is heard again"
    daemon.receive(A, Ping(1))
    assert daemon.receive(A, begin(9))
    assert End(7, "aborted", "", 0) in messages(daemon.wait(1), End)


def test_a_slow_router_keeps_its_rooms_and_one_that_is_gone_loses_them() -> None:
    daemon = Daemon(slow_ms=2_000, silence_ms=10_000)
    daemon.receive(A, begin(7))
    assert not [each for each in daemon.wait(9.5, alive=()) if isinstance(each, StopRoom)]
    daemon.receive(A, Ping(1))
    assert daemon.service.gone(A, "its connection has ended", daemon.now) == []
    effects = daemon.wait(2.6, alive=())
    assert [effect for effect in effects if isinstance(effect, StopRoom)] == [StopRoom(7, Cause.PEER_LOST)]


def test_evidence_about_a_router_that_was_forgotten_is_nothing(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    daemon.end(7, "aborted")
    away = max(LIMITS.room_deadline_ms, 2 * LIMITS.silence_ms) / 1e3
    daemon.now += away
    daemon.service.gone(A, "its connection has ended", daemon.now)
    assert not daemon.service.knows(A)
    assert daemon.service.gone(A, "its connection has ended", daemon.now) == []
    daemon.wait(1.0, alive=(B,))


def test_a_router_that_stays_away_is_forgotten_once_its_rooms_have_ended(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    away = LIMITS.room_deadline_ms / 1e3 + 1
    daemon.wait(away, alive=(B,))
    assert daemon.service.knows(A), "the daemon has not ended its room"
    daemon.end(7, "aborted")
    daemon.wait(away, alive=(B,))
    assert not daemon.service.knows(A)
    assert daemon.service.room_count == 0


def test_a_restarted_routers_rooms_stop_and_late_words_of_the_old_one_do_nothing(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    stop, welcome = daemon.receive(A, hello("a", 2))
    assert (stop, type(welcome.message)) == (StopRoom(7, Cause.PEER_RESTARTED), Welcome)
    daemon.receive(A, begin(8))
    assert daemon.receive(A, hello("a", 1)) == []
    assert daemon.receive(A, Ping(1)) == []
    assert daemon.tokens(8, 1), "the new one's room runs"


def test_goodbye_stops_a_routers_rooms(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    assert daemon.receive(A, Goodbye(99, "shutdown")) == [], "another incarnation's"
    assert daemon.receive(A, Goodbye(1, "shutdown")) == [StopRoom(7, Cause.SHUTDOWN)]


def test_a_router_that_rejects_us_has_its_rooms_stopped(daemon: Daemon) -> None:
    daemon.receive(A, begin(7))
    daemon.receive(B, begin(8))
    assert daemon.receive(A, Reject(0, "breach", ("Tokens.ids: 3 bytes",))) == [StopRoom(7, Cause.BREACH)]


def test_a_full_or_draining_daemon_refuses_each_time_it_is_asked() -> None:
    daemon = Daemon(rooms_max=1)
    daemon.receive(A, begin(7))
    full, refused = daemon.receive(B, begin(8))
    assert refused == RefusedRoom(begin(8), full.message)
    assert (full.message.reason, full.message.retry_ms > 0) == ("full", True)
    daemon.end(7)
    daemon.receive(A, Ended(7))
    assert daemon.receive(B, begin(8)) == [full], "it may have arrived: the room stays refused, and is reported once"
    daemon.service.load(Load(True, True, 0, 0, 1, 1), 0.0)
    draining, refused = daemon.receive(B, begin(9))
    assert refused == RefusedRoom(begin(9), draining.message)
    assert draining.message.reason == "shutdown"


def test_a_router_that_cancels_what_never_began_makes_us_remember_a_bounded_number(daemon: Daemon) -> None:
    for room in range(ENDED_ROOMS_MAX + 100):
        daemon.receive(A, Cancel(room, "aborted"))
    assert len(daemon.service._routers[A].ended) == ENDED_ROOMS_MAX
    assert daemon.service.room_count == 0


def test_prompts_are_bounded_by_their_bytes_until_their_rooms_are_over() -> None:
    daemon = Daemon(prompts_bytes_max=3 * 12)
    for room in (1, 2, 3):
        daemon.receive(A, begin(room))
    full, _ = daemon.receive(A, begin(4))
    assert full.message.detail == "prompts: 36 bytes and 12 more, prompts_bytes_max is 36"
    assert (full.message.reason, full.message.retry_ms > 0) == ("full", True)
    daemon.end(2)
    assert daemon.receive(B, begin(5))[0].message.reason == "full", "its End was not acknowledged"
    daemon.receive(A, Ended(2))
    assert any(isinstance(effect, StartRoom) for effect in daemon.receive(B, begin(6)))
    # B's room is over when B has been away for long.
    daemon.end(6)
    daemon.now = 2 * daemon.limits.room_deadline_ms / 1e3
    daemon.receive(A, Ping(1))
    daemon.service.tick(daemon.now)
    assert any(isinstance(effect, StartRoom) for effect in daemon.receive(A, begin(7)))


def test_load_is_sent_when_it_changes_but_not_too_often(daemon: Daemon) -> None:
    other, last = Load(True, False, 1, 0, 99, 100), Load(True, False, 2, 0, 98, 100)
    assert daemon.service.load(LOAD, daemon.now) == [Send(A, LOAD), Send(B, LOAD)]
    assert daemon.service.load(LOAD, daemon.now) == []
    assert daemon.service.load(other, daemon.now) == []
    assert daemon.service.load(last, daemon.now) == []
    assert daemon.service.tick(daemon.now + LOAD_MS / 1e3) == [Send(A, last), Send(B, last)]
    assert daemon.service.load(LOAD, daemon.now + 0.5) == [Send(A, LOAD), Send(B, LOAD)]


def test_goodbye_of_ours_goes_to_every_router() -> None:
    assert Daemon().service.goodbye("shutdown") == [Send(peer, Goodbye(1, "shutdown")) for peer in (A, B)]


def test_a_restarted_router_finds_every_daemon_free_again() -> None:
    for seed in range(5):
        world = World(seed, net=Net(0.1, 0.1, (0.001, 0.1)), faults=Faults(slow_s=2.0))
        world.run(2)
        for number in range(8):
            world.submit(request(number, max_tokens=40))
        world.run(1)
        before = {room for _, room in world.starts}  # more than were submitted, where a daemon counted as lost
        assert sum(len(daemon.live) for daemon in world.daemons) > 0
        world.restart_router()
        world.heal()
        world.run(20)
        assert all(not daemon.live and daemon.service.room_count == 0 for daemon in world.daemons)
        assert {room for _, room, _ in world.stops} <= before
        assert world.stops
        assert isinstance(world.submit(request()), int)
        world.run(20)
        world.check_quiet()


def test_a_router_that_was_once_taken_for_an_earlier_process_of_itself_gets_back(daemon: Daemon) -> None:
    """As test_routing's: what a dead router had left on its way came after the live one's Hello."""
    daemon.receive(A, hello("a", 2), hello("a", 3), hello("a", 2))
    daemon.wait(2 * LIMITS.silence_ms / 1e3)
    (welcome,) = daemon.receive(A, hello("a", 2))
    assert isinstance(welcome.message, Welcome)
