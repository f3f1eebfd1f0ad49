"""A room's life in daemons and ranks: of a label that comes again the words of one life do not find the other."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from pdtransfer.errors import Cause, RemoteProtocolError
from pdtransfer.serve.engine_api import Broken, Finished, Token
from pdtransfer.serve.worker.engine_thread import Drop, Dropped, Free, Generate, Offered, Quit
from pdtransfer.serve.worker.group.leader import JoinedRank
from pdtransfer.wire import Cancel as CancelRoom
from pdtransfer.wire import RankFailed, RankReady, RankRoom, Ranks, StepOrder, StepOrders, Tokens
from tests.serve.worker.daemon_pair import ROOM, TOKENS, decode, engine_of, follower, generates, orders, prefill
from tests.support.waiting import until


class Held:
    """An engine whose steps go on when the test lets them."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.inside, self.go = engine, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        if not self._engine.idle:
            self.inside.set()
            assert self.go.wait(60)
        return self._engine.step()


async def test_a_worker_that_gives_up_keeps_the_slots_of_a_step_until_it_is_over(directory: Path) -> None:
    async with prefill() as p, decode(directory, wrap=Held) as d, engine_of(d):
        engine, core = d._engine, d.node.core
        d.routers.send("a", p.begin("a", ROOM, "d0"))
        await asyncio.to_thread(engine.inside.wait, 30)
        d.end_all(Cause.ENGINE, "a rank is lost")
        end = await d.routers.over("a", ROOM)
        assert (end.reason, end.detail) == ("engine", "a rank is lost")
        assert ROOM in core.rooms, "the engine is in the middle of a step that reads them"
        assert core.arena.free[0].free_slots == 1_024 - TOKENS - 4
        d.routers.send("b", p.begin("b", ROOM, "d0"))
        assert d.routers.ends("b", ROOM)[0].detail == "room: 0000000000000007 is in use"
        engine.go.set()
        await until(lambda: ROOM not in core.rooms)
        assert core.cache.free_slots[0] == 1_024
        assert len(d.routers.ends("a", ROOM)) == 1


async def test_an_engines_late_word_of_a_room_does_not_end_the_next_one_of_its_label(directory: Path) -> None:
    async with prefill() as p, decode(directory) as d:
        d.routers.send("a", p.begin("a", ROOM, "d0"))
        first = await generates(d)
        d.routers.send("a", CancelRoom(ROOM, "aborted"))
        assert orders(d, Drop) == [Drop(first)]
        d.rank.on_outcomes([Finished(room=first, reason="length")])  # before it has looked at its orders again
        await d.routers.over("a", ROOM)
        await p.routers.over("a", ROOM)
        await p.drained()
        d.routers.send("b", p.begin("b", ROOM, "d0"))
        second = await generates(d)
        assert second != first
        d.rank.on_outcomes([Dropped(first)])
        assert not d.routers.ends("b", ROOM)
        assert ROOM in d.node.core.rooms, "its engine reads it"
        d.rank.on_outcomes([Finished(room=second, reason="length")])
        assert (await d.routers.over("b", ROOM)).reason == "length"


@pytest.mark.parametrize(
    ("outcomes", "detail"),
    [
        ([Broken(room=1, detail="no logits")], "no logits"),
        (
            [*(Token(room=1, index=index, id=97) for index in range(5)), Dropped(1)],
            "5 tokens generated, max_tokens is 4",
        ),
    ],
)
async def test_an_engine_that_fails_a_room_or_babbles_ends_it_with_the_reason(
    outcomes: list[Any], detail: str, directory: Path
) -> None:
    async with prefill() as p, decode(directory) as d:
        d.routers.send("a", p.begin("a", ROOM, "d0"))
        await generates(d)
        d.rank.on_outcomes(outcomes)
        end = await d.routers.over("a", ROOM)
        assert end.reason == "engine"
        assert detail in end.detail
        assert ROOM not in d.node.core.rooms


async def test_a_cell_of_a_room_that_is_over_does_not_go_into_the_next_one_of_its_label(directory: Path) -> None:
    async with prefill() as p:
        daemon = p.daemon
        p.begin("a", ROOM, "d0")
        await until(lambda: daemon.node.core.rooms[ROOM].cells)
        (cell,), local_id = daemon.node.core.rooms[ROOM].cells, daemon.rank.by_id[ROOM].local_id
        p.routers.send("a", CancelRoom(ROOM, "aborted"))
        await p.routers.over("a", ROOM)
        await p.drained()
        daemon.port.to_engine(Quit())  # what its engine says is ours from here on
        await asyncio.to_thread(p.thread.join, 10)
        p.begin("b", ROOM, "d0")
        daemon.rank.on_outcomes([Offered(local_id, cell)])
        assert daemon.node.core.rooms[ROOM].cells == []
        daemon.rank.on_outcomes([Offered(daemon.rank.by_id[ROOM].local_id, cell)])
        (kept,) = daemon.node.core.rooms[ROOM].cells
        assert (kept.component, kept.first_row, kept.layers) == (cell.component, cell.first_row, cell.layers)
        assert kept.source_slots.tolist() == cell.source_slots.tolist()
        p.routers.send("b", CancelRoom(ROOM, "aborted"))
        assert orders(daemon, Free), "and its pages come back"


