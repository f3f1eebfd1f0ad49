"""What a daemon's link makes known: to its routers, in its counters, and as a record of each room."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace as altered
from prometheus_client import CollectorRegistry

from pdtransfer.errors import ArenaFullError, Cause
from pdtransfer.limits import ROUTERS_MAX, TEXT_LENGTH_MAX
from pdtransfer.serve.tracing.ended_request import EndedRequest, EndedRequests
from pdtransfer.serve.tracing.timeline import Journeys
from pdtransfer.serve.worker.daemon_metrics import RoomMetrics
from pdtransfer.serve.worker.router_link import RouterLink, failure
from pdtransfer.serve.worker.service import Service
from pdtransfer.wire import Begin, Begun, Cancel, End, Hello, Load, Message, Ping, Reject, Sampling, WorkerFigures
from tests.support.routing_world import LIMITS, identity
from tests.support.waiting import until

REFUSAL = Reject(0, "refused", ("role: decode here", "prefill expected"))
BEGIN = Begin(1, b"abcd", Sampling(1), ("tcp://p:1",), 1_000)
LOAD = Load(True, False, 0, 0, 100, 100)


def hello(router: str) -> Hello:
    return Hello(1, 1, identity(router, "router", 1))


class Link(RouterLink):
    """Keeps what it sends and what it asks for. Its rooms stay until the test ends them; the second and third are not
    to be had."""

    def __init__(self, *, full_sampling: bool = True, **limits: int) -> None:
        self.sent, self.calls, self.records = list[tuple[str, Message]](), list[Any](), list[EndedRequest]()
        (ended := EndedRequests()).subscribe(self.records.append)
        rooms: Any = SimpleNamespace(
            load=lambda: altered(LOAD, rooms_running=self.calls.count("start")), figures=lambda: WorkerFigures(1),
            check=self.check, start=lambda *_: self.calls.append("start"), stop=lambda *call: self.calls.append(call),
            introduce=self.calls.append,
        )  # fmt: skip
        super().__init__(
            Service(identity("d", "decode"), replace(LIMITS, **limits)),
            lambda *message: bool(self.sent.append(message)) or True, rooms,
            full_sampling=full_sampling, metrics=RoomMetrics(registry := CollectorRegistry()), journeys=Journeys(),
            ended=ended,
        )  # fmt: skip
        self.value = registry.get_sample_value
        self.receive("node:r", hello("r"))
        self.sent.clear()

    def check(self, begin: Begin, _: object) -> None:
        if begin.room in (2, 3):
            raise ArenaFullError("no slots", retry_ms=None if begin.room == 2 else 250)


async def test_a_refusal_is_forgotten_with_a_ping_or_with_its_router() -> None:
    link = Link()
    for number in range(ROUTERS_MAX - 1):
        link.receive(f"node:r{number}", hello(f"r{number}"))
        link.receive(f"node:r{number}", REFUSAL)
    assert link.refusals["node:r0"] == "refused; role: decode here; prefill expected"
    link.receive("node:stranger", REFUSAL)
    link.receive("node:r1", Ping(1))
    assert set(link.refusals) == {f"node:r{number}" for number in range(ROUTERS_MAX - 1)} - {"node:r1"}
    due_s = link.service.next_tick()
    assert due_s is not None
    link.service.tick(due_s + (LIMITS.room_deadline_ms + 2 * LIMITS.silence_ms) / 1e3)
    assert not any(link.service.knows(f"node:r{number}") for number in range(ROUTERS_MAX))
    assert link.refusals == {}, "a router that is gone refuses nothing, and another one will come"


async def test_each_room_that_began_is_counted_recorded_and_answered_once_and_the_load_follows() -> None:
    link = Link(full_sampling=False)
    for room, more in ((1, {}), (2, {}), (3, {}), (4, {"sampling": Sampling(1, min_p=0.5)}), (5, {"prompt": b"abc"})):
        link.receive("node:r", altered(BEGIN, room=room, **more))
    link.end(BEGIN, failure(1, Cause.ENGINE, "x" * 10_000), tokens=1)
    detail = "min_p: 0.5, the engine of this worker does not support it"
    ends = [End(2, "full", "no slots", 0), End(3, "full", "no slots", 0, retry_ms=250), End(4, "refused", detail, 0)]
    ends += [End(5, "refused", "prompt: 3 bytes, expected u32 ids", 0), End(1, "engine", "x" * TEXT_LENGTH_MAX, 0)]
    assert [message for _, message in link.sent if isinstance(message, End)] == ends
    assert [(*record.rooms, record.detail) for record in link.records] == [(end.room, end.detail) for end in ends]
    assert link.value("pdtransfer_rooms_begun_total") == 5
    counts = [link.value("pdtransfer_rooms_ended_total", {"reason": each}) for each in ("full", "refused", "engine")]
    assert counts == [2, 2, 1]
    await until(lambda: ("node:r", altered(LOAD, rooms_running=1)) in link.sent)


async def test_a_breach_costs_only_its_message_and_evidence_that_a_router_is_gone_its_rooms() -> None:
    link, other = Link(slow_ms=40, silence_ms=60_000), "node:" + "o" * 10_000
    for message in (hello("o"), Cancel(1, "aborted")):
        link.receive("node:r", BEGIN)
        link.receive(other, message)
    assert link.sent[-1] == (other, Reject(0, "breach", (f"room: {1:016x} is not {other}'s"[:TEXT_LENGTH_MAX],)))
    assert [message for _, message in link.sent if isinstance(message, Begun)] == [Begun(1)] * 2
    link.receive("node:r", Ping(1, ("tcp://p:1",)))
    assert link.calls == ["start", ("tcp://p:1",)]
    link.gone("node:r", "its connection has ended")
    await until(lambda: (1, Cause.PEER_LOST) in link.calls)
