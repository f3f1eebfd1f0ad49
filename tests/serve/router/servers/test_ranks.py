"""vLLM's servers with data parallel ranks: each is an engine with a cache of its own, behind one URL."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest

from pdtransfer.limits import PEERS_MAX, Limits
from pdtransfer.serve.router.backends.servers.dialects import DIALECTS
from pdtransfer.serve.router.backends.servers.server_pool import ServerPool
from pdtransfer.serve.router.fleet.roles import Departure
from tests.support.vllm_servers import ServerSite
from tests.support.waiting import until

RANKS = 3
pytestmark = pytest.mark.given(ranks=RANKS)
PROMPT = "a" * 4_096


async def learn(it: ServerSite) -> None:
    """Has every rank's identity learnt."""
    await asyncio.gather(*(it.post(prompt=str(number)) for number in range(RANKS)))
    assert all(rank.identity is not None for rank in it.backend.pool.prefill)
    for server in it.servers:
        server.seen.clear()


async def test_each_rank_gets_its_share_and_decode_the_identity_of_prefills(site: ServerSite) -> None:
    await learn(site)
    answers = await asyncio.gather(*(site.post(prompt=str(number)) for number in range(4 * RANKS)))
    assert [status for status, *_ in answers] == [200] * len(answers)
    prefill, decode = site.prefill[0].seen, site.decode[0].seen
    for seen in (prefill, decode):
        assert Counter(request.headers["X-data-parallel-rank"] for request in seen) == dict.fromkeys("012", 4)
    engines = {request.kv["transfer_id"]: f"p0_dp{request.rank}" for request in prefill}
    assert {request.kv["transfer_id"]: request.kv["remote_engine_id"] for request in decode} == engines
    assert site.backend.metrics.retries == 0


async def test_the_rank_that_has_a_request_learns_that_it_was_given_up(site: ServerSite) -> None:
    await learn(site)
    prefill, decode = site.prefill[0], site.decode[0]
    decode.gate.clear()
    tasks = [asyncio.create_task(site.post(prompt=str(number))) for number in range(RANKS)]
    await until(lambda: len(decode.seen) == RANKS and sum(request.answered for request in prefill.seen) == RANKS)
    for task in tasks:
        task.cancel()
    await until(lambda: len(prefill.given_up) == RANKS)
    ranks = {request.kv["transfer_id"]: request.rank for request in prefill.seen}
    assert dict(zip(prefill.given_up, prefill.given_up_ranks, strict=True)) == ranks


async def test_the_next_turn_goes_to_the_rank_that_has_the_last_one(site: ServerSite) -> None:
    await learn(site)
    turns = [PROMPT + "b" * 64 * number for number in range(4)]
    for prompt in turns:
        assert (await site.post(prompt=prompt))[0] == 200
        await site.post(prompt="of somebody else")
    of_chat = [request.rank for request in site.decode[0].seen if request.body["prompt"] in turns]
    assert all(last == following for last, following in pairwise(of_chat))
    assert site.backend.metrics.requests_kept >= len(turns) - 1


@pytest.mark.given(limits=Limits(ping_ms=20, silence_ms=500, room_deadline_ms=60_000))
async def test_a_server_that_comes_back_with_other_ranks_is_asked_for_those(site: ServerSite) -> None:
    for count in (1, 2, RANKS + 1):
        for server in site.servers:
            server.healthy = False
        await until(lambda: not any(rank.usable for rank in site.backend.pool.all))
        for server in site.servers:
            server.ranks, server.healthy = count, True
        await until(lambda: site.backend.usable() and len(site.backend.pool.all) == 2 * count)  # noqa: B023
        for server in site.servers:
            server.seen.clear()
        for number in range(2 * count):
            assert (await site.post(prompt=f"{count} {number}"))[0] == 200
        for server in site.servers:
            assert {request.rank for request in server.seen} == set(range(count))


