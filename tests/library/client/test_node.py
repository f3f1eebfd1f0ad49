"""The shell of a node: its clock, the order of its effects, events it waits for, and what it tells of a bad peer."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from pdtransfer.bus import Bus
from pdtransfer.bus.keys import revoked
from pdtransfer.client.core_driver import EffectRunner, LoopClock, Ticker
from pdtransfer.client.decode_node import DecodeNode
from pdtransfer.client.prefill_node import PrefillNode
from pdtransfer.client.settings import Others
from pdtransfer.errors import Cause, LocalProtocolError
from pdtransfer.handoff.decode.room_request import RoomRequest, chosen_rows
from pdtransfer.handoff.effects import RoomDrained, RoomFailed, RoomReady
from pdtransfer.handoff.states import DecodeRoom
from pdtransfer.layout.geometry import Int64s
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.device_events import POLL_S, Event, EventQueue
from pdtransfer.transports.options import ArenaOptions
from pdtransfer.transports.shm import entering
from pdtransfer.transports.shm.entering import EnteredArena
from pdtransfer.wire import (
    Begin,
    Goodbye,
    Grant,
    Granted,
    Hello,
    Landed,
    Message,
    Ping,
    Reach,
    Register,
    Registered,
    Reject,
    Released,
    Sampling,
    Welcome,
    decode,
    encode,
    pack_ids,
)
from tests.support.client_pair import LIMITS, Late, component, settings
from tests.support.internals import lines_of
from tests.support.node_pair import SOURCE, TARGET, NodePair, node_pair
from tests.support.processes import no_descriptors
from tests.support.waiting import until

# Ticker

SLACK_S = 5.0


class Times:
    """Timers of a core: ticks when the earliest has come."""

    def __init__(self) -> None:
        self.loop, self.clock, self.due, self.ticked = asyncio.get_running_loop(), LoopClock(SLACK_S), [], []
        self.ticker = Ticker(lambda: min(self.due, default=None), self._tick, self.clock)

    def at(self, seconds: float) -> float:
        self.due.append(self.clock.now() + seconds)
        self.ticker.arm()
        return self.due[-1]

    def _tick(self) -> None:
        now = self.clock.now()
        self.ticked.append(now)
        self.due = [when for when in self.due if when > now]


@pytest.fixture
def ends(marked: Callable[..., AbstractAsyncContextManager[NodePair]]) -> AbstractAsyncContextManager[NodePair]:
    return marked(node_pair)


async def test_ticks_come_when_they_are_due_and_not_before() -> None:
    times = Times()
    late, early = times.at(0.06), times.at(0.02)
    await until(lambda: not times.due)
    # libuv counts milliseconds: a tick may come that much early, and then comes again.
    assert min(times.ticked) >= early - 0.002
    assert times.ticked[-1] >= late
    ticks = len(times.ticked)
    await asyncio.sleep(0.03)
    assert len(times.ticked) == ticks


async def test_an_earlier_time_moves_the_tick_forward() -> None:
    times = Times()
    times.at(20.0)
    early = times.at(0.01)
    await until(lambda: early not in times.due)
    assert len(times.due) == 1
    assert times.ticked[-1] < early + 5


async def test_a_time_that_was_given_up_ticks_for_nobody() -> None:
    times = Times()
    times.at(0.02)
    times.due.clear()
    times.at(0.05)
    await until(lambda: not times.due)
    assert not times.due


async def test_a_stopped_ticker_ticks_no_more() -> None:
    times = Times()
    times.at(0.02)
    times.ticker.stop()
    await asyncio.sleep(0.06)
    assert times.ticked == []


async def test_what_a_process_did_not_run_for_is_no_time_of_its_core() -> None:
    times = Times()
    times.clock._slack_s = 0.01
    first, second = times.at(0.02), times.at(0.5)
    time.sleep(1)  # noqa: ASYNC251 - nothing runs
    await until(lambda: times.ticked)
    assert times.ticked[0] <= first + 0.01 + 1e-9
    assert times.due == [second], "it has its half second still"
    await until(lambda: not times.due)
    assert times.ticked == sorted(times.ticked)
    assert times.ticked[-1] >= second - 0.002


async def test_a_clock_never_goes_back() -> None:
    clock = LoopClock(0.01)
    clock.due = asyncio.get_running_loop().time() + 10
    before = clock.now()
    clock.due = before - 1.0
    assert clock.now() == before
    clock.due = None
    await until(lambda: clock.now() > before)


async def test_a_node_that_stood_still_calls_no_peer_silent() -> None:
    limits = replace(LIMITS, ping_ms=100, silence_ms=400)
    async with node_pair(limits=limits) as it:
        it.expect(1)
        await until(lambda: it.decode.core.rooms[1].state is DecodeRoom.LANDING)
        peer, clock = it.decode.core.prefill_peers.peers[it.endpoint], it.decode._clock
        await until(lambda: 10 < peer.liveness.silent_ms(clock.now()) < 90)  # between two Pings: nothing is on its way
        time.sleep(1)  # noqa: ASYNC251 - neither side runs
        await asyncio.sleep(0.3)
        it.send(1)
        await it.ready(1)


async def test_what_has_arrived_is_received_before_a_tick() -> None:
    calls, clock = list[str](), LoopClock(SLACK_S)
    due = [clock.now() + 0.02]

    def tick() -> None:
        calls.append("tick")
        due.clear()

    Ticker(lambda: min(due, default=None), tick, clock, lambda: calls.append("receive")).arm()
    await until(lambda: not due)
    assert calls[-2:] == ["receive", "tick"]


async def test_both_nodes_read_their_lines_before_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Bus] = []
    monkeypatch.setattr(Bus, "read_lines", lambda bus, peer=None: None if peer else read.append(bus))
    async with node_pair() as it:
        await it.moved(1)
        await until(lambda: {it.prefill.bus, it.decode.bus} <= set(read))


# Performer


class Performed:
    """Effects are numbers; some make others while they are performed, one breaks."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.due: float | None = None  # of the next tick
        self.ticks = 0
        self.ticker = Ticker(lambda: self.due, self._tick, LoopClock(SLACK_S))
        self.perform: EffectRunner[int] = EffectRunner(self._perform, self.ticker)
        self.makes: dict[int, list[int]] = {}
        self.unended: list[int] = []

    def _tick(self) -> None:
        self.ticks += 1
        if self.ticks == 1:
            raise RuntimeError("of this tick alone")
        self.due = None

    def _perform(self, effect: int) -> None:
        if effect < 0:
            raise RuntimeError(effect)
        assert not self.unended, "the effect before it has not ended"
        self.unended.append(effect)
        self.done.append(effect)
        self.perform(self.makes.get(effect, []))
        self.unended.pop()


