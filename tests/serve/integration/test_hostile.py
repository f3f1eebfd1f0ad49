"""Hostile peers on real sockets: answered or refused, their session over, and honest requests beside them complete."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from pdtransfer.errors import Cause
from pdtransfer.memory.mapping import map_received
from pdtransfer.serve.engines.stamp.factory import create
from pdtransfer.transports.shm.handover import receive
from pdtransfer.wire import (
    Abort,
    Begun,
    Cancel,
    Drained,
    End,
    Ended,
    Failed,
    Goodbye,
    Grant,
    Granted,
    Hello,
    Landed,
    Load,
    Part,
    Register,
    Registered,
    Reject,
    Released,
    Tokens,
    Welcome,
    encode,
)
from tests.serve.integration.hostile_peers import (
    JUNK,
    Canaries,
    FakeDecode,
    FakePrefill,
    FakeRouter,
    beside,
    dialler,
    extents,
    identity,
)
from tests.support.fleets import LIMITS, SLOTS, Site, decode_config, running
from tests.support.processes import open_files
from tests.support.waiting import PATIENCE_S, Running, standing, until

Case = Callable[[FakeDecode], Awaitable[None]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running[Site]]:
    patient = {"limits": replace(LIMITS, silence_ms=5_000)}
    yield from standing(running(tmp_path_factory.mktemp("f"), prefills=[patient], decodes=[patient]))


@pytest.fixture(scope="module")
def canaries(site: Running[Site]) -> Canaries:
    return Canaries(site.value.decode)


@pytest.fixture(autouse=True)
def _nothing_is_lost(site: Running[Site], canaries: Canaries) -> Iterator[None]:
    """Afterwards honest requests are served, everything is back, and the canaries live."""
    yield
    site.runner.run(honest_is_served(site.value))
    assert canaries.untouched


async def honest_is_served(site: Site) -> None:
    await site.usable()
    await site.served()
    await site.settled()


def part(*pairs: tuple[int, int], component: int = 0, first_row: int = 0, rows: int | None = None) -> Part:
    return Part(component, first_row, sum(count for _, count in pairs) if rows is None else rows, extents(*pairs))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_junk_is_refused_and_the_honest_go_on(site: Site, role: str) -> None:
    daemon = site.fleet.of(role)[0]

    async def hostile() -> None:
        async with dialler(daemon) as dial:
            for frame in JUNK:
                peer = dial()
                await peer.send(frame)
                assert (await peer.receive(Reject)).reason == "breach"
            for frame in (b"\xc1" * (5 << 20), encode(Goodbye(1, "shutdown")), encode(Ended(1))):
                await dial().send(frame)
            flood = dial()
            for _ in range(3_000):
                await flood.send(b"\xc1")
            refused = (await site.metrics(daemon))["pdtransfer_bus_refused_total"]
            assert refused >= len(JUNK)

    await beside(site.served, hostile)


# A decode that lies


@asynccontextmanager
async def mallory(site: Site, tmp_path: Path) -> AsyncIterator[FakeDecode]:
    """A decode of the right model, with an arena of its own, that has said Hello."""
    engine = create(decode_config(Path("s")).engine_config)
    (component,) = engine.description.components
    async with dialler(site.prefill) as dial:
        fake_decode = FakeDecode(dial(), engine.description, component, tmp_path / "s")
        try:
            assert (await fake_decode.greet()).identity.node == "prefill-0"
            yield fake_decode
        finally:
            assert fake_decode.untouched
            await fake_decode.close()


@pytest.mark.parametrize(
    ("makes", "words"),
    [
        (lambda it: it.grant(1, part((SLOTS - 5, 10))), ["extents", str(SLOTS + 5), str(SLOTS)]),
        (lambda it: it.grant(1, part((0xFFFF_FFFF, 10))), ["extents", str(SLOTS)]),
        (lambda it: it.grant(1, part((0, 5), (4, 5))), ["extents", "4+5", "0+5"]),
        (lambda it: it.grant(1, part((0, 9), rows=10)), ["rows", "10", "9"]),
        (lambda it: it.grant(1, part((0, 11))), ["rows", "11", "10"]),
        (lambda it: it.grant(1, part((0, 10), component=3)), ["component", "3", "1"]),
        (lambda it: it.grant(1, part((0, 5)), part((5, 5), first_row=5)), ["component", "0 is there twice"]),
        (lambda it: it.grant(1, part((0, 10), first_row=5)), ["rows", "5+10", "10"]),
        (lambda it: it.grant(1, part((0, 10)), prefix=11), ["prefix", "11", "10"]),
        (lambda it: it.grant(1, tokens=0), ["prefix", "0"]),
        (lambda it: it.grant(1, msgspec.structs.replace(part((0, 10)), extents=b"\0" * 7)), ["extents", "7 bytes"]),
        (lambda it: it.grant(1, msgspec.structs.replace(part((0, 10)), extents=extents((0, 0)))), ["extents", "0"]),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, list) else "",
)
async def test_a_grant_that_makes_no_sense_is_refused_with_the_field_and_both_values(
    site: Site, tmp_path: Path, makes: Callable[[FakeDecode], Grant], words: list[str]
) -> None:
    async with mallory(site, tmp_path) as it:
        session = await it.register()
        await it.peer.send(makes(it))
        refused = await it.peer.receive(Reject)
        assert (refused.session, refused.reason) == (session, "breach")
        text = "; ".join(refused.fields)
        assert "Grant" in text
        assert all(word in text for word in words), text
        await it.peer.send(it.grant(1, part((0, 10))))  # the session is over
        assert await it.peer.receive(Reject, Granted) == Reject(session, "unknown_session", ())


async def test_grants_that_overlap_or_change_end_the_session_and_the_honest_go_on(site: Site, tmp_path: Path) -> None:
    async def hostile() -> None:
        async with mallory(site, tmp_path) as it:
            session = await it.register()
            first = it.grant(1, part((0, 10)))
            await it.peer.send(first, first, first)
            assert [await it.peer.receive(Granted, Reject) for _ in range(3)] == [Granted(session, 1)] * 3
            await it.peer.send(it.grant(2, part((9, 10)), room=2))
            refused = (await it.peer.receive(Reject)).fields[0]
            assert all(word in refused for word in ("overlap", "9+10", "0+10")), refused
            session = await it.register()
            await it.peer.send(it.grant(1, part((0, 10))), it.grant(1, part((20, 10))))
            assert "parts" in (await it.peer.receive(Reject)).fields[0]
            session = await it.register()
            await it.peer.send(it.grant(1, part((0, 10))), it.grant(1, part((0, 10)), room=9))
            assert "Grant.room: 9, grant 1 began with 1" in (await it.peer.receive(Reject)).fields[0]
            session = await it.register()
            await it.peer.send(it.grant(1_000_000, part((0, 10))))  # outside the window: unanswered
            await it.peer.send(Abort(session, 5), it.grant(5, part((0, 10))))
            assert await it.peer.receive(Granted, Drained, Reject) == Drained(session, 5)
            await it.peer.send(Released(session, 5))
            await it.peer.send(it.grant(1, part((0, 10)), time_left_ms=50))
            failed = await it.peer.receive(Failed)
            assert (failed.grant, failed.reason, failed.quiescent) == (1, "deadline", True)

    assert await beside(site.served, hostile) >= 1


async def test_what_comes_before_its_time_or_under_another_session_is_refused(site: Site, tmp_path: Path) -> None:
    async with mallory(site, tmp_path) as it:
        it.session = secrets.randbits(63)
        await it.peer.send(it.grant(1, part((0, 10))))
        assert await it.peer.receive(Reject) == Reject(it.session, "unknown_session", ())
        session = await it.register()
        it.session = session + 1
        await it.peer.send(it.grant(1, part((0, 10))), Abort(it.session, 1), Released(it.session, 1))
        for _ in range(3):
            assert await it.peer.receive(Reject) == Reject(session + 1, "unknown_session", ())
        await it.peer.send(Landed(session, 1, 0, b""))
        assert "Landed" in (await it.peer.receive(Reject)).fields[0]


async def test_a_decode_that_guesses_a_label_gets_nothing_of_a_room_for_another(site: Site, tmp_path: Path) -> None:
    async with mallory(site, tmp_path) as it, dialler(site.prefill) as dial:
        await it.register()
        router = FakeRouter(dial())
        await router.greet()
        room = await router.begin("decode-0", tokens=10)
        await router.peer.receive(Begun)
        await it.peer.send(it.grant(1, part((0, 10)), room=room))
        failed = await it.peer.receive(Failed, Landed)
        assert isinstance(failed, Failed), failed
        assert (failed.reason, failed.quiescent) == ("breach", True)
        await it.peer.send(Released(failed.session, 1))
        await router.peer.send(Cancel(room, "aborted"))
        end = await router.peer.receive(End)
        assert end.reason == "aborted", "the room is still there for whom it was meant for"
        await router.peer.send(Ended(room))


async def test_a_session_belongs_to_who_registered_it(site: Site, tmp_path: Path) -> None:
    async with mallory(site, tmp_path) as it, dialler(site.prefill) as dial:
        session = await it.register()
        await it.peer.send(it.grant(1, part((0, 10))))
        await it.peer.receive(Granted)
        thief = dial()
        await thief.send(Hello(1, 1, identity("decode", it._like, "thief")))
        for message in (Abort(session, 1), it.grant(2, part((20, 10))), Released(session, 1)):
            await thief.send(message)
            assert "is not a session of node:thief" in (await thief.receive(Reject)).fields[0]
        await it.peer.send(Abort(session, 1))  # it is as alive as before
        assert await it.peer.receive(Drained, Reject) == Drained(session, 1)


async def test_an_arena_that_is_not_what_was_announced_is_refused(site: Site, tmp_path: Path) -> None:
    async with mallory(site, tmp_path) as it:
        for change in (
            {"token": bytes(32)},
            {"arena_bytes": it.arena.byte_count + 4_096},
            {"address": "/etc/passwd"},
            {"address": str(tmp_path / "nobody")},
            {"host": "elsewhere"},
            {"transport": "mooncake"},
            {"arena_bytes": 4_096},
        ):
            session = secrets.randbits(63) + 1
            reach = msgspec.structs.replace(await it._transport.offer(session), **change)
            await it.peer.send(Register(session, (it.component,), reach))
            refused = await it.peer.receive(Reject, Registered)
            assert isinstance(refused, Reject), change
            assert refused.session == session
        await it.register()


async def test_who_takes_an_honest_nodes_name_disturbs_it_and_no_more(site: Site, tmp_path: Path) -> None:
    """Without keys a name belongs to who said it last; the honest one says it again."""

    async with dialler(site.prefill) as dial:
        engine = create(decode_config(Path("s")).engine_config)
        thief = dial()
        await thief.send(Hello(1, 1, identity("decode", engine.description, "decode-0")))
        await thief.receive(Welcome)

        await until(site.answers, "the honest decode has its name back")


# A prefill that lies, and a router that sends decode to it


@asynccontextmanager
async def lured(site: Site) -> AsyncIterator[tuple[FakeRouter, FakePrefill]]:
    """Decode is about to dial a prefill that lies."""
    context = zmq.asyncio.Context()
    try:
        async with dialler(site.decode) as dial:
            router = FakeRouter(dial())
            yield router, FakePrefill(context, await router.greet())
            await router.peer.send(Goodbye(router.peer.incarnation, "shutdown"))
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda grant: Landed(grant.session, grant.grant, 1, b""), ["kv_bytes", "1", "grant is"]),
        (lambda grant: Landed(grant.session, grant.grant + 7, 1, b""), ["never granted"]),
        (lambda grant: Drained(grant.session, grant.grant), ["stopped writing"]),
        (lambda grant: Failed(grant.session, grant.grant, "engine", "no luck", quiescent=True), ["no luck"]),
        (lambda grant: Registered(grant.session, 1 << 60), ["bytes_ready"]),
        (lambda grant: Granted(grant.session, grant.grant + 1), ["never granted"]),
        (lambda grant: Reject(grant.session, "engine", ("gone",)), ["gone"]),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, list) else "",
)
async def test_a_prefill_that_lies_fails_its_room_and_decodes_slots_come_back(
    site: Site, lie: Callable[[Grant], object], words: list[str]
) -> None:
    async def hostile() -> None:
        async with lured(site) as (router, prefill):
            room = await router.begin(prefill.endpoint)
            await prefill.registered()
            grant = await prefill.peer.receive(Grant)
            assert grant.room == room
            await prefill.peer.send(lie(grant))  # pyright: ignore
            end = await router.peer.receive(End)
            assert (end.room, end.tokens) == (room, 0)
            assert all(word in end.detail for word in words), end
            await router.peer.send(Ended(room))

    await beside(site.served, hostile)


async def test_a_landing_of_nothing_generates_from_nobody_elses_bytes(site: Site) -> None:
    """It says Landed and has written nothing: its own room decodes nonsense or fails, and that is all."""

    async def hostile() -> None:
        async with lured(site) as (router, prefill):
            room = await router.begin(prefill.endpoint)
            register = await prefill.registered()
            grant = await prefill.peer.receive(Grant)
            (component,) = register.components
            await prefill.peer.send(Landed(grant.session, grant.grant, 20 * component.layout.row_bytes, b"junk"))
            end = await router.peer.receive(End)
            assert (end.room, end.reason) == (room, "engine")  # its aux is no hand-off of a prefill
            await router.peer.send(Ended(room))

    await beside(site.served, hostile)


async def test_words_of_peers_make_no_labels(site: Site) -> None:
    """Neither a hostile prefill's reason nor a hostile router's is one of ours."""

    async with lured(site) as (router, prefill):
        room = await router.begin(prefill.endpoint)
        await prefill.registered()
        grant = await prefill.peer.receive(Grant)
        await prefill.peer.send(Failed(grant.session, grant.grant, 'x"} 1\npwned{a="', "", quiescent=True))
        assert (await router.peer.receive(End)).reason == "transfer"
        await router.peer.send(Ended(room))
        room = await router.begin(prefill.endpoint)
        while (grant := await prefill.peer.receive(Grant)).room != room:
            pass  # the first room's, sent again before its end was received
        await router.peer.send(Cancel(room, "pwned too"))
        while (await prefill.peer.receive(Abort)).grant != grant.grant:
            pass
        await prefill.peer.send(Drained(grant.session, grant.grant))
        assert (await router.peer.receive(End)).reason == "aborted"
        await router.peer.send(Ended(room))
    text = (await site.get(site.decode, "/metrics"))[1]
    assert "pwned" not in text
    reasons = set(re.findall(r'pdtransfer_rooms_ended_total\{reason="(.*?)"\}', text))
    assert {"transfer", "aborted"} <= reasons <= {*Cause, "stop", "length", "done"}


async def test_slots_of_a_writer_that_holds_the_arena_stay_quarantined_until_it_lets_go(site: Site) -> None:
    before = open_files(site.decode.process.pid)
    async with lured(site) as (router, prefill):
        room = await router.begin(prefill.endpoint)
        register = await prefill.registered()
        grant = await prefill.peer.receive(Grant)
        fd = await receive(register.reach, register.session, seconds=PATIENCE_S)
        mapping = map_received(fd, register.reach.arena_bytes)
        os.close(fd)
        try:
            await prefill.peer.send(b"\xc1")
            await prefill.peer.send(Failed(grant.session, grant.grant, "engine", "still writing", quiescent=False))
            end = await router.peer.receive(End)
            assert end.room == room
            await router.peer.send(Ended(room))
            prefill.peer.incarnation = 0  # falls silent
            await site.until(site.decode, "pdtransfer_quarantined_bytes")
            await site.served()
            assert (await site.metrics(site.decode))["pdtransfer_quarantined_bytes"]
        finally:
            mapping.close()
    await site.settled()

    async def same() -> bool:
        return open_files(site.decode.process.pid) <= before + 8  # the prefill's endpoint is dialled on for a while

    await until(same)


@pytest.mark.parametrize(
    ("role", "begin", "words"),
    [
        ("decode", {"tokens": 0}, ["prompt", "no tokens"]),
        ("decode", {"prompt": b"\0\0\0"}, ["prompt", "3 bytes"]),
        ("decode", {"max_tokens": SLOTS}, [str(SLOTS + 20), str(SLOTS)]),
        ("decode", {"prompt": b"\xff\xff\xff\xff"}, ["4294967295"]),
        ("decode", {"enable_hisparse": True}, ["enable_hisparse"]),
        ("decode", {"peers": ["nowhere"]}, ["nowhere", "tcp://"]),
        ("decode", {"peers": ["tcp://127.0.0.1:1", "tcp://127.0.0.1:1"]}, ["must name at least one rank, each once"]),
        ("prefill", {"tokens": 0}, ["prompt", "no tokens"]),
        ("prefill", {"prompt": b"\0\0\0"}, ["prompt", "3 bytes"]),
        ("prefill", {"tokens": SLOTS + 1}, [str(SLOTS + 1), str(SLOTS)]),
    ],
)
async def test_a_begin_that_makes_no_sense_ends_with_the_reason(
    site: Site, role: str, begin: dict[str, Any], words: list[str]
) -> None:
    async with dialler(site.fleet.of(role)[0]) as dial:
        router = FakeRouter(dial())
        await router.greet()
        peers = [site.prefill.ready["endpoint"]] if role == "decode" else ["decode-0"]
        given = {"peers": peers, **begin}
        room = await router.begin(*given.pop("peers"), **given)
        end = await router.peer.receive(End)
        assert (end.room, end.reason) == (room, "refused")
        assert all(word in end.detail for word in words), end
        await router.peer.send(Ended(room), Goodbye(router.peer.incarnation, "shutdown"))


async def test_a_router_that_sends_what_no_router_sends_is_rejected_and_costs_nobody_else(site: Site) -> None:
    for role in ("prefill", "decode"):
        async with dialler(site.fleet.of(role)[0]) as dial:
            router = FakeRouter(dial())
            await router.greet()
            await router.peer.send(Load(True, False, 0, 0, 1, 1), Tokens(1, 0, b"\1\0\0\0"), Begun(1))
            for name in ("Load", "Tokens", "Begun"):
                assert name in (await router.peer.receive(Reject)).fields[0]
            await router.peer.send(Goodbye(router.peer.incarnation, "shutdown"))
