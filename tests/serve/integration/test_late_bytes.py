"""What the soak and the tests of faults over real TCP would say if a defence were missing: each is taken away once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdtransfer.transports.mooncake.host import why_not
from tests.support import kv_fleet, networks
from tests.support.kv_fleet import DECODES, LARGE, MEGABITS, PREFILLS, Fleet, Host, Room, Side
from tests.support.networks import Network
from tests.support.processes import deliver
from tests.support.waiting import until

SKIPPED = why_not() or networks.why_not()
over_tcp = pytest.mark.skipif(bool(SKIPPED), reason=SKIPPED)
HELD_S = 2 * kv_fleet.PATIENCE_S  # until it is asked to let go
Case = Callable[[Fleet], Awaitable[None]]


@asynccontextmanager
async def two_prefills_and_a_decode(logs: Path, planted: str) -> AsyncGenerator[Fleet]:
    """No session between them: decode's first engine is that of its first room's prefill."""
    with Network((*PREFILLS, *DECODES), megabits=MEGABITS) as network:
        fleet = Fleet(network, logs, planted=planted)
        try:
            await asyncio.gather(*map(fleet.start, ("p0", "p1", "d0")))
            yield fleet
        finally:
            await fleet.__aexit__()


async def ready(fleet: Fleet, room: Room) -> None:
    await fleet.until(room, lambda: room.decode.ended, "ready")
    assert room.landed, room.detail


@over_tcp
@pytest.mark.parametrize("planted", ["", "fence_without_a_death", "unknown_is_failed"])
async def test_bytes_that_come_when_their_slots_are_somebody_elses_are_seen(tmp_path: Path, planted: str) -> None:
    """An engine of decode's is stopped with bytes in its sockets, and goes on when other rooms have all slots."""

    async with two_prefills_and_a_decode(tmp_path, planted) as fleet:
        early = fleet.begin(("p0", "d0"), LARGE, push="some")
        await fleet.halfway(early)
        (engine,) = fleet.hosts["d0"].engines()
        deliver([engine], signal.SIGSTOP)
        fleet.push(early)
        await fleet.over(early)
        assert not early.landed
        # All of the arena, so that the slots of the early one are among theirs.
        others = [fleet.begin(("p1", "d0"), LARGE, hold_s=HELD_S) for _ in range(2)]
        for other in others:
            await ready(fleet, other)
        assert not await fleet.rows(early)
        deliver([engine], signal.SIGCONT)
        if planted:
            await until(lambda: fleet.rows(early), "what was in the engine's sockets does not come")
        else:
            assert engine not in fleet.hosts["d0"].engines(), "it was killed before its slots were given away"
        for other in others:
            fleet.let_go(other)
            await fleet.over(other)
        seen = [f"room {early.number} " in each and "as held" in each for each in fleet.wrong]
        assert any(seen) if planted else not fleet.wrong, fleet.wrong


@over_tcp
@pytest.mark.parametrize("planted", ["", "landed_when_submitted"])
async def test_a_room_that_is_ready_before_its_bytes_are_there_is_seen(tmp_path: Path, planted: str) -> None:
    async with two_prefills_and_a_decode(tmp_path, planted) as fleet:
        room = fleet.begin(("p0", "d0"), push="none")
        await fleet.until(room, lambda: "leased" in room.prefill.events, "leased")
        deliver(fleet.hosts["d0"].engines(), signal.SIGSTOP)
        fleet.push(room)
        await fleet.over(room)
        assert room.landed == bool(planted), room.detail
        assert [f"in place of room {room.number} " in each for each in fleet.wrong] == [True] * bool(planted)


# What needs no network: the words of hosts, put into a fleet's ears


class Mute(Host):
    """One that nobody listens at."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None, 0, "")  # pyright: ignore

    def write(self, *what: object) -> None:
        pass


@pytest.fixture
def fleet() -> Fleet:
    """A fleet with one room, its first, between p0 and d0."""
    fleet = Fleet(None, Path())  # pyright: ignore
    fleet.hosts = {name: Mute(name) for name in ("p0", "d0")}
    fleet.begin(("p0", "d0"))
    return fleet


def report(fleet: Fleet, *words: str, **more: str) -> list[str]:
    """`host kind` for each; what is found wrong."""
    for word in words:
        name, kind = word.split()
        fleet._receive(fleet.hosts[name], {"kind": kind, "room": 1, "seconds": 0.1, "cause": "c", "detail": "d"} | more)
    return fleet.wrong


def test_each_end_once_is_right(fleet: Fleet) -> None:
    assert not report(fleet, "p0 leased", "p0 landed", "d0 ready", "p0 drained")
    assert fleet.rooms, "decode still holds it"
    assert not report(fleet, "d0 released")
    assert not fleet.rooms


@pytest.mark.parametrize(
    "words",
    [
        ("d0 ready", "d0 ready"),
        ("d0 ready", "d0 failed"),
        ("d0 failed", "d0 ready"),
        ("p0 drained", "p0 drained"),
        ("d0 ready", "p0 drained", "d0 released", "d0 ready"),
        ("p0 drained", "d0 failed", "p0 drained"),
    ],
    ids=" ".join,
)
def test_a_second_end_is_seen(fleet: Fleet, words: tuple[str, ...]) -> None:
    assert not report(fleet, *words[:-1])
    assert report(fleet, words[-1])


def test_what_a_host_finds_wrong_is_kept(fleet: Fleet) -> None:
    assert "slot 7" in report(fleet, "d0 ready", wrong="slot 7: room 2")[0]


def test_a_room_that_never_ends_is_seen(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_fleet, "PATIENCE_S", 0.05)
    (room,) = fleet.rooms.values()
    report(fleet, "d0 failed")  # and prefill says nothing

    with pytest.raises(AssertionError, match="over"):
        asyncio.run(fleet.over(room))


@pytest.mark.parametrize(
    ("now", "what"),
    [
        ({"files": 9, "used": 1}, "still holds"),
        ({"files": 9, "idle": False}, "still holds"),
        ({"files": 10}, "files"),
        ({"files": 9, "engines": 3}, "engines"),
    ],
    ids=["slots", "leases", "descriptors", "engines"],
)
def test_what_is_left_behind_is_seen(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, now: dict[str, int], what: str
) -> None:
    monkeypatch.setattr(kv_fleet, "PATIENCE_S", 0.05)
    rests = {"files": 9, "engines": 2, "used": 0, "idle": True}

    async def rest(_: str) -> dict[str, int]:
        return rests

    monkeypatch.setattr(fleet, "rest", rest)
    before = asyncio.run(fleet.at_rest())
    assert before == {"p0": 9, "d0": 9}
    rests |= now
    with pytest.raises(AssertionError, match=what):
        asyncio.run(fleet.at_rest(before))


def test_a_side_whose_process_was_killed_need_send_nothing() -> None:
    assert Side("d0", 0, void=True).over
    assert not Side("d0", 0).over
    assert not Side("d0", 0, events=["ready"]).over
