"""The ranks of a worker on their bus: who may join, what arrives in which order, and what ends the link."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from pdtransfer.bus import Bus
from pdtransfer.bus.keys import AllowList, KeyPair, generate
from pdtransfer.bus.listening import reserve
from pdtransfer.client.settings import NodeSettings
from pdtransfer.errors import Cause, ConfigError, RemoteProtocolError, WorldError
from pdtransfer.limits import TEXT_LENGTH_MAX, Limits
from pdtransfer.serve.worker.engine_thread import Compute, Drop, Free, Generate, GenerateFrom, Quit
from pdtransfer.serve.worker.group.follower import GroupFollower
from pdtransfer.serve.worker.group.leader import GroupLeader, JoinedRank
from pdtransfer.serve.worker.group.meeting import StoppedError, unless
from pdtransfer.wire import (
    Begin,
    Hello,
    Identity,
    Message,
    RankBound,
    RankDrained,
    RankFailed,
    RankJoin,
    RankLanded,
    RankMeet,
    RankReady,
    RankReload,
    RankRoom,
    Ranks,
    Reject,
    Sampling,
    Setting,
    StepOrder,
    StepOrders,
    Welcome,
    decode,
    encode,
)
from tests.support.bus_peers import Context, Raw
from tests.support.bus_peers import context as context  # noqa: PLC0414
from tests.support.waiting import until

LIMITS = Limits(ping_ms=20, silence_ms=1_000)
CALM = Limits(ping_ms=50, silence_ms=2_000)  # for ranks that are to stay, on a busy machine too
SETTINGS = (Setting("page_size", "64"), Setting("version", "1"))
TENSORS, SECRET = "tcp://127.0.0.1:1234", bytes(32)
BEGIN = Begin(7, b"abcd", Sampling(1), ("tcp://p0:1",), 1_000)


class Leader(GroupLeader):
    """Listens, and keeps what it receives."""

    def __init__(self, tp_size: int = 2) -> None:
        self.ended = asyncio.Event()  # a follower was asked to end
        super().__init__(Ranks(0, tp_size), self.ended.set)
        self.reports: list[Message] = []
        self.reported = lambda rank, report: self.reports.append(report)

    async def listen(self, settings: NodeSettings | None = None) -> str:
        listener = await reserve("tcp://127.0.0.1:0", keyed=False, insecure=False)
        return self.open(settings or node("l"), "decode", SETTINGS, listener)


def node(name: str, limits: Limits = LIMITS, **more: Any) -> NodeSettings:
    return NodeSettings(node=name, model="m", weights=b"w", limits=limits, **more)


def join(rank: int = 1, size: int = 2, settings: tuple[Setting, ...] = SETTINGS) -> RankJoin:
    return RankJoin(Ranks(rank, size), "f", settings, TENSORS)


class Follower(GroupFollower):
    """Keeps what its leader says."""

    def __init__(self, endpoint: str, settings: NodeSettings | None = None, words: RankJoin | None = None) -> None:
        super().__init__(settings or node("f"), "decode", endpoint, words or join())
        self.taken: list[Message] = []
        self.take = self.taken.append


async def met(leader: Leader, follower: Follower) -> RankMeet:
    """What the leader's only follower gets once it has joined."""
    joining = asyncio.ensure_future(follower.join())
    await leader.joined()
    leader.meet(TENSORS, SECRET)
    return await joining


class Pair:
    """A leader and its one follower, met and bound."""

    async def __aenter__(self) -> tuple[Leader, Follower]:
        self.leader = Leader()
        self.follower = Follower(await self.leader.listen(node("l", CALM)), node("f", CALM))
        assert await met(self.leader, self.follower) == RankMeet(1234, (TENSORS,), SECRET)
        self.follower.bound("tcp://f:1", "f:2")
        assert [member.endpoint for member in await self.leader.members("l")] == ["", "tcp://f:1"]
        return self.leader, self.follower

    async def __aexit__(self, *_: object) -> None:
        await self.follower.close()
        await self.leader.close()


class Stranger(Raw):
    """Neither pings nor numbers anything."""

    async def joined(self, leader: Leader) -> None:
        self.send(hello("f"))
        await self.got(Welcome)
        self.send(join())
        await leader.joined()


def hello(name: str) -> Hello:
    return Hello(1, 1, node(name).identity("decode"))