async def test_effects_of_effects_come_after_those_that_are_due() -> None:
    performed = Performed()
    performed.makes = {1: [10, 11], 10: [100]}
    performed.perform([1, 2, 3])
    assert performed.done == [1, 2, 3, 10, 11, 100]


async def test_an_effect_that_breaks_costs_none_of_the_others() -> None:
    performed = Performed()
    with pytest.raises(RuntimeError):
        performed.perform([1, -1, 2])
    performed.perform([3])
    assert performed.done == [1, 2, 3]


async def test_after_an_effect_that_breaks_the_others_are_carried_out_and_the_next_tick_comes_by_itself() -> None:
    """Else a node with silent peers would ping, repeat and expire nothing any more."""
    performed, loop = Performed(), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, __: None)
    performed.due = loop.time() + 0.01
    with pytest.raises(RuntimeError):
        performed.perform([-1, 1, -1, 2])
    assert performed.done == []
    await until(lambda: performed.done == [1, 2])
    await until(lambda: performed.ticks == 2)


# Events


class Queued:
    """A queue, what it has called, and what it reports as broken."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.broken: list[tuple[int, str]] = []
        self.queue = EventQueue(lambda room, error: self.broken.append((room, str(error))))

    def call(self, room: int, after: Event | None, name: str) -> None:
        self.queue.call(room, after, lambda: self.called.append(name))


async def test_a_fired_event_calls_at_once_and_none_is_as_good() -> None:
    queued = Queued()
    fired = Late()
    fired.fired = True
    queued.call(1, fired, "fired")
    queued.call(1, None, "none")
    assert queued.called == ["fired", "none"]


async def test_a_late_event_calls_once_and_the_loop_goes_on_meanwhile() -> None:
    queued, late = Queued(), Late()
    queued.call(1, late, "late")
    await until(lambda: late.asked > 10)
    assert queued.called == []
    late.fired = True
    await until(lambda: queued.called)
    asked = late.asked
    await asyncio.sleep(0.01)
    assert (queued.called, late.asked) == (["late"], asked)


async def test_an_event_is_asked_no_more_often_than_its_interval_allows() -> None:
    queued, late = Queued(), Late()
    begun_s = time.monotonic()
    queued.call(1, late, "late")
    await until(lambda: late.asked > 20)
    assert late.asked <= 2 + (time.monotonic() - begun_s) / POLL_S
    queued.queue.stop()


async def test_a_late_event_is_asked_where_there_is_no_descriptor_left_and_none_is_kept_in_the_end() -> None:
    before = len(os.listdir("/proc/self/fd"))
    queued, late = Queued(), Late()
    with no_descriptors():
        queued.call(1, late, "late")
        await until(lambda: late.asked > 2)
    late.fired = True
    await until(lambda: queued.called)
    late.fired = False
    queued.queue.stop()
    queued.call(2, late, "too late")
    asked = late.asked
    await asyncio.sleep(0.01)
    assert late.asked == asked
    assert len(os.listdir("/proc/self/fd")) == before


async def test_calls_of_a_room_keep_their_order_and_those_of_others_pass_them() -> None:
    queued, first, second = Queued(), Late(), Late()
    second.fired = True
    queued.call(1, first, "first")
    queued.call(1, second, "second")
    queued.call(1, None, "last")
    queued.call(2, None, "other")
    await until(lambda: first.asked > 3)
    assert (queued.called, second.asked) == (["other"], 0)
    first.fired = True
    await until(lambda: len(queued.called) > 1)
    assert queued.called == ["other", "first", "second", "last"]


async def test_one_event_of_many_calls_never_reorders_them() -> None:
    """It fires between two askings, wherever they are."""

    class Counts(Late):
        def query(self) -> bool:
            self.asked += 1
            return self.asked > fires_at

    for fires_at in range(8):
        queued, event = Queued(), Counts()
        for name in "abcd":
            queued.call(1, event, name)
        await until(lambda queued=queued: len(queued.called) == 4)
        assert queued.called == list("abcd"), fires_at


async def test_a_forgotten_room_is_called_no_more_and_its_label_may_come_back() -> None:
    queued, late = Queued(), Late()
    queued.call(1, late, "late")
    queued.call(1, None, "after it")
    queued.queue.forget(1)
    queued.queue.forget(2)
    asked = late.asked
    late.fired = True
    queued.call(1, None, "again")
    await asyncio.sleep(0.01)
    assert (queued.called, late.asked) == (["again"], asked)


async def test_a_call_may_forget_its_room_or_call_for_it() -> None:
    queued, late = Queued(), Late()
    queued.queue.call(1, late, lambda: queued.queue.forget(1))
    queued.call(1, None, "forgotten")
    queued.queue.call(2, late, lambda: queued.call(2, None, "inner"))
    queued.call(2, None, "next")
    late.fired = True
    await until(lambda: len(queued.called) == 2)
    await asyncio.sleep(0.01)
    assert queued.called == ["next", "inner"]


async def test_an_event_that_breaks_is_reported_and_asked_no_more() -> None:
    class Breaks(Late):
        def query(self) -> bool:
            if super().query() or self.asked == 3:
                raise RuntimeError("no such stream")
            return False

    queued, event = Queued(), Breaks()
    queued.call(1, event, "fired")
    queued.call(1, None, "after it")
    await until(lambda: queued.broken)
    await asyncio.sleep(0.01)
    assert (queued.called, queued.broken, event.asked) == ([], [(1, "no such stream")], 3)


async def test_a_stopped_queue_asks_no_more() -> None:
    queued, late = Queued(), Late()
    queued.call(1, late, "late")
    queued.queue.stop()
    asked, late.fired = late.asked, True
    await asyncio.sleep(0.01)
    assert (queued.called, late.asked) == ([], asked)


# Nodes


async def test_a_dialled_peer_has_its_session_before_the_first_room_comes(ends: NodePair) -> None:
    ends.decode.introduce((ends.endpoint,))
    await until(lambda: ends.prefill.core.sessions and next(iter(ends.prefill.core.sessions.values())).granting)
    sessions = ends.decode.core.prefill_peers.sessions
    await until(lambda: [session.state.value for session in sessions.values()] == ["up"])


async def test_grants_of_a_session_over_shared_memory_go_by_its_line_until_it_ends(ends: NodePair) -> None:
    await ends.moved(1)
    sessions = set(ends.decode.core.prefill_peers.sessions)
    await until(lambda: set(lines_of(ends.prefill.bus)) == set(lines_of(ends.decode.bus)) == sessions)
    (line,) = lines_of(ends.prefill.bus).values()
    sent: list[bytes] = []
    send, line.send = line.send, lambda frame: bool(sent.append(frame)) or send(frame)
    await ends.moved(2)
    assert [type(decode(frame)) for frame in sent] == [Granted, Landed]
    ends.decode.receive(ends.endpoint, revoked())
    assert lines_of(ends.decode.bus) == {}
    await until(lambda: not lines_of(ends.prefill.bus))


async def test_a_session_whose_line_has_ended_goes_on_by_zmq(ends: NodePair) -> None:
    ends.decode.introduce((ends.endpoint,))
    await until(lambda: lines_of(ends.decode.bus))
    for session in list(lines_of(ends.decode.bus)):
        ends.decode.bus.detach(session)
    await ends.moved(1)
    assert lines_of(ends.decode.bus) == {}


async def test_of_the_sources_that_a_node_gets_it_dials_those_that_it_may() -> None:
    async with node_pair() as it:
        keyed = "k" * 40 + "@tcp://127.0.0.1:1"  # this node has no keys
        it.decode.introduce((keyed, "nonsense", it.endpoint, it.endpoint))
        assert list(it.decode.core.prefill_peers.peers) == [it.endpoint]
        sessions = it.decode.core.prefill_peers.sessions
        await until(lambda: [session.state.value for session in sessions.values()] == ["up"])
        assert it.events_d == []
    async with node_pair(limits=replace(LIMITS, sessions_max=1)) as it:
        it.decode.introduce((it.endpoint,))
        assert not it.decode.core.prefill_peers.peers
        it.expect(1)
        assert list(it.decode.core.prefill_peers.peers) == [it.endpoint], "the place was kept for it"


async def test_a_room_whose_source_is_one_too_many_to_dial_is_no_fault_of_its_request(ends: NodePair) -> None:
    """Its router tries another prefill then, and says 503 where there is none."""
    limits, too_many = ends.decode.bus._limits, "tcp://127.0.0.1:1"
    await ends.moved(1)
    ends.decode.bus._limits = replace(limits, dials_max=1)
    ends.decode.expect(RoomRequest(room=2, tokens=1, sources=[too_many], time_left_s=60))
    (failed,) = [each for each in ends.events_d if isinstance(each, RoomFailed)]
    assert (failed.room, failed.cause) == (2, Cause.PEER_LOST)
    assert too_many in failed.detail


async def test_a_room_lands_while_the_rest_of_its_arena_is_yet_to_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    enter, enter_next, go_on = EnteredArena.enter, EnteredArena.enter_next, threading.Event()
    demands, steps = list[Int64s](), list[bool]()

    def entered(arena: EnteredArena, parts: Int64s, **how: Any) -> Int64s:
        demands.append(parts)
        return enter(arena, parts, **how)

    def later(arena: EnteredArena) -> bool:
        assert not steps or go_on.wait(60), "the first step is a part of mapping it"
        steps.append(enter_next(arena))
        return steps[-1]

    monkeypatch.setattr(EnteredArena, "enter", entered)
    monkeypatch.setattr(EnteredArena, "enter_next", later)
    monkeypatch.setattr(entering, "STEP_BYTES", 4_096)
    monkeypatch.setattr(entering, "PIECE_BYTES", 4_096)
    async with node_pair() as it:
        it.decode.introduce((it.endpoint,))
        sessions = it.decode.core.prefill_peers.sessions
        await until(lambda: [session.bytes_ready for session in sessions.values()] == [TARGET.layout.end])
        it.expect(1)
        await until(lambda: demands)  # of the Grant: nothing is pushed yet
        it.send(1)
        await it.ready(1)
        assert steps == [True]
        go_on.set()


async def test_the_arena_is_handed_over_by_a_socket_in_the_directory_that_was_named(tmp_path: Path) -> None:
    async with node_pair(options=ArenaOptions(socket_directory=tmp_path / "sockets")) as it:
        await it.moved(1)
        assert [path.is_socket() for path in (tmp_path / "sockets").iterdir()] == [True]
    assert list((tmp_path / "sockets").iterdir()) == []


async def test_what_copies_took_is_kept_until_the_room_is_drained(ends: NodePair) -> None:
    kept: list[int] = []
    ends.prefill._on_event = lambda event: kept.append(ends.prefill.copy_ns.get(event.room, 0))
    ends.send(1)
    ends.expect(1)
    ready_after = ends.prefill.stamp_ns
    await until(lambda: len(kept) == 3)  # leased, landed, drained
    assert kept[1] > 0
    assert ends.prefill.copy_ns == {}
    assert ends.prefill.stamp_ns > ready_after


async def test_open_of_a_label_whose_pages_are_still_read_reports_no_drained(ends: NodePair) -> None:
    ends.prefill.open(1, tokens=10, time_left_s=20)
    with pytest.raises(LocalProtocolError, match="open already"):
        ends.prefill.open(1, tokens=10, time_left_s=20)
    assert ends.events_p == []


@pytest.mark.given(engine_slots=True)
async def test_a_label_that_is_expected_again_leaves_its_room_alone(ends: NodePair) -> None:
    """Its slots may still be written: RoomFailed and RoomDrained would be wrong for it."""
    rows = chosen_rows([component(TARGET)], {"kv": np.arange(10)}, tokens=10)
    ends.expect(1, chosen=rows)
    with pytest.raises(LocalProtocolError, match="expected already"):
        ends.expect(1, chosen=rows)
    assert ends.events_d == []
    ends.send(1)
    await until(lambda: len(ends.events_d) == 2)
    assert [type(event) for event in ends.events_d] == [RoomReady, RoomDrained]


async def test_a_hand_off_takes_the_time_of_its_own_grant_and_an_ended_session_leaves_nothing(ends: NodePair) -> None:
    took = list[float]()
    async with stranger(ends.endpoint) as other:
        ends.prefill._handed_off = lambda _, __, seconds: took.append(seconds)
        reach = Reach("shm", "another boot", "@nowhere", bytes(32), 0, TARGET.layout.end)
        await other.send(Hello(1, 1, replace_identity(ends, node="other")), Register(5, (), reach))
        await other.receive(Registered)
        ends.send(1)
        ends.prefill.stamp_ns -= 3_600 * 10**9  # of the finish: this grant comes an hour after it
        for number in (1, 2):  # the second one is never acknowledged
            await other.send(Grant(5, number, number, 10, 0, (), True, 60_000))
        await other.receive(Landed)
        await other.send(Released(5, 1))
        await until(lambda: took)
        assert 0 <= took[0] < 3_600
        ends.send(2)
        await other.receive(Landed)
        await other.send(Goodbye(77, "shutdown"))
        await until(lambda: not ends.prefill.core.sessions)
        assert ends.prefill._landed_ns == {}


async def test_a_release_whose_event_breaks_keeps_the_slots_and_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    class Breaks:
        def query(self) -> bool:
            raise RuntimeError("no such stream")

    async with node_pair() as it:
        await it.moved(1)
        it.decode.release(1, after=Breaks())
        assert 1 in it.decode.core.rooms
        assert (
            "CRITICAL",
            "room 0000000000000001: its CUDA event failed, its slots stay leased until this node ends: no such stream",
        ) in [(record.levelname, record.getMessage()) for record in caplog.records]


async def test_a_source_that_keys_do_not_allow_fails_the_room_with_the_reason(ends: NodePair) -> None:
    key = "A" * 39 + "0"
    ends.expect(1, sources=[f"{key}@{ends.endpoint}"])
    (failed,) = ends.events_d
    assert isinstance(failed, RoomFailed)
    assert failed.cause is Cause.REFUSED
    assert key in failed.detail


async def test_goodbye_is_sent_to_both_sides_so_that_nobody_waits_for_silence(ends: NodePair) -> None:
    await ends.moved(1)
    session = ends.decode.core.prefill_peers.peers[ends.endpoint].session
    assert session is not None
    await ends.prefill.close()
    await until(lambda: session.state.value == "closed")
    assert session.verdict == (Cause.PEER_LOST, f"{ends.endpoint} said goodbye: shutdown")
    ends.decode.release(1)
    assert ends.decode.core.idle


class Stranger:
    """A raw socket that speaks to a listener, as somebody else's implementation would, or worse."""

    def __init__(self, endpoint: str, context: zmq.asyncio.Context) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(endpoint)

    async def send(self, *frames: Message | bytes) -> None:
        for frame in frames:
            await self._socket.send(frame if isinstance(frame, bytes) else encode(frame))

    async def receive(self, kind: type[Message] | tuple[type[Message], ...]) -> Any:
        """The next message of that kind, or of these."""
        while True:
            message = decode(await self._socket.recv())
            if isinstance(message, kind):
                return message