async def test_figures_and_status_are_of_servers(site: ServerSite) -> None:
    site.decode[0].gate.clear()
    tasks = [asyncio.create_task(site.post(prompt=str(number))) for number in range(RANKS)]
    await until(lambda: len(site.prefill[0].seen) == RANKS)
    rows = site.backend.workers_status()
    assert [(row.role, row.address) for row in rows] == [
        ("prefill", site.prefill[0].url), ("decode", site.decode[0].url),
    ]  # fmt: skip
    assert rows[1].rooms_here == RANKS
    metrics = {
        (sample.labels["role"], sample.value)
        for family in site.backend.metrics.collect()
        for sample in family.samples
        if sample.name == "pdtransfer_server_requests"
    }
    assert ("decode", RANKS) in metrics
    assert len(metrics) <= 2
    site.decode[0].gate.set()
    await asyncio.gather(*tasks)


def test_ranks_are_those_that_a_servers_metrics_name() -> None:
    ranks = DIALECTS["vllm"].ranks
    line = b'vllm:num_requests_running{engine="%d",model_name="m"} 0.0\n'
    assert ranks(b"") == 1
    assert ranks(line % 5) == 1
    assert ranks(line % 0 + line % 1 + line % 1) == 2
    assert ranks(b"# HELP " + line % 0 + b"x" + line % 1) == 1
    assert ranks(b"".join(line % number for number in range(2 * PEERS_MAX))) == PEERS_MAX
    assert DIALECTS["sglang"].ranks(line % 0 + line % 1) == 1


def test_ranks_leave_with_their_server_once_none_has_a_request() -> None:
    pool = ServerPool(["http://p"], ["http://d"], Limits())
    first = pool.prefill[0]
    pool.resize(first, 2)
    assert [rank.name for rank in first.ranks] == ["http://p (rank 0)", "http://p (rank 1)"]
    pool.prefill[1].unfinished = 1
    pool.depart("http://p", Departure.LEAVES)
    assert not pool.left(first)
    assert len(pool.prefill) == 2
    pool.prefill[1].unfinished = 0
    assert pool.left(first)
    assert not pool.prefill


def test_a_rank_that_is_no_more_and_busy_is_the_only_one_that_stays() -> None:
    """Of ranks 0 to 2 the last one has a request while the server comes back with one."""
    pool = ServerPool(["http://p"], ["http://d"], Limits())
    first = pool.prefill[0]
    pool.resize(first, 3)
    busy = pool.prefill[2]
    busy.unfinished = 1
    pool.resize(first, 1)
    assert not pool.left(first)
    pool.resize(first, 1)
    assert pool.prefill == [first, busy]
    assert not busy.usable
    busy.unfinished = 0
    assert not pool.left(first)
    assert pool.prefill == [first]


def test_a_server_that_is_added_again_does_not_bring_back_a_rank_that_is_no_more() -> None:
    """It is drained and comes back with one rank of two, and the other has a request still."""
    pool = ServerPool(["http://p"], ["http://d"], Limits())
    first = pool.prefill[0]
    pool.resize(first, 2)
    busy = pool.prefill[1]
    busy.unfinished = 1
    pool.resize(first, 1)
    pool.depart("http://p", Departure.DRAINS)
    assert pool.add("http://p", "prefill") is None
    assert [rank.departure for rank in (first, busy)] == [Departure.STAYS, Departure.LEAVES]
    pool.resize(first, 2)
    assert [rank.departure for rank in pool.prefill] == [Departure.STAYS] * 2


def test_both_roles_of_a_rank_are_one_engine() -> None:
    pool = ServerPool(["http://s"], ["http://s"], Limits())
    assert pool.prefill[0].twin is pool.decode[0]
    for servers in (pool.prefill, pool.decode):
        pool.resize(servers[0], 2)
    assert [rank.twin for rank in pool.prefill] == pool.decode
    assert [rank.twin for rank in pool.decode] == pool.prefill