async def test_all_that_a_leader_sends_comes_once_and_in_order_and_so_do_reports() -> None:
    async with Pair() as (leader, follower):
        for index in range(1_000):
            leader.room(index, BEGIN)
            leader.step([Drop(index)])
            follower.bus.send(RankReady, index, 5, 3)
        request: Any = SimpleNamespace(room=5)
        leader.step([Compute(request), Generate(request, {}, b"aux"), GenerateFrom(request, {}, 0), Free(5)])
        leader.step([Free(5), Quit()])
        leader.abort(5, Cause.ENGINE, "x" * 10_000)
        leader.introduce(("tcp://p0:1",))
        await until(lambda: len(follower.taken) == 2_003 and len(leader.reports) == 1_000)
        rooms, steps = (follower.taken[first:2_000:2] for first in (0, 1))
        assert rooms == [RankRoom(2 * index + 1, index, BEGIN) for index in range(1_000)]
        assert steps == [StepOrders(2 * index + 2, (StepOrder("drop", index),)) for index in range(1_000)]
        orders = (("compute", 5), ("generate", 5, b"aux"), ("generate", 5), ("free", 5))
        failed = RankFailed(2_002, 5, "engine", "x" * TEXT_LENGTH_MAX)
        assert follower.taken[2_000:2_002] == [StepOrders(2_001, tuple(StepOrder(*each) for each in orders)), failed]
        assert follower.taken[-1].peers == ("tcp://p0:1",)  # type: ignore[attr-defined]
        assert leader.reports == [RankReady(index + 1, index, 5, 3) for index in range(1_000)]


async def test_a_group_is_known_once_every_rank_is_bound() -> None:
    leader = Leader(tp_size=3)
    endpoint = await leader.listen(node("l", CALM))
    followers = [Follower(endpoint, node(f"f{rank}", CALM), join(rank, 3)) for rank in (1, 2)]
    joining = [asyncio.ensure_future(follower.join()) for follower in followers]
    await leader.joined()
    leader.meet(TENSORS, SECRET)
    await asyncio.gather(*joining)
    members = asyncio.create_task(leader.members("l"))
    followers[1].bound("tcp://f2:1", "f2:2")
    await until(lambda: any(rank.bound for rank in leader.followers.values()))
    await asyncio.sleep(0)
    assert not members.done()
    followers[0].bound("tcp://f1:1", "f1:2")
    assert [member.endpoint for member in await members] == ["", "tcp://f1:1", "tcp://f2:1"]
    for end in (*followers, leader):
        await end.close()


async def test_a_group_that_has_nothing_to_send_stays_and_either_end_sends_goodbye() -> None:
    async with Pair() as (leader, follower):
        await asyncio.sleep(CALM.silence_ms / 1e3 + 0.5)
        assert not leader.lost.is_set()
        assert not follower.lost.is_set()
        follower.ask()
        await leader.ended.wait()
        await leader.close()
        leader.fail("rank tp1 has ended with status 0")
        assert not leader.lost.is_set()
        await follower.over.wait()
        await asyncio.sleep(4 * CALM.ping_ms / 1e3)  # the leader's end of the connection is gone
        assert not follower.lost.is_set()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (join(size=4), "tp_size: 4 on rank tp1, 2 on its leader"),
        (join(rank=2), "tp_rank: 2, tp_size is 2"),
        (join(rank=0), "rank tp0 is here already"),
        (join(settings=(Setting("page_size", "32"), SETTINGS[1])), "page_size: '32' on rank tp1, '64' on its leader"),
        (join(settings=SETTINGS[:1]), "version: '' on rank tp1, '1' on its leader"),
        (join(settings=(*SETTINGS, Setting("new", "x"))), "new: 'x' on rank tp1, '' on its leader"),
        (RankJoin(Ranks(1, 2, 0, 2), "f", SETTINGS, TENSORS), "pp_size: 2 on rank pp0-tp1, 1 on its leader"),
        (join(settings=(Setting("page_size", "x" * TEXT_LENGTH_MAX), SETTINGS[1])), "page_size: 'xxx"),
        (RankJoin(Ranks(1, 2), "f", SETTINGS, "here"), "tensors: endpoint 'here': is not tcp://host:port"),
    ],
)
async def test_a_rank_that_differs_is_refused_with_the_field_and_both_values(words: RankJoin, text: str) -> None:
    leader = Leader()
    follower = Follower(await leader.listen(), words=words)
    with pytest.raises(ConfigError, match="the leader refuses this rank: ") as refused:
        await follower.join()
    assert text in str(refused.value)
    assert not leader.followers
    assert not leader.lost.is_set(), "the right one may still come"
    await follower.close()
    await leader.close()


