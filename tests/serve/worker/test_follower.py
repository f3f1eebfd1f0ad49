"""A rank that follows: what its leader orders in error, or in malice, is refused and changes nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdtransfer.client.settings import NodeSettings
from pdtransfer.client.thread_queues import ThreadQueues
from pdtransfer.errors import Cause, RemoteProtocolError
from pdtransfer.limits import TEXT_LENGTH_MAX
from pdtransfer.serve.settings.worker import PrefillConfig
from pdtransfer.serve.tracing.timeline import Journeys
from pdtransfer.serve.worker.daemon import create_engine
from pdtransfer.serve.worker.engine_thread import Free, Order, follower_steps
from pdtransfer.serve.worker.follower import Follower
from pdtransfer.serve.worker.prefill_rank import PrefillRank, PrefillRankRoom
from pdtransfer.serve.worker.router_link import request_of
from pdtransfer.wire import (
    Begin,
    Message,
    RankBound,
    RankFailed,
    RankReady,
    RankReload,
    RankRoom,
    Sampling,
    StepOrder,
    StepOrders,
)
from tests.serve.worker.daemon_pair import OPTIONS, Leader, follower
from tests.support.waiting import until


def begin(room: int, prompt: bytes = b"abcd") -> Begin:
    return Begin(room, prompt, Sampling(1), ("tcp://127.0.0.1:1",), 1_000)


def order(what: Any, local_id: int) -> StepOrders:
    return StepOrders(1, (StepOrder(what, local_id),))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (order("generate", 9), "StepOrders.orders: generate of room 9, not ready here"),
        (order("generate", 1), "StepOrders.orders: generate of room 1, not ready here"),
        (order("compute", 1), "StepOrders.orders: compute: a decode rank computes no prompt"),
        (order("free", 1), "StepOrders.orders: free: a decode rank computes no prompt"),
        (RankRoom(1, 1, begin(8)), "RankRoom.local_id: 1 is here already"),
        (RankRoom(1, 2, begin(8, b"")), "RankRoom.begin: prompt: no tokens"),
        (RankRoom(1, 2, begin(8, b"abc")), "prompt: 3 bytes"),
        (RankReady(1, 1, 0, 0), "kind: RankReady is not a message from a leader to a rank"),
        (RankBound("", ""), "kind: RankBound is not a message from a leader to a rank"),
    ],
)
async def test_an_order_that_makes_no_sense_is_refused_and_none_of_its_step_is_done(
    message: Message, text: str, directory: Path
) -> None:
    async with follower(directory) as (made, leader):
        made.take(RankRoom(1, 1, begin(7)))
        with pytest.raises(RemoteProtocolError) as refused:
            made.take(message)
        assert text in str(refused.value)
        assert not leader.sent
        made.take(RankFailed(2, 99, "aborted", "of a room that never came"))
        made.take(RankReload(3))


def test_a_rank_reloads_when_asked_to_and_reports_that_its_engine_broke_but_not_what_all_engines_refuse() -> None:
    leader, room, reloads = Leader(), SimpleNamespace(local_id=1), list[bool]()
    follower: Any = Follower(leader, None, lambda: reloads.append(True))  # type: ignore[arg-type]
    follower.rank = None
    follower.take(RankReload(3))
    assert reloads == [True]
    for cause in (Cause.REFUSED, Cause.ENGINE):
        follower.engine_failed(room, cause, "x" * 10_000)
    assert leader.sent == [RankFailed(1, 1, "engine", "x" * TEXT_LENGTH_MAX)]


class Reports:
    """Keeps which rooms a prefill rank has drained."""

    def __init__(self) -> None:
        self.over: list[int] = []

    def failed(self, *_: Any) -> None:
        pass

    def drained(self, room: PrefillRankRoom) -> None:
        self.over.append(room.local_id)


async def test_a_prefill_rank_takes_the_next_room_of_an_id_before_the_pages_of_the_drained_one_are_free() -> None:
    config = PrefillConfig(**OPTIONS)
    engine, reports, port = create_engine(config.factory, config.engine_config), Reports(), ThreadQueues[list[Order]]()
    journeys = Journeys()
    settings = NodeSettings(node="p0-tp1", model=engine.description.model, weights=engine.description.weights)
    given: Any = follower_steps(port), reports, CollectorRegistry(), journeys
    rank = PrefillRank(config, settings, engine, port, *given)
    begun = begin(7)
    rank.start(begun, request_of(begun, 1))
    with pytest.raises(RemoteProtocolError, match="0000000000000007 is open here"):
        rank.start(begun, request_of(begun, 2))
    rank.abort(1, Cause.ABORTED, "")
    await until(lambda: reports.over == [1])
    assert journeys.of(7) is not None, "the room has its record when it has ended on all ranks"
    second = rank.start(begun, request_of(begun, 2))
    journey = journeys.of(7)
    assert rank.order(StepOrder("free", 1)) == Free(1)
    assert rank.by_id == {7: second}
    assert journeys.of(7) is journey, "the second room's"
    with pytest.raises(RemoteProtocolError, match="free of room 2"):
        rank.order(StepOrder("free", 2))
    rank.abort(2, Cause.ABORTED, "")
    await until(lambda: reports.over == [1, 2])
    assert rank.order(StepOrder("free", 2)) == Free(2)
    assert not rank.by_id
    assert not rank.rooms
    assert journeys.of(7) is None
    await rank.node.close()
    port.close()
