"""The next turn of a chat in a worker of several ranks: every rank computes what the leader has not cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdtransfer.errors import RemoteProtocolError
from pdtransfer.serve.engine_api import Finished, Token
from pdtransfer.serve.worker.engine_thread import GenerateFrom
from pdtransfer.serve.worker.follower import Follower
from pdtransfer.serve.worker.group.leader import JoinedRank
from pdtransfer.wire import Begin, RankFailed, RankReady, RankRoom, Ranks, Sampling, StepOrder, StepOrders, pack_ids
from tests.serve.worker.daemon_pair import Leader, decode, follower

NOWHERE = "tcp://127.0.0.1:9"  # no prefill answers
PROMPT, ANSWER, FURTHER = [97] * 100, [98] * 40, [99] * 10
TURN = PROMPT + ANSWER + FURTHER  # 150 tokens, of which two blocks are kept when the first turn has ended


def rest(room: int, ids: list[int], rest_max: int) -> Begin:
    """A room of which prefill writes nothing."""
    return Begin(room, pack_ids(ids), Sampling(len(ANSWER)), (NOWHERE,), 30_000, rest_max=rest_max)


class Steps:
    """Plays the engine's thread of a follower."""

    def __init__(self, follows: Follower) -> None:
        self._follower = follows

    def calls(self) -> int:
        """Does what waits for the engine; the number of calls that went back to the loop."""
        calls = [entry for entry in self._follower.port.poll() if callable(entry)]
        for call in calls:
            call()
        return len(calls)

    def answered(self, local_id: int) -> None:
        """The room generates its whole answer."""
        tokens = [Token(room=local_id, index=index, id=token) for index, token in enumerate(ANSWER)]
        self._follower.rank.on_outcomes([*tokens, Finished(room=local_id, reason="length")])


def first_turn(follows: Follower, leader: Leader) -> Steps:
    """A first turn that generates here; its leader is a step ahead."""
    steps = Steps(follows)
    follows.take(RankRoom(1, 1, rest(11, PROMPT, len(PROMPT))))
    assert steps.calls() == 1
    assert leader.sent.pop() == RankReady(1, 1, 0, 0)
    follows.take(StepOrders(2, (StepOrder("generate", 1),)))
    ((order,),) = follows.port.poll()
    assert isinstance(order, GenerateFrom)
    assert order.done == 0
    return steps


async def test_a_turn_that_comes_a_step_too_early_finds_the_blocks_of_the_one_before(tmp_path: Path) -> None:
    async with follower(tmp_path) as (follows, leader):
        steps = first_turn(follows, leader)
        follows.take(RankRoom(3, 2, rest(12, TURN, len(TURN) - 128)))
        follows.take(RankRoom(4, 3, Begin(13, pack_ids(PROMPT), Sampling(4), (NOWHERE,), 30_000)))
        assert not leader.sent
        assert set(follows.rank.rooms) == {1}, "nor does a room behind it lease first"
        steps.answered(1)
        assert steps.calls() == 2
        assert leader.sent == [RankReady(1, 2, 0, 128)]
        assert set(follows.rank.rooms) == {2, 3}
        follows.take(RankFailed(5, 3, "aborted", ""))


async def test_what_the_leader_has_not_cached_is_computed_though_it_is_cached_here(tmp_path: Path) -> None:
    async with follower(tmp_path) as (follows, leader):
        steps = first_turn(follows, leader)
        steps.answered(1)
        follows.take(RankRoom(3, 2, rest(12, TURN, len(TURN) - 64)))
        steps.calls()
        assert leader.sent == [RankReady(1, 2, 0, 64)]
        follows.take(StepOrders(4, (StepOrder("generate", 2),)))
        ((order,),) = follows.port.poll()
        assert order.done == 64


async def test_a_rank_that_has_given_up_what_the_leader_has_cached_refuses_the_turn(tmp_path: Path) -> None:
    async with follower(tmp_path) as (follows, leader):
        steps = first_turn(follows, leader)
        steps.answered(1)
        follows.rank.node.core.cache.clear()
        follows.take(RankRoom(3, 2, rest(12, TURN, len(TURN) - 128)))
        steps.calls()
        (failed,) = leader.sent
        assert (failed.local_id, failed.reason) == (2, "refused")
        assert failed.detail == "prefix: 0 of 150 tokens are cached, 150 are left, at most 22 are computed here"
        assert not follows.rank.rooms


async def test_a_turn_that_fails_before_it_starts_here_never_does(tmp_path: Path) -> None:
    async with follower(tmp_path) as (follows, leader):
        steps = first_turn(follows, leader)
        follows.take(RankRoom(3, 2, rest(12, TURN, 22)))
        follows.take(RankFailed(4, 2, "aborted", "its router gave it up"))
        assert steps.calls() == 1
        assert not leader.sent
        assert set(follows.rank.rooms) == {1}


async def test_a_turn_of_a_local_id_that_is_here_or_of_too_long_a_rest_fails_with_the_reason(tmp_path: Path) -> None:
    async with follower(tmp_path) as (follows, leader):
        steps, most = first_turn(follows, leader), follows.rank.rest_max
        follows.take(RankRoom(3, 1, rest(12, TURN, 22)))
        follows.take(RankRoom(4, 2, rest(12, TURN, most + 1)))
        steps.calls()
        assert leader.sent == [
            RankFailed(1, 1, "breach", "RankRoom.local_id: 1 is here already", 0),
            RankFailed(2, 2, "breach", f"Begin.rest_max: {most + 1}, this rank computes {most} tokens", 0),
        ]


async def test_the_leader_announces_what_it_has_not_cached_and_generates_once_all_ranks_have_the_same(
    tmp_path: Path,
) -> None:
    async with decode(tmp_path, ranks=Ranks(0, 2)) as daemon:
        announced, other = list[Any](), JoinedRank(Ranks(1, 2), "d0-tp1")
        daemon.group.room = lambda local_id, begin: announced.append((local_id, begin))
        daemon.routers.send("a", rest(11, PROMPT, 500))
        assert announced.pop() == (1, rest(11, PROMPT, len(PROMPT)))
        daemon.group.reported(other, RankReady(1, 1, 0, 0))
        (order,) = daemon.port.poll()
        assert order.done == 0
        Steps(daemon).answered(1)
        daemon.routers.send("a", rest(12, TURN, 500))
        assert announced.pop() == (2, rest(12, TURN, len(TURN) - 128))
        with pytest.raises(RemoteProtocolError, match=r"RankReady\.prefix: 64 of a rest, its leader has 128"):
            daemon.group.reported(other, RankReady(2, 2, 0, 64))
        assert not daemon.port.poll()
        daemon.group.reported(other, RankReady(2, 2, 0, 128))
        (order,) = daemon.port.poll()
        assert isinstance(order, GenerateFrom)
        assert order.done == 128


async def test_a_turn_that_another_rank_refuses_is_refused_with_its_name(tmp_path: Path) -> None:
    async with decode(tmp_path, ranks=Ranks(0, 2)) as daemon:
        daemon.routers.send("a", rest(11, PROMPT, 500))
        daemon.group.reported(JoinedRank(Ranks(1, 2), "d0-tp1"), RankFailed(1, 1, "refused", "prefix: 0 of ...", 0))
        end = await daemon.routers.over("a", 11)
        assert (end.reason, end.detail) == ("refused", "rank tp1 (d0-tp1): prefix: 0 of ...")
        assert not daemon.node.core.rooms