@pytest.mark.parametrize("name", ["f", "g"])
async def test_a_second_process_of_one_rank_is_refused_and_the_first_goes_on(name: str) -> None:
    async with Pair() as (leader, follower):
        second = Follower(follower.endpoint, node(name))
        with pytest.raises(ConfigError, match="is connected already" if name == "f" else "rank tp1 is here already"):
            await second.join()
        await second.close()
        leader.step([])
        follower.bus.send(RankDrained, 3)
        await until(lambda: bool(follower.taken and leader.reports))
        assert not leader.lost.is_set()


async def test_a_peer_of_another_role_cannot_join(context: Context) -> None:
    leader = Leader()
    stranger = Stranger(context, await leader.listen())
    stranger.send(Hello(1, 1, node("f").identity("prefill")))
    assert await stranger.got(Reject) == Reject(0, "refused", ("role: 'prefill' there, 'decode' here",))
    stranger.send(join())
    assert (await stranger.got(Reject)).reason == "hello_first"
    assert not leader.followers
    await leader.close()


def keyed(here: Path, name: str, **listed: str) -> NodeSettings:
    for each in (name, *listed):
        if not (here / f"{each}.key").exists():
            generate(here / each)
    lines = [f"{(here / f'{each}.pub').read_text().strip()} {role}" for each, role in listed.items()]
    allowed = AllowList.parse("\n".join(lines), source="allow")
    return node(name, keys=KeyPair.read(here / f"{name}.key"), allowed=allowed)


async def test_a_key_that_is_not_listed_or_not_for_this_role_cannot_join(tmp_path: Path) -> None:
    leader = Leader()
    settings = keyed(tmp_path, "l", f="decode", r="router")
    assert settings.keys is not None
    endpoint = f"{settings.keys.public}@{await leader.listen(settings)}"
    stranger = Follower(endpoint, keyed(tmp_path, "s", l="decode"))
    stop = asyncio.Event()
    joining = asyncio.ensure_future(unless(stranger.join(), stop))
    router = Follower(endpoint, keyed(tmp_path, "r", l="decode"))
    with pytest.raises(ConfigError, match="the allow-list lets r be router, not decode"):
        await router.join()
    assert not leader.followers
    follower = Follower(endpoint, keyed(tmp_path, "f", l="decode"))
    assert (await met(leader, follower)).tensors == (TENSORS,)
    stop.set()
    with pytest.raises(StoppedError):  # the stranger was never answered
        await joining
    for each in (stranger, router, follower):
        await each.close()
    await leader.close()


async def test_a_rank_whose_key_is_revoked_is_lost(tmp_path: Path) -> None:
    leader = Leader()
    settings = keyed(tmp_path, "l", f="decode")
    assert settings.keys is not None
    follower = Follower(f"{settings.keys.public}@{await leader.listen(settings)}", keyed(tmp_path, "f", l="decode"))
    await met(leader, follower)
    assert settings.allowed is not None
    leader.allow(settings.allowed)
    await until(lambda: follower.taken)
    assert follower.taken == [RankReload(1)]
    leader.allow(AllowList.parse("", source="allow"))
    assert leader.why == "rank tp1 (f) of this worker is lost: its key was revoked, or its role"
    await follower.close()
    await leader.close()


@pytest.mark.parametrize("role", ["prefill", "router"])
async def test_a_rank_dials_and_keeps_no_leader_whose_key_is_listed_in_another_role(tmp_path: Path, role: str) -> None:
    leader = Leader()
    settings = keyed(tmp_path, "l", f="decode")
    assert settings.keys is not None
    endpoint = f"{settings.keys.public}@{await leader.listen(settings)}"
    wary = Follower(endpoint, keyed(tmp_path, "f", l=role))
    with pytest.raises(ConfigError, match=f"the allow-list lets l be {role}, not decode"):
        await wary.join()
    await wary.close()
    follower = Follower(endpoint, keyed(tmp_path, "f", l="decode"))
    await met(leader, follower)
    allowed = keyed(tmp_path, "f", l=role).allowed
    assert allowed is not None
    follower.allow(allowed)
    await follower.lost.wait()
    assert follower.why == "its key was revoked, or its role"
    await follower.close()
    await leader.close()


