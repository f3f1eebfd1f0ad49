"""What a daemon remembers of its routers beside their rooms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from pdtransfer.errors import ArenaFullError
from pdtransfer.limits import ROUTERS_MAX
from pdtransfer.serve.tracing.ended_request import EndedRequests
from pdtransfer.serve.tracing.timeline import Journeys
from pdtransfer.serve.worker.daemon_figures import DaemonTotals
from pdtransfer.serve.worker.daemon_metrics import RoomMetrics
from pdtransfer.serve.worker.ended_rooms import WorkerFacts
from pdtransfer.serve.worker.router_link import RouterLink
from pdtransfer.serve.worker.service import Service
from pdtransfer.wire import Begin, End, Hello, Load, Ping, Reject, Sampling, WorkerFigures
from tests.support.routing_world import LIMITS, identity


def link_of(service: Service, send: Any, rooms: Any) -> RouterLink:
    return RouterLink(
        service, send, rooms,
        facts=WorkerFacts("decode", "d", "m"), full_sampling=True, metrics=RoomMetrics(CollectorRegistry()),
        totals=DaemonTotals(), journeys=Journeys(), ended=EndedRequests(),
    )  # fmt: skip


REFUSAL = Reject(0, "refused", ("role: decode here", "prefill expected"))


async def test_a_refusal_is_forgotten_with_a_ping_or_with_its_router() -> None:
    service = Service(identity("d", "decode"), LIMITS)
    rooms: Any = SimpleNamespace(load=lambda: Load(True, False, 0, 0, 100, 100), figures=lambda: WorkerFigures(1))
    link = link_of(service, lambda _, __: True, rooms)
    for number in range(ROUTERS_MAX):
        link.receive(f"node:r{number}", Hello(1, 1, identity(f"r{number}", "router", 1)))
        link.receive(f"node:r{number}", REFUSAL)
    assert link.refusals["node:r0"] == "refused; role: decode here; prefill expected"
    link.receive("node:stranger", REFUSAL)
    link.receive("node:r1", Ping(1))
    assert set(link.refusals) == {f"node:r{number}" for number in range(ROUTERS_MAX)} - {"node:r1"}
    due_s = service.next_tick()
    assert due_s is not None
    service.tick(due_s + (LIMITS.room_deadline_ms + 2 * LIMITS.silence_ms) / 1e3)
    assert not any(service.knows(f"node:r{number}") for number in range(ROUTERS_MAX))
    assert link.refusals == {}, "a router that is gone refuses nothing, and another one will come"


async def test_a_full_worker_returns_when_to_ask_again_if_it_knows() -> None:
    sent: list[Any] = []

    def full(begin: Begin, _: object) -> None:
        raise ArenaFullError("no slots", retry_ms=None if begin.room == 1 else 250)

    rooms: Any = SimpleNamespace(
        load=lambda: Load(True, False, 0, 0, 100, 100), figures=lambda: WorkerFigures(1), check=full
    )
    link = link_of(Service(identity("d", "decode"), LIMITS), lambda _, message: sent.append(message) or True, rooms)
    link.receive("node:r", Hello(1, 1, identity("r", "router", 1)))
    for room in (1, 2):
        link.receive("node:r", Begin(room, b"abcd", Sampling(1), ("tcp://p:1",), 1_000))
    ends = [message for message in sent if isinstance(message, End)]
    assert ends == [End(1, "full", "no slots", 0, 0), End(2, "full", "no slots", 0, 250)]
