"""What a daemon remembers of its routers beside their rooms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from pdtransfer.limits import ROUTERS_MAX
from pdtransfer.serve.tracing.ended_request import EndedRequests
from pdtransfer.serve.tracing.timeline import Journeys
from pdtransfer.serve.worker.daemon_figures import DaemonTotals
from pdtransfer.serve.worker.daemon_metrics import RoomMetrics
from pdtransfer.serve.worker.ended_rooms import WorkerFacts
from pdtransfer.serve.worker.router_link import RouterLink
from pdtransfer.serve.worker.service import Service
from pdtransfer.wire import Hello, Load, Ping, Reject, WorkerFigures
from tests.support.routing_world import LIMITS, identity
from tests.support.waiting import on_loop

REFUSAL = Reject(0, "refused", ("role: decode here", "prefill expected"))


@on_loop
async def test_a_refusal_is_forgotten_with_a_ping_or_with_its_router() -> None:
    service = Service(identity("d", "decode"), LIMITS)
    rooms: Any = SimpleNamespace(load=lambda: Load(True, False, 0, 0, 100, 100), figures=lambda: WorkerFigures(1))
    link = RouterLink(
        service, lambda _, __: True, rooms,
        facts=WorkerFacts("decode", "d", "m"), full_sampling=True, metrics=RoomMetrics(CollectorRegistry()),
        totals=DaemonTotals(), journeys=Journeys(), ended=EndedRequests(),
    )  # fmt: skip
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