@pytest.mark.parametrize("role", ["prefill", "router"])
async def test_a_leader_that_answers_in_another_role_is_not_joined(role: str) -> None:
    listener = Bus(
        node="l", keys=None, allowed=None, refused=lambda *_: None,
        receive=lambda peer, _: listener.send(peer, Welcome(1, Identity("l", role, 1, Ranks(), "m", b"w", 1))),
    )  # fmt: skip
    follower = Follower(await listener.bind("tcp://127.0.0.1:0"))
    with pytest.raises(ConfigError, match=f"the leader refuses this rank: role: .* has '{role}', it is dialled as"):
        await follower.join()
    await follower.close()
    await listener.close()


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([RankReady(2, 1, 0, 0)], "RankReady.number: 2, expected 1: messages are missing"),
        ([RankReady(1, 1, 0, 0), RankReady(1, 1, 0, 0)], "RankReady.number: 1, expected 2"),
        ([b"\xc1"], "frame: not msgpack"),
        ([b"junk" * 1_000], "frame: not msgpack"),
        ([encode(RankReady(1, 1, 0, 0))[:-1] + b"\xc0"], "RankReady.prefix: None"),
        ([StepOrders(1, ())], "kind: StepOrders is not a message from a rank to its leader"),
        ([RankMeet(1)], "kind: RankMeet is not a message from a rank to its leader"),
        ([Hello(1, 1, node("f").identity("decode"))], "its connection was lost"),
        ([], "it has been silent for 1"),
    ],
)
async def test_a_follower_that_leaves_a_gap_talks_nonsense_or_freezes_is_lost(
    frames: list[Message | bytes], why: str, context: Context
) -> None:
    leader = Leader()
    stranger = Stranger(context, await leader.listen())
    await stranger.joined(leader)
    leader.meet(TENSORS, SECRET)
    stranger.send(RankBound("tcp://f:1", ""))
    await leader.members("l")
    stranger.send(*frames)
    await leader.lost.wait()
    assert leader.why.startswith("rank tp1 (f) of this worker is lost: ")
    assert why in leader.why
    await leader.close()


async def test_a_follower_that_dies_is_lost_at_the_next_message(context: Context) -> None:
    leader = Leader()
    stranger = Stranger(context, await leader.listen())
    await stranger.joined(leader)
    members = asyncio.ensure_future(leader.members("l"))
    stranger.socket.close()
    with pytest.raises(WorldError, match=r"^rank tp1 \(f\) of this worker is lost: gone$"):
        await members
    assert leader.lost.is_set()
    await leader.close()


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([StepOrders(2, ())], "StepOrders.number: 2, expected 1: messages are missing"),
        ([b"junk"], "frame: "),
        ([RankReady(1, 1, 0, 0)], "kind: RankReady"),
        ([RankMeet(3)], "kind: RankMeet"),
        ([Welcome(1, node("l").identity("decode"))], "its connection was lost"),
        ([Reject(0, "breach", ("x: y",))], "it refuses (breach): x: y"),
        ([], "it has been silent for 1"),
    ],
)
async def test_a_leader_that_leaves_a_gap_talks_nonsense_or_freezes_is_lost(
    frames: list[Message | bytes], why: str, context: Context
) -> None:
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    follower = Follower(f"tcp://127.0.0.1:{port}")
    joining = asyncio.ensure_future(follower.join())

    async def receive(kind: type[Message]) -> bytes:
        while True:
            await until(lambda: bool(socket.poll(0)))
            route, frame = socket.recv_multipart()
            if isinstance(decode(frame), kind):
                return route

    def nonsense(message: Message) -> None:
        raise RemoteProtocolError("kind", type(message).__name__)

    route = await receive(Hello)
    socket.send_multipart([route, encode(Welcome(1, node("l").identity("decode")))])
    await receive(RankJoin)
    socket.send_multipart([route, encode(RankMeet(1, (TENSORS,), SECRET))])
    assert (await joining).port == 1
    follower.take = nonsense
    follower.bound("", "")
    for frame in frames:
        socket.send_multipart([route, frame if isinstance(frame, bytes) else encode(frame)])
    await follower.lost.wait()
    assert why in follower.why
    await follower.close()


async def test_a_leader_that_dies_or_ends_while_ranks_wait_ends_their_wait() -> None:
    first = Leader(tp_size=3)
    waits = Follower(await first.listen(), words=join(size=3))
    joining = asyncio.ensure_future(unless(waits.join(), waits.over))
    await until(lambda: bool(first.followers))
    await first.close()
    with pytest.raises(StoppedError):
        await joining
    await waits.close()
    alone = Follower("tcp://127.0.0.1:9")
    stop = asyncio.Event()
    joining = asyncio.ensure_future(unless(alone.join(), stop))
    stop.set()
    with pytest.raises(StoppedError):
        await joining
    await alone.close()


@pytest.mark.parametrize("report", [RankLanded(1, 9, 0, 0, 0), RankDrained(1, 9), RankFailed(1, 9, "engine", "")])
def test_a_report_before_any_room_is_a_breach(report: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        GroupLeader(Ranks(0, 2)).reported(JoinedRank(Ranks(1, 2), "f", TENSORS), report)
