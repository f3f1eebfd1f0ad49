"""The prefill daemon between router, node and engine: whose room a label is until nothing reads its pages any more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pdtransfer.bus.keys import generate
from pdtransfer.clock_name import clock_digest
from pdtransfer.errors import Cause, ConfigError, RemoteProtocolError
from pdtransfer.serve.settings.worker import PrefillConfig
from pdtransfer.serve.worker import daemon
from pdtransfer.serve.worker.daemon import create_engine
from pdtransfer.serve.worker.engine_thread import Compute, Drop, Free, Quit, Refused
from pdtransfer.serve.worker.group.leader import JoinedRank
from pdtransfer.wire import (
    Begin,
    Cancel,
    End,
    Ended,
    Load,
    RankDrained,
    RankFailed,
    RankLanded,
    RankPicked,
    RankReady,
    Ranks,
    Sampling,
    pack_ids,
)
from tests.serve.worker.daemon_pair import Prefill

BEGIN = Begin(7, pack_ids([1, 2, 3]), Sampling(4), ("node:d0",), 60_000)
OTHER = JoinedRank(Ranks(1, 2), "p0-tp1")


@asynccontextmanager
async def leading(ranks: Ranks = Ranks(0, 2)) -> AsyncIterator[Any]:  # noqa: B008
    """A daemon of these ranks, with `routers`; its engine does not run."""
    made = Prefill(ranks)
    made.daemon.routers = made.routers  # type: ignore[attr-defined]
    try:
        yield made.daemon
    finally:
        await made.close()


async def test_a_label_is_in_use_until_every_rank_has_drained_its_room() -> None:
    async with leading() as first:
        first.routers.send("a", BEGIN, Cancel(7, Cause.ABORTED.value), Ended(7))
        assert first.load() == Load(True, False, 1, 0, 1_024 - 3, 1_024), "ended here, and its pages are not free"
        first.routers.send("b", BEGIN)
        (end,) = [message for peer, message in first.routers.sent if peer == "node:b" and isinstance(message, End)]
        assert (end.reason, end.detail) == (Cause.REFUSED.value, "room: 0000000000000007 is in use")
        assert not [order for order in first.port.poll() if isinstance(order, Free)], "the other may still read them"
        first.group.reported(OTHER, RankDrained(1, 1))
        assert first.port.poll() == [Free(1)]
        assert first.load().slots_free == 1_024
        first.routers.send("b", Ended(7))
        first.routers.send("a", replace(BEGIN, room=8))
        assert [type(order) for order in first.port.poll()] == [Compute]


@pytest.mark.parametrize(("ranks", "announced"), [(Ranks(), 0), (Ranks(0, 2), 1)])
async def test_only_a_leader_that_ranks_follow_announces_its_steps(ranks: Ranks, announced: int) -> None:
    submitted = list[object]()
    async with leading(ranks) as first:
        first.port.to_loop = lambda *call: submitted.append(call)
        first.port.to_engine(Drop(1))
        first.port.to_engine(Quit())
        first.thread.run()
    assert len(submitted) == announced


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("os:path", "must be a factory, it is a module"),
        ("os:nothing", "module 'os' has no attribute 'nothing'"),
        ("nothing:os", "No module named 'nothing'"),
        ("ast:literal_eval", "malformed node or string: EngineConfig.*"),
        ("json:loads", r"TypeError: the JSON object must be str, .* \(/.*/json/__init__.py:\d+\)"),
        ("copy:copy", "the factory returns a EngineConfig without `description`, an EngineDescription"),
    ],
)
def test_an_engine_that_is_none_is_one_clear_error(path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"(?m)^engine = '{path}': {text}$"):
        create_engine(path, PrefillConfig(engine=path).engine_config)


def test_a_bug_in_a_factory_of_ours_is_passed_on() -> None:
    with pytest.raises(TypeError):
        create_engine("pdtransfer.wire:pack_ids", PrefillConfig().engine_config)


@pytest.mark.parametrize("name", ["key", "allow"])
def test_keys_that_cannot_be_read_are_reported_before_the_engine_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an arena of hundreds of gigabytes that is minutes before."""
    monkeypatch.setattr(daemon, "create_engine", lambda *_: pytest.fail("the engine was made"))
    key, peers = tmp_path / "p0.key", tmp_path / "peers.txt"
    line = generate(key)
    if name == "key":
        peers.write_text(line)
        key.unlink()
    with pytest.raises(ConfigError, match=str(key if name == "key" else peers)):
        daemon.run(PrefillConfig(listen="", bind="tcp://127.0.0.1:0", key=key, allow=peers))


async def test_a_prompt_that_its_engine_refuses_is_refused_with_the_reason() -> None:
    async with leading(Ranks()) as first:
        first.routers.send("a", BEGIN)
        first.rank.on_outcomes([Refused(1, "3 tokens never fit")])
        (end,) = first.routers.ends("a", 7)
        assert (end.reason, end.detail) == ("refused", "3 tokens never fit")


async def test_a_room_that_fails_on_one_rank_fails_once_and_on_all() -> None:
    aborted = list[Any]()
    async with leading() as first:
        first.group.abort = lambda *failure: aborted.append(failure)
        first.routers.send("a", BEGIN)
        for report in (RankFailed(1, 1, "transfer", "its link", 0), RankFailed(2, 1, "engine", "late", 0)):
            first.group.reported(OTHER, report)
        assert aborted == [(1, Cause.TRANSFER, "rank tp1 (p0-tp1): its link")]
        assert [(end.reason, end.detail) for end in first.routers.ends("a", 7)] == [("transfer", aborted[0][2])]
        assert [type(order) for order in first.port.poll()] == [Compute, Drop]


@pytest.mark.parametrize("shared", [True, False])
async def test_stamps_of_ranks_are_one_stamp_where_all_read_one_clock(shared: bool) -> None:
    async with leading() as first:
        first.routers.send("a", BEGIN)
        ends = list[End]()
        first.desk.end = lambda begin, end: ends.append(end)
        clock = clock_digest() if shared else b"another host's"
        first.group.reported(OTHER, RankLanded(1, 1, 10, 1, 5_000, clock))
        first.landed(first.rank.rooms[1], 20, 2, 4_000)
        (end,) = ends
        assert first.figures().tokens == 3, "each once"
        assert (end.kv_bytes, end.stamp_ns, end.clock) == ((30, 5_000, clock_digest()) if shared else (30, 0, b""))


async def test_a_rank_that_reports_twice_or_what_no_prefill_rank_reports_is_refused() -> None:
    async with leading() as first:
        first.routers.send("a", BEGIN)
        for report in (RankLanded(1, 1, 10, 1, 1), RankPicked(2, 1, b"aux"), RankDrained(3, 1)):
            first.group.reported(OTHER, report)
            with pytest.raises(RemoteProtocolError, match=f"{type(report).__name__} of room 1, not due"):
                first.group.reported(OTHER, report)
        with pytest.raises(RemoteProtocolError, match="RankReady of room 1, not due"):
            first.group.reported(OTHER, RankReady(4, 1, 0, 0))
        first.group.reported(OTHER, RankLanded(5, 99, 10, 1, 1))  # of a room that is over
        assert first.load().slots_free == 1_024 - 3, "this rank has neither written nor drained it"
