"""Tensors between ranks over real sockets: who may connect, what arrives, and what a lost rank does to the others."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from pdtransfer.errors import WorldError
from pdtransfer.serve.worker.group import sockets
from pdtransfer.serve.worker.group.sockets import RankSockets
from pdtransfer.wire import Ranks
from pdtransfer.wire.ranks import ranks_of
from tests.support.paths import REPO

HOST, SECRET = "127.0.0.1", bytes(range(32))
NEXT = """
import asyncio, sys
from pdtransfer.serve.worker.group.sockets import RankSockets
from pdtransfer.wire import Ranks
rank = RankSockets(Ranks(pp_rank=1, pp_size=2))
print(rank.listen("127.0.0.1"), flush=True)
asyncio.run(rank.meet([sys.argv[1], ""], bytes(range(32))))
sys.stdin.read()
"""


async def met(tp_size: int, pp_size: int = 1) -> list[RankSockets]:
    ranks = [RankSockets(each) for each in ranks_of(tp_size, pp_size)]
    endpoints = [rank.listen(HOST) for rank in ranks]
    await asyncio.gather(*(rank.meet(endpoints, SECRET) for rank in ranks))
    return ranks


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Each call on a thread of its own, as engines of ranks make them."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def hand_on(rank: RankSockets) -> None:
    for _ in range(100):  # what the socket takes before it knows
        rank.hand_on(np.zeros((64, 256), np.float32))


@pytest.mark.parametrize(
    "dtype", [np.float32, np.int64, np.uint64, np.bool_, np.dtype([("id", "<u4"), ("value", "<f4")])]
)
def test_parts_of_any_dtype_are_gathered(dtype: Any) -> None:
    ranks = asyncio.run(met(2))
    parts = [np.random.default_rng(rank).integers(0, 2, (3, 2, np.dtype(dtype).itemsize), np.uint8) for rank in (0, 1)]
    parts = [part.view(dtype)[..., 0].T for part in parts]
    for gathered in at_once(
        [lambda rank=rank, part=part: rank.gather(part) for rank, part in zip(ranks, parts, strict=True)]
    ):
        for got, part in zip(gathered, parts, strict=True):
            assert (got.dtype, got.shape) == (part.dtype, (2, 3))
            assert got.tobytes() == part.tobytes()


@pytest.mark.parametrize("size", [0, 1, 3 << 20])
def test_all_ranks_of_a_stage_gather_what_is_larger_than_sockets_hold_in_order(size: int) -> None:
    ranks = asyncio.run(met(3, 2))
    for first in (0, 3):
        stage = ranks[first : first + 3]
        parts = [np.full(size, 10 * first + rank, np.float32) for rank in range(3)]
        calls = [
            lambda rank=rank, part=part: [rank.gather(part) for _ in range(3)]
            for rank, part in zip(stage, parts, strict=True)
        ]
        for rounds in at_once(calls):
            for gathered in rounds:
                assert all(map(np.array_equal, gathered, parts))


def test_a_stage_hands_on_to_the_next_and_may_be_some_chunks_ahead() -> None:
    first, second = asyncio.run(met(1, 2))
    chunks = [np.full((700, 1_000), number, np.float32) for number in range(1 + sockets.AHEAD_MAX)]
    for chunk in chunks:
        first.hand_on(chunk)
        chunk += 100  # the engine's buffer is its own again
    for number in range(len(chunks)):
        taken = np.empty((700, 1_000), np.float32)
        second.take_over(taken)
        assert (taken == number).all()


@pytest.mark.slow
def test_a_stage_that_hands_on_to_one_that_was_killed_learns_that_it_is_gone() -> None:
    rank = RankSockets(Ranks(pp_size=2))
    endpoint = rank.listen(HOST)
    with subprocess.Popen(
        [sys.executable, "-c", NEXT, endpoint], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            asyncio.run(rank.meet([endpoint, other.stdout.readline().strip()], SECRET))
        finally:
            other.kill()

    with pytest.raises(WorldError, match="a rank of this worker is gone"):
        hand_on(rank)


def test_a_rank_that_is_gone_fails_the_calls_of_the_others() -> None:
    first, second, third, fourth = asyncio.run(met(2, 2))
    for link in third._links.values():
        link.close()
    with pytest.raises(WorldError, match="a rank of this worker is gone"):
        fourth.gather(np.zeros(4))
    with pytest.raises(WorldError, match="a rank of this worker is gone"):
        hand_on(first)
    links = second._links
    assert links.keys() == {0, 3}
    links[3].close()
    with pytest.raises(WorldError, match="a rank of this worker is gone: its connection has ended"):
        fourth.take_over(np.empty(4, np.float32))


def test_parts_of_other_sizes_are_an_error_with_the_rank() -> None:
    first, second = asyncio.run(met(2))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.gather, np.zeros(9, np.uint8))
        with pytest.raises(WorldError, match="rank tp1 gathers 9 bytes, this one 8"):
            first.gather(np.zeros(8, np.uint8))
        for link in first._links.values():
            link.close()
        with pytest.raises(WorldError):
            other.result()


async def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MEET_S", 0.2)
    first, second, _ = ranks = [RankSockets(each) for each in ranks_of(3, 1)]
    endpoints = [rank.listen(HOST) for rank in ranks]
    meeting = asyncio.gather(first.meet(endpoints, SECRET), second.meet(endpoints, SECRET), return_exceptions=True)
    assert [str(error) for error in await meeting] == ["rank tp2 did not connect within 0 s"] * 2
    late = RankSockets(Ranks(2, 3))
    late.listen(HOST)
    with pytest.raises(WorldError, match="rank tp0: Connection refused"):
        await late.meet(endpoints, SECRET)


async def test_only_a_rank_with_the_secret_connects_and_strangers_keep_none_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "GREETING_S", 0.1)
    monkeypatch.setattr(sockets, "GREETINGS_MAX", 2)
    ranks = [RankSockets(each) for each in ranks_of(2, 1)]
    endpoints = [rank.listen(HOST) for rank in ranks]
    port = int(endpoints[0].rpartition(":")[2])
    openings = [b"", SECRET, bytes(32) + b"\1\0", SECRET + b"\0\0", SECRET + b"\7\0", b"GET / HTTP/1.1\r\n" * 9]
    strangers = [socket.create_connection((HOST, port)) for _ in openings]
    for stranger, words in zip(strangers, openings, strict=True):
        stranger.sendall(words)
        stranger.setblocking(False)
    strangers[1].shutdown(socket.SHUT_WR)
    leading = asyncio.ensure_future(ranks[0].meet(endpoints, SECRET))
    for stranger in strangers:
        with suppress(ConnectionResetError):
            assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
        stranger.close()
    assert not leading.done()
    await asyncio.gather(leading, ranks[1].meet(endpoints, SECRET))
    with pytest.raises(OSError, match="refused"):  # there is nothing to connect to from now on
        socket.create_connection((HOST, port))