@asynccontextmanager
async def stranger(endpoint: str) -> AsyncIterator[Stranger]:
    context = zmq.asyncio.Context()
    try:
        yield Stranger(endpoint, context)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("transport", "why"), [("shm", "another"), ("carrier", "Register.reach.transport: 'carrier', this node takes shm")]
)
async def test_a_hand_over_that_cannot_be_reached_is_refused_and_others_go_on(
    ends: NodePair, transport: str, why: str
) -> None:
    async with stranger(ends.endpoint) as other:
        identity = replace_identity(ends, node="other")
        await other.send(Hello(1, 1, identity))
        assert (await other.receive(Welcome)).identity.node == "p"
        reach = Reach(transport, "another boot", "@nowhere", bytes(32), 0, TARGET.layout.end)
        await other.send(Register(5, (component(TARGET),), reach))
        refused = await other.receive(Reject)
        assert (refused.session, refused.reason) == (5, "transfer")
        assert why in refused.fields[0]
        await ends.moved(1)


async def test_no_session_takes_the_id_of_one_whose_writer_is_still_being_fenced(
    ends: NodePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fenced = asyncio.Event()

    async def fence(_: int) -> bool:
        return await fenced.wait()

    async def map_(*_: object, **__: object) -> int:
        return TARGET.layout.end

    reach = Reach("shm", "another boot", "@nowhere", bytes(32), 0, TARGET.layout.end)
    monkeypatch.setattr(ends.prefill.transport, "fence", fence)
    monkeypatch.setattr(ends.prefill.transport, "map", map_)
    ends.prefill._end_writer(5)
    async with stranger(ends.endpoint) as other:
        await other.send(Hello(1, 1, replace_identity(ends, node="other")), Register(5, (component(TARGET),), reach))
        refused = await other.receive((Reject, Registered))
        assert (type(refused), refused.session) == (Reject, 5)
        assert "of the same id" in refused.fields[0]
    fenced.set()
    await until(lambda: not ends.prefill._fencing)
    async with stranger(ends.endpoint) as other:
        await other.send(Hello(1, 1, replace_identity(ends, node="third")), Register(5, (component(TARGET),), reach))
        assert (await other.receive(Registered)).session == 5


async def test_a_message_that_is_no_nodes_business_is_a_breach_and_ends_nothing_else(ends: NodePair) -> None:
    async with stranger(ends.endpoint) as other:
        await other.send(Hello(1, 1, replace_identity(ends, node="other")))
        await other.receive(Welcome)
        begin = Begin(1, pack_ids([1, 2]), Sampling(3), ("x",), 1_000)
        await other.send(begin)
        assert "Begin" in (await other.receive(Reject)).fields[0]
        await ends.moved(1)


async def test_others_take_what_is_theirs_before_the_core_sees_it() -> None:
    seen: list[tuple[str, str]] = []

    def others(peer: str, message: Message) -> bool:
        seen.append((peer, type(message).__name__))
        return isinstance(message, Ping)

    node = PrefillNode(settings("p"), [component(SOURCE)], lambda _: None, others=Others(others))
    endpoint = await node.bus.bind("tcp://127.0.0.1:0")
    try:
        async with stranger(endpoint) as other:
            hello = Hello(1, 1, settings("other").identity("decode"))
            await other.send(hello, Ping(hello.identity.incarnation))
            await other.receive(Welcome)
            await until(lambda: len(seen) == 2)
            assert seen == [("node:other", "Hello"), ("node:other", "Ping")]
            assert not node.core.draining
    finally:
        await node.close()


def replace_identity(nodes: NodePair, *, node: str) -> Any:
    return msgspec.structs.replace(nodes.decode.core.prefill_peers.identity, node=node, incarnation=77)


async def test_who_is_refused_is_logged_once_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    arena = ArenaMemory.create(TARGET.layout.end, huge_pages="never")
    events: list[RoomReady | RoomFailed] = []
    prefill = PrefillNode(settings("p"), [component(SOURCE)], lambda _: None)
    endpoint = await prefill.bus.bind("tcp://127.0.0.1:0")
    decode_node = DecodeNode(replace(settings("d"), model="another"), [component(TARGET)], arena, events.append)
    try:
        for room in (1, 2):
            decode_node.expect(RoomRequest(room=room, tokens=10, sources=[endpoint], time_left_s=20))
            await until(lambda room=room: len(events) == room)
        assert all(failed.cause is Cause.REFUSED and "'another'" in failed.detail for failed in events)
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        line = "model: d has 'another', p 'm'"
        assert lines == [f"node:d is refused: {line}", f"{endpoint} refuses (refused): {line}"], (
            "prefill's and decode's"
        )
    finally:
        await decode_node.close()
        await prefill.close()
        arena.close()


async def test_registered_and_goodbye_of_a_stranger_change_nothing_for_the_peer(ends: NodePair) -> None:
    async with stranger(ends.endpoint) as other:
        await ends.moved(1)
        session = next(iter(ends.decode.core.prefill_peers.sessions))
        await other.send(Hello(1, 1, replace_identity(ends, node="other")))
        await other.receive(Welcome)
        await other.send(
            Goodbye(ends.decode.core.prefill_peers.identity.incarnation, "shutdown"), Registered(session, 1)
        )
        await other.receive(Reject)
        assert ends.prefill.core.sessions[session].open
        await ends.moved(2)


back: Any = DecodeNode._back


async def test_a_writer_gets_the_reason_where_backing_for_it_raises() -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    reasons: list[str] = []
    node = SimpleNamespace(
        _arena=SimpleNamespace(staging_bytes=1, prefault=broken), _closing=False, ready=None,
        core=SimpleNamespace(prefill_peers=SimpleNamespace(sessions=[7])), _lands_here=lambda _: True,
        _unoffered=lambda _, text: reasons.append(text),
    )  # fmt: skip
    await back(node)
    assert (reasons, node._backing) == (["a bug"], None)


async def test_close_ends_the_backing_of_a_buffer_that_nobody_needs_any_more() -> None:
    stopped: list[bool] = []

    def prefault(_: object, stop: Callable[[], bool]) -> bool:
        for _ in range(1_000):
            if stop():
                stopped.append(True)
                break
            time.sleep(0.01)
        return not stopped

    async def closed() -> None:
        assert stopped, "its memory is still being backed"

    nothing = SimpleNamespace(stop=lambda: None)
    node: Any = SimpleNamespace(
        _arena=SimpleNamespace(staging_bytes=1, prefault=prefault), _closing=False, ready=None, _events=nothing,
        _run=SimpleNamespace(ticker=nothing), _offers=[], _verifier=None, _lifter=None,
        core=SimpleNamespace(rooms=[], prefill_peers=SimpleNamespace(peers={})),
        transport=SimpleNamespace(close=closed), bus=SimpleNamespace(close=closed),
    )  # fmt: skip
    backing = vars(node)["_backing"] = asyncio.create_task(back(node))
    await asyncio.sleep(0.05)
    assert not stopped
    await DecodeNode.close(node)
    assert backing.done()
