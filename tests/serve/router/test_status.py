"""The status document: what it says of workers and requests, and how the router serves it and its page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pdtransfer.serve.router.front as package
from pdtransfer.errors import Cause
from pdtransfer.serve.router.backends.daemons.routing import Routing
from pdtransfer.serve.router.backends.daemons.workers import SAMPLES_MAX, FigureWindow, Worker, worker_status
from pdtransfer.serve.router.fleet.status import FleetStatus, TotalsStatus
from pdtransfer.serve.router.front.status import FAILURES_MAX, RATE_S, SHARED_S, RecentRequests
from pdtransfer.serve.tracing.ended_request import EndedRequest
from pdtransfer.wire import Goodbye, Load, Pong, Tally, Welcome, WorkerFigures
from tests.serve.router.router_site import Site, site
from tests.support.routing_world import LIMITS, identity
from tests.support.waiting import until

PAGE = (Path(package.__file__).parent / "status_page.html").read_text()
P, D = "tcp://p0:1", "tcp://d0:1"


def pool(decode: str = D) -> Routing:
    return Routing(identity("router", "router"), prefill=(P,), decode=(decode,), limits=LIMITS, mint=lambda: 7)


def figures(uptime_ms: int, **counts: int) -> WorkerFigures:
    return WorkerFigures(uptime_ms, **counts)


def test_rates_are_in_the_workers_own_time_and_late_figures_are_dropped() -> None:
    window = FigureWindow()
    assert (window.latest, window.rate("kv_bytes"), window.share("hot_hits", "hot_hits", "hot_misses")) == (
        None, None, None,
    )  # fmt: skip
    window.add(figures(1_000, kv_bytes=5_000, hot_hits=90, hot_misses=10))
    assert window.rate("kv_bytes") is None, "one reading has no rate"
    assert window.share("hot_hits", "hot_hits", "hot_misses") == 0.9, "since the start"
    window.add(figures(3_000, kv_bytes=9_000, hot_hits=91, hot_misses=12))
    window.add(figures(2_000, kv_bytes=6_000))
    assert window.rate("kv_bytes") == 2_000.0
    assert window.share("hot_hits", "hot_hits", "hot_misses") == pytest.approx(1 / 3)
    for index in range(SAMPLES_MAX):
        window.add(figures(10_000 + 1_000 * index, kv_bytes=9_000 + 7 * index))
    assert window.rate("kv_bytes") == 7.0, "older ones have left the window"
    window.add(figures(60_000, kv_bytes=1))
    assert window.rate("kv_bytes") is None, "a total does not shrink"


def connected(routing: Routing, peer: str, role: str, load: Load, *reported: WorkerFigures) -> Worker:
    for message in (Welcome(1, identity("n" + role[0], role)), load, *(Pong(1, (each,)) for each in reported)):
        routing.receive(peer, message, 0.0)
    return routing.workers.by_peer[peer]


def test_a_worker_shows_its_load_and_figures_until_it_is_lost() -> None:
    routing = pool()
    reported = [
        figures(1_000, kv_bytes=0, tokens=0),
        WorkerFigures(
            3_000, (Tally("ready", 4),), (Tally("shm", 1),), rooms_done=9, rooms_failed=2, tokens=600,
            kv_bytes=4_000_000_000, quarantined_bytes=77, prefix_queried_tokens=200, prefix_hit_tokens=50,
            hot_hits=3, hot_misses=1, hisparse_running=1, hisparse_waiting=2, rooms_cancelled=5,
        ),
    ]  # fmt: skip
    load = Load(True, False, 4, 1, 600, 1_000, 100, True, 300, 500)
    worker = connected(routing, D, "decode", load, *reported)
    it = worker_status(worker)
    assert (it.role, it.address, it.node, it.state, it.why) == ("decode", D, "nd", "ready", None)
    assert (it.rooms_running, it.rooms_queued, it.rooms, it.sessions) == (4, 1, {"ready": 4}, {"shm": 1})
    assert (it.rooms_done, it.rooms_failed, it.rooms_cancelled) == (9, 2, 5)
    assert it.slots is not None
    assert (it.slots.free, it.slots.total, it.slots.quarantined) == (600, 1_000, 100)
    assert it.sparse_slots is not None
    assert (it.sparse_slots.free, it.sparse_slots.total) == (300, 500)
    assert (it.kv_gb_s, it.tokens_s, it.quarantined_bytes) == (2.0, 300.0, 77)
    assert (it.prefix_hit_ratio, it.hot_hit_ratio, it.hisparse_running, it.hisparse_waiting) == (0.25, 0.75, 1, 2)
    of_prefill = worker_status(connected(routing, P, "prefill", Load(True, True, 0, 0, 5, 5), figures(5, tokens=1)))
    assert (of_prefill.state, of_prefill.quarantined_bytes, of_prefill.hot_hit_ratio) == ("draining", None, None)
    both = TotalsStatus.of([it, of_prefill])
    assert (both.kv_gb_s, both.generated_tokens_s, both.prompt_tokens_s, both.quarantined_bytes) == (
        2.0, 300.0, None, 77,
    )  # fmt: skip
    routing.receive(D, Goodbye(1, "shutdown"), 0.0)
    lost = worker_status(worker)
    assert (lost.state, lost.why, lost.slots, lost.rooms, lost.kv_gb_s) == (
        "connecting", f"{D} sent Goodbye (shutdown)", None, None, None,
    )  # fmt: skip


def test_a_key_of_an_endpoint_is_not_shown() -> None:
    key = "bB<^>b]T&ncT)k#p?RRdw@gKR9<g&@=K7ynK0gc5"
    (it,) = [each for each in pool(f"{key}@{D}").workers.by_peer.values() if each.role == "decode"]
    assert worker_status(it).address == D


def ended(**fields: object) -> EndedRequest:
    given: dict[str, Any] = {"scope": "request", "role": "router", "node": "r", "rooms": (7,), "status": 200, **fields}
    return EndedRequest(**given)


def test_failures_are_kept_with_their_cause_the_newest_first_and_bounded() -> None:
    recent = RecentRequests(lambda: 0.0)
    recent(ended())
    recent(ended(cause=Cause.ABORTED, status=499))
    recent(ended(scope="room", cause=Cause.TRANSFER, status=None, detail="p0: lost", retried=True))
    recent(ended(scope="room", cause=Cause.ENGINE, status=None))  # its request's own record follows
    recent(ended(cause=Cause.ENGINE, status=500, detail="d0: broke", prefill="p0", decode="d0", request_id="abc"))
    newest, attempt = recent.failures
    assert (newest.cause, newest.status, newest.detail, newest.retried) == ("engine", 500, "d0: broke", False)
    assert (newest.room, newest.request_id, newest.prefill, newest.decode) == ("0000000000000007", "abc", "p0", "d0")
    assert (attempt.cause, attempt.status, attempt.retried) == ("transfer", None, True)
    assert recent.answers == {"200": 1, "499": 1, "500": 1}
    for number in range(3):
        recent(ended(cause=Cause.FULL, status=429, rooms=(number,), request_id=f"r{number}"))
    alike = recent.failures[0]
    assert (len(recent.failures), alike.count, alike.request_id) == (3, 3, "r2"), "those alike are one"
    for number in range(FAILURES_MAX):
        recent(ended(cause=Cause.FULL, status=429, detail=f"{number}"))
    assert len(recent.failures) == FAILURES_MAX
    assert {(failure.cause, failure.count) for failure in recent.failures} == {("full", 1)}


def test_rates_and_quantiles_are_of_the_latest_requests() -> None:
    now = [0.0]
    recent = RecentRequests(lambda: now[0])
    assert recent.first_token_ms() is None
    for index in range(200):
        now[0] = 100.0 + index / 200
        recent(ended(first_token_s=index / 1_000))
    now[0] = 101.0
    assert recent.requests_s == 200 / RATE_S
    assert recent.first_token_ms() == pytest.approx({"p50": 99.0, "p99": 197.0})
    now[0] = 200.0
    assert (recent.requests_s, recent.first_token_ms()) == (0.0, None)


@pytest.mark.given(prefill=2)
async def test_the_router_serves_its_document_as_it_is_now(site: Site) -> None:
    status, text = await site.get("/status")
    assert status == 200
    document = msgspec.json.decode(text, type=FleetStatus, strict=True)
    assert document.router.ready
    assert document.router.models == ["m"]
    assert [(worker.role, worker.node, worker.state) for worker in document.workers] == [
        ("prefill", "p0", "ready"), ("prefill", "p1", "ready"), ("decode", "d0", "ready"),
    ]  # fmt: skip
    slots = document.workers[2].slots
    assert slots is not None
    assert (slots.free, slots.total) == (10_000, 10_000)
    site.prefill[1].load(Load(True, True, 0, 0, 10_000, 10_000))
    second = site.backend.routing.workers.by_peer[[*site.backend.roles()][1]]
    await until(lambda: not second.usable)
    await asyncio.sleep(SHARED_S)
    assert json.loads((await site.get("/status"))[1])["workers"][1]["state"] == "draining"


async def test_the_page_may_run_its_own_script_and_ask_its_own_router_and_nothing_else() -> None:
    async with site() as it, it.http.get(it.url + "/") as response:
        assert (response.status, response.content_type, await response.text()) == (200, "text/html", PAGE)
        policy = dict(each.split(" ", 1) for each in response.headers["Content-Security-Policy"].split("; "))
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"


def test_the_page_sets_text_alone_and_loads_nothing() -> None:
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
        " style=",
        "onclick",
    ):
        assert word not in PAGE, word
    assert re.findall(r"(?:https?:)?//[a-z0-9.]+", PAGE.replace("http://www.w3.org/2000/svg", "")) == []
    assert not re.search(r"<(?:link|img|iframe|object|embed|script [^>]*src)", PAGE)
