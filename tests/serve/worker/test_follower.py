"""A rank that follows: what its leader orders in error, or in malice, is refused and changes nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from pdtransfer.errors import RemoteProtocolError
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
from tests.support.daemon_pair import follower
from tests.support.waiting import on_loop


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
        (
            RankRoom(1, 1, begin(8)),
            "RankRoom.local_id: 1 is known",
        ),
        (
            RankRoom(1, 2, begin(8, b"")),
            "RankRoom.begin: prompt: no tokens",
        ),
        (RankRoom(1, 2, begin(8, b"abc")), "prompt: 3 bytes"),
        (RankReady(1, 1, 0, 0), "kind: RankReady is nothing that a leader sends"),
        (RankBound("", ""), "kind: RankBound is nothing that a leader sends"),
    ],
)
@on_loop
async def test_an_order_that_makes_no_sense_is_refused_and_none_of_its_step_is_done(
    message: Message, text: str
) -> None:
    with tempfile.TemporaryDirectory(prefix="pdt-") as sockets:
        async with follower(Path(sockets) / "s") as (made, leader):
            made.take(RankRoom(1, 1, begin(7)))
            with pytest.raises(RemoteProtocolError) as refused:
                made.take(message)
            assert text in str(refused.value)
            assert not leader.sent
            made.take(RankFailed(2, 99, "aborted", "of a room that never came"))
            made.take(RankReload(3))
