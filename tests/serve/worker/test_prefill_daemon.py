"""The prefill daemon between router, node and engine: whose room a label is until nothing reads its pages any more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pdtransfer.bus.keys import generate
from pdtransfer.client.settings import NodeSettings
from pdtransfer.client.thread_queues import ThreadQueues
from pdtransfer.clock_name import clock_digest
from pdtransfer.errors import Cause, ConfigError, RemoteProtocolError
from pdtransfer.serve.settings.worker import PrefillConfig
from pdtransfer.serve.worker import daemon
from pdtransfer.serve.worker.daemon import create_engine
from pdtransfer.serve.worker.engine_thread import Compute, Drop, Free, Order, Quit
from pdtransfer.serve.worker.group.leader import GroupLeader, JoinedRank
from pdtransfer.serve.worker.prefill_daemon import PrefillDaemon
from pdtransfer.wire import (
    Begin,
    Cancel,
    End,
    Ended,
    Hello,
    Message,
    RankDrained,
    RankLanded,
    RankPicked,
    RankReady,
    Ranks,
    Sampling,
    pack_ids,
)
from tests.support.routing_world import identity


async def test_a_label_is_in_use_until_every_rank_has_drained_its_room() -> None:
    config = PrefillConfig(slots=1_024, http="")
    engine = create_engine(config.factory, config.engine_config)
    settings = NodeSettings(node=config.node, model=engine.description.model, weights=engine.description.weights)
    port, sent = ThreadQueues[Order](), list[tuple[str, Message]]()
    prefill_daemon = PrefillDaemon(config, settings, engine, port, CollectorRegistry(), GroupLeader(Ranks(0, 2)))
    prefill_daemon.desk._send = lambda peer, message: bool(sent.append((peer, message))) or True
    follower = JoinedRank(Ranks(1, 2), "p0-tp1")
    begin = Begin(7, pack_ids([1, 2, 3]), Sampling(4), ("node:d0",), 60_000)
    try:
        for node in ("a", "b"):
            prefill_daemon.desk.receive(f"node:{node}", Hello(1, 1, identity(node, "router", 1)))
        for message in (begin, Cancel(7, Cause.ABORTED.value), Ended(7)):
            prefill_daemon.desk.receive("node:a", message)
        assert prefill_daemon.load().slots_free == 1_024 - 3, "ended here, and its pages are not free"
        prefill_daemon.desk.receive("node:b", begin)
        (end,) = [message for peer, message in sent if peer == "node:b" and isinstance(message, End)]
        assert (end.reason, end.detail) == (Cause.REFUSED.value, "room: 0000000000000007 is in use")
        assert not [order for order in port.poll() if isinstance(order, Free)], "the follower may still read its pages"
        prefill_daemon.group.reported(follower, RankDrained(1, 1))
        assert port.poll() == [Free(1)]
        assert prefill_daemon.load().slots_free == 1_024
        prefill_daemon.desk.receive("node:b", Ended(7))
        prefill_daemon.desk.receive("node:a", Begin(8, begin.prompt, begin.sampling, begin.peers, 60_000))
        assert [type(order) for order in port.poll()] == [Compute]
    finally:
        prefill_daemon.desk.ticker.stop()
        await prefill_daemon.node.close()
        port.close()


@pytest.mark.parametrize(("ranks", "announced"), [(Ranks(), 0), (Ranks(0, 2), 1)])
async def test_only_a_leader_that_ranks_follow_announces_its_steps(ranks: Ranks, announced: int) -> None:
    config = PrefillConfig(slots=1_024, http="")
    engine = create_engine(config.factory, config.engine_config)
    settings = NodeSettings(node=config.node, model=engine.description.model, weights=engine.description.weights)
    port, submitted = ThreadQueues[Order](), list[object]()
    prefill_daemon = PrefillDaemon(config, settings, engine, port, CollectorRegistry(), GroupLeader(ranks))
    port.to_loop = lambda *call: submitted.append(call)  # type: ignore[method-assign]
    try:
        port.to_engine(Drop(1))
        port.to_engine(Quit())
        prefill_daemon.thread.run()
    finally:
        prefill_daemon.desk.ticker.stop()
        await prefill_daemon.node.close()
        port.close()
    assert len(submitted) == announced


@pytest.mark.parametrize(
    ("path", "text"),
    [("os:path", "must be a factory, it is a module"), ("os:nothing", "module 'os' has no attribute 'nothing'")],
)
def test_an_engine_that_is_none_is_one_clear_error(path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^engine = '{path}': {text}$"):
        create_engine(path, PrefillConfig(engine=path).engine_config)


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
        daemon.run(PrefillConfig(http="", bind="tcp://127.0.0.1:0", key=key, allow=peers))


@asynccontextmanager
async def of_two_ranks() -> AsyncIterator[PrefillDaemon]:
    """The first of two ranks, with a room of a router's."""
    config = PrefillConfig(slots=1_024, http="")
    engine = create_engine(config.factory, config.engine_config)
    settings = NodeSettings(node=config.node, model=engine.description.model, weights=engine.description.weights)
    port = ThreadQueues[Order]()
    made = PrefillDaemon(config, settings, engine, port, CollectorRegistry(), GroupLeader(Ranks(0, 2)))
    made.desk.receive("node:a", Hello(1, 1, identity("a", "router", 1)))
    made.desk.receive("node:a", Begin(7, pack_ids([1, 2, 3]), Sampling(4), ("node:d0",), 60_000))
    try:
        yield made
    finally:
        made.desk.ticker.stop()
        await made.node.close()
        port.close()


OTHER = JoinedRank(Ranks(1, 2), "p0-tp1")


@pytest.mark.parametrize("shared", [True, False])
async def test_stamps_of_ranks_are_one_stamp_where_all_read_one_clock(shared: bool) -> None:
    async with of_two_ranks() as first:
        ends = list[End]()
        first.desk.end = lambda begin, end: ends.append(end)  # type: ignore[method-assign]
        clock = clock_digest() if shared else b"another host's"
        first.group.reported(OTHER, RankLanded(1, 1, 10, 1, 5_000, clock))
        first.landed(first.rank.rooms[1], 20, 2, 4_000)
        (end,) = ends
        assert (end.kv_bytes, end.stamp_ns, end.clock) == ((30, 5_000, clock_digest()) if shared else (30, 0, b""))


async def test_a_rank_that_reports_twice_or_what_no_prefill_rank_reports_is_refused() -> None:
    async with of_two_ranks() as first:
        for report in (RankLanded(1, 1, 10, 1, 1), RankPicked(2, 1, b"aux"), RankDrained(3, 1)):
            first.group.reported(OTHER, report)
            with pytest.raises(RemoteProtocolError, match=f"{type(report).__name__} of room 1, not due"):
                first.group.reported(OTHER, report)
        with pytest.raises(RemoteProtocolError, match="RankReady of room 1, not due"):
            first.group.reported(OTHER, RankReady(4, 1, 0, 0))
        first.group.reported(OTHER, RankLanded(5, 99, 10, 1, 1))  # of a room that is over
        assert first.load().slots_free == 1_024 - 3, "this rank has neither written nor drained it"