async def test_a_rank_that_still_has_a_label_refuses_the_next_room_of_it_and_loses_no_slot(directory: Path) -> None:
    async with prefill() as p, follower(directory) as (f, leader):
        f.take(RankRoom(1, 1, p.begin("a", ROOM, "d0-tp1")))
        await until(lambda: leader.sent)
        ready = leader.sent.pop()
        assert (ready.local_id, ready.prefix) == (1, 0)
        f.take(StepOrders(2, (StepOrder("generate", 1, b"aux"),)))
        await p.routers.over("a", ROOM)
        await p.drained()
        # The leader's engine has finished it, and a second router begins the same label. Ours is a step behind.
        f.take(RankRoom(3, 2, p.begin("b", ROOM, "d0-tp1")))
        assert leader.sent == [RankFailed(1, 2, "refused", "room: 0000000000000007 is in use", 0)]
        f.take(RankFailed(4, 2, "refused", "as this rank said"))
        assert ROOM in f.rank.node.core.rooms, "its engine reads it"
        f.rank.on_outcomes([Finished(room=1, reason="length")])
        assert ROOM not in f.rank.node.core.rooms
        f.take(RankRoom(5, 3, p.begin("b", 9, "d0-tp1")))
        await until(lambda: len(leader.sent) == 2)
        assert leader.sent[-1].local_id == 3
        assert leader.sent[-1].prefix == TOKENS // 64 * 64, "of the first room's prompt"
        f.take(RankFailed(6, 3, "aborted", ""))
        assert f.rank.node.core.cache.free_slots[0] == 1_024
        rooms = f.rank.metrics.rooms
        samples = [each for metric in (rooms.begun, rooms.ended) for each in metric.collect()[0].samples]
        counts = {(*each.labels.values(),): each.value for each in samples if each.name.endswith("_total")}
        assert counts == {(): 3, ("refused",): 1, ("length",): 1, ("aborted",): 1}
        p.routers.send("b", CancelRoom(ROOM, "aborted"))


async def test_a_late_report_of_a_rank_is_not_taken_for_the_next_room_of_its_label(directory: Path) -> None:
    async with prefill() as p, decode(directory, ranks=Ranks(0, 2)) as d:
        other = JoinedRank(Ranks(1, 2), "d0-tp1")
        d.routers.send("a", p.begin("a", ROOM, "d0"))
        await until(lambda: d.rank.by_id[ROOM].ranks_ready)
        d.routers.send("a", CancelRoom(ROOM, "aborted"))
        await d.routers.over("a", ROOM)
        await p.routers.over("a", ROOM)
        await p.drained()
        d.routers.send("b", p.begin("b", ROOM, "d0"))
        d.group.reported(other, RankReady(1, 1, 100, 0))
        d.group.reported(other, RankFailed(2, 1, "transfer", "of the first", 0))
        await until(lambda: d.rank.by_id[ROOM].ranks_ready)
        assert not orders(d, Generate), "the other rank has said nothing of this one"
        d.group.reported(other, RankReady(3, 2, 100, 0))
        assert await generates(d) == 2
        with pytest.raises(RemoteProtocolError, match="RankReady of room 2, not due"):
            d.group.reported(other, RankReady(4, 2, 100, 0))


async def test_tokens_count_as_cached_when_they_crossed_to_no_rank(directory: Path) -> None:
    async with prefill() as p, decode(directory, ranks=Ranks(0, 2)) as d:
        other, prefixes = JoinedRank(Ranks(1, 2), "d0-tp1"), []
        for room, there in ((1, 0), (2, 128), (3, 64), (4, 192)):
            d.routers.send("a", p.begin("a", room, "d0"))
            await until(lambda room=room: d.rank.by_id[room].ranks_ready)
            d.group.reported(other, RankReady(room, d.rank.by_id[room].local_id, 100, there))
            d.rank.on_outcomes([Finished(room=await generates(d, room), reason="length")])
            prefixes.append((await d.routers.over("a", room)).prefix)
        assert prefixes == [0, 128, 64, 128]


async def test_prefill_sends_the_first_token_before_decode_has_the_room_where_it_is_asked_to(directory: Path) -> None:
    async with prefill() as p:
        p.begin("a", ROOM, "d0", first_token=True)
        p.begin("a", ROOM + 1, "d0")
        sent = p.routers.sent
        await until(lambda: [message for _, message in sent if isinstance(message, Tokens)])
        assert not p.routers.ends("a", ROOM), "no decode has granted anything"
        async with decode(directory) as d, engine_of(d):
            for room in (ROOM, ROOM + 1):
                d.routers.send("a", p.begin("a", room, "d0"))
            for room in (ROOM, ROOM + 1):
                await p.routers.over("a", room)
                await until(lambda of=room: d.routers.ends("a", of))
            tokens = {m.room: m for _, m in reversed(d.routers.sent) if isinstance(m, Tokens)}
            early = {message for _, message in sent if isinstance(message, Tokens)}
            assert [(each.room, each.first, each.ids) for each in early] == [(ROOM, 0, tokens[ROOM].ids[:4])]
