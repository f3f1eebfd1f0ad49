"""Engines in processes of their own: what becomes of writes, slots and processes when any of them dies."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pdtransfer.client.decode_node import DecodeNode
from pdtransfer.client.prefill_node import PrefillNode
from pdtransfer.errors import ConfigError, TransportError
from pdtransfer.handoff.effects import Outcome, RoomDrained, RoomFailed, RoomLeased, RoomReady
from pdtransfer.limits import ENGINES_MAX
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.transports import select
from pdtransfer.transports.engines import arena, child, process, writer
from pdtransfer.transports.engines import settings as engine_settings
from pdtransfer.transports.engines.arena import EngineArena
from pdtransfer.transports.engines.gather import CopyGatherer
from pdtransfer.transports.engines.library import Library
from pdtransfer.transports.engines.ring import SLOT_BYTES, SLOTS, Cut, SendRing
from pdtransfer.transports.engines.writer import targets_of
from pdtransfer.transports.mooncake import MooncakeLibrary
from pdtransfer.transports.mooncake.host import why_not
from pdtransfer.transports.options import ArenaOptions, Network, WriterOptions
from tests.library.transports.engines.engine_pair import LARGE, SESSION, SMALL, Both, both, latent, mapped_by
from tests.library.transports.fake_transport import ignore_end
from tests.support.internals import sessions_of
from tests.support.layout_tensors import CANARY
from tests.support.libraries import LIBRARIES, on_each_library
from tests.support.node_pair import NodePair, node_pair
from tests.support.paths import REPO
from tests.support.processes import command_line, deliver
from tests.support.session_ends import REACH, identity
from tests.support.shm_pair import to_map
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]  # whole processes


def held_by(pid: int) -> list[int]:
    """The inodes of its descriptors."""
    return [os.stat(each).st_ino for each in Path(f"/proc/{pid}/fd").iterdir()]


def listening(pid: int) -> list[str]:
    """The addresses that it listens on, in hex."""
    own, found = held_by(pid), list[str]()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and int(inode) in own:
                found.append(local.partition(":")[0])
    return found


async def halfway(it: Both) -> None:
    """The large write has begun to land."""
    it.write(1, 0, LARGE)
    await until(lambda: it.landed() > 0)


@on_each_library
async def test_a_writers_engine_that_is_killed_leaves_its_writes_unknown_and_its_fence_drops_the_ring(
    library: Library,
) -> None:
    async with both(library) as it:
        await it.map()
        deliver([it.ours()], signal.SIGSTOP)  # so that it cannot be through
        it.write(1, 0, LARGE)
        await until(lambda: sessions_of(it.writer)[SESSION].batches)
        os.kill(it.ours(), signal.SIGKILL)
        await until(lambda: it.ended)
        assert it.ended[1][0] is Outcome.UNKNOWN
        it.write(2, LARGE, LARGE + SMALL)
        await until(lambda: 2 in it.ended)
        assert it.ended[2][0] is Outcome.FAILED, "nothing of it was sent"
        assert await it.writer.fence(SESSION)
        assert not sessions_of(it.writer)
        assert not it.writer._ending
        assert not it.owner.quiet(SESSION), "only decode's own process is a proof for decode"


@pytest.mark.parametrize("shared", [False, True])
async def test_who_closes_does_not_wait_for_what_an_engine_that_has_died_would_report(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_STALL_SECONDS", 1e6)
    async with both(shared=shared) as it:
        await it.map()
        deliver([it.theirs()], signal.SIGSTOP)
        it.write(1, 0, LARGE)
        await until(lambda: sessions_of(it.writer)[SESSION].batches)
        it.writer.unmap(SESSION)
        os.kill(it.ours(), signal.SIGKILL)
        async with asyncio.timeout(30):
            await until(lambda: it.ended)
        assert it.ended[1][0] is Outcome.UNKNOWN
        assert not it.lost


@on_each_library
async def test_revoking_ends_decodes_engine_and_no_byte_changes_from_quiet_on(library: Library) -> None:
    async with both(library) as it:
        await it.map()
        await halfway(it)
        it.owner.revoke(SESSION)
        await until(lambda: it.owner.quiet(SESSION))
        before = it.memory.mapping.array.copy()
        await until(lambda: it.ended)
        outcome, _ = it.ended[1]
        assert outcome in (Outcome.UNKNOWN, Outcome.LANDED)
        await it.writer.fence(SESSION)
        assert np.array_equal(before, it.memory.mapping.array)
        assert it.lost == [SESSION]
        it.owner.forget(SESSION)


@on_each_library
async def test_decodes_engine_that_is_killed_is_reported_and_ends_its_writers_writes_as_unknown(
    library: Library,
) -> None:
    async with both(library) as it:
        await it.map()
        deliver([it.theirs()], signal.SIGSTOP)
        it.write(1, 0, LARGE)
        await until(lambda: sessions_of(it.writer)[SESSION].batches)
        os.kill(it.theirs(), signal.SIGKILL)
        await until(lambda: it.ended and it.lost)
        assert it.ended[1][0] is Outcome.UNKNOWN
        assert it.lost == [SESSION]
        assert it.owner.quiet(SESSION)


@on_each_library
async def test_a_frozen_engine_at_either_end_is_not_waited_for(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_STALL_SECONDS", 1.0)
    async with both(library) as it:
        for session, end in ((1, it.ours), (2, it.theirs)):
            await it.map(session)
            deliver([end(session)], signal.SIGSTOP)
            it.write(session, 0, LARGE, session)
            await until(lambda session=session: session in it.ended)
            assert it.ended[session][0] is Outcome.UNKNOWN
            await it.writer.fence(session)
            it.owner.revoke(session)
            await until(lambda session=session: it.owner.quiet(session))


async def test_a_small_write_behind_a_large_one_ends_before_it() -> None:
    async with both() as it:
        await it.map()
        it.write(1, 0, LARGE)
        it.write(2, LARGE, LARGE + SMALL)
        await until(lambda: len(it.ended) == 2)
        assert list(it.ended) == [2, 1]
        assert {outcome for outcome, _ in it.ended.values()} == {Outcome.LANDED}


@on_each_library
async def test_a_cancelled_write_fails_when_nothing_of_it_is_in_flight_and_others_land(library: Library) -> None:
    async with both(library) as it:
        await it.map()
        deliver([it.ours()], signal.SIGSTOP)
        it.write(1, 0, LARGE)
        await until(lambda: sessions_of(it.writer)[SESSION].batches)
        it.write(2, LARGE, LARGE + SMALL)
        it.writer.cancel(SESSION, 1)
        assert not it.ended
        os.kill(it.ours(), signal.SIGCONT)
        await until(lambda: len(it.ended) == 2)
        assert it.ended[1] == (Outcome.FAILED, "cancelled")
        assert it.ended[2][0] is Outcome.LANDED
        assert not sessions_of(it.writer)[SESSION].held
        assert len(sessions_of(it.writer)[SESSION].ring.free) == 16


@pytest.mark.parametrize("broken", ["long", "pieces", "gather", "runs"])
async def test_a_write_that_cannot_be_planned_fails_alone(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether that shows when it comes, when a piece is taken, in a copy thread, or when a piece is sent."""

    def breaks(*_: object, **__: object) -> Any:
        raise MemoryError("no place for the plan")

    async with both() as pair:
        await pair.map()
        session = sessions_of(pair.writer)[SESSION]
        with monkeypatch.context() as patch:
            session.straight = broken == "long"  # is only asked for a pool that the process can read
            patch.setattr(*{"runs": (SendRing, "write_table")}.get(broken, (Cut, broken)), breaks)
            pair.write(1, 0, LARGE)
            await until(lambda: pair.ended)
        session.straight = False
        assert pair.ended == {1: (Outcome.FAILED, "MemoryError: no place for the plan")}
        pair.write(2, LARGE, LARGE + SMALL)
        await until(lambda: len(pair.ended) == 2)
        assert pair.ended[2] == (Outcome.LANDED, "")
        assert (session.jobs, session.held, len(session.ring.free)) == ({}, {}, 16)


@pytest.mark.parametrize(("run", "straight"), [(16, True), (8, True), (4, False), (1, False)])
async def test_long_runs_leave_from_a_shared_pool_itself_and_short_ones_by_the_ring(run: int, straight: bool) -> None:
    async with both(shared=True) as it:
        await it.map()
        end = it.target.layout.end
        rows = np.random.default_rng(1).integers(0, 256, (LARGE + SMALL, end // (LARGE + SMALL)), np.uint8)
        it.pool.mapping.array[:end] = rows.reshape(-1)
        starts = np.random.default_rng(7).permutation(LARGE // run)[:, None] * run
        source_slots, target_slots = (starts + np.arange(run)).reshape(-1), np.arange(SMALL, LARGE + SMALL)
        it.write_slots(1, source_slots, target_slots)
        await until(lambda: it.ended)
        assert it.ended[1] == (Outcome.LANDED, "")
        landed = it.memory.mapping.array[:end].reshape(rows.shape).copy()
        assert np.array_equal(landed[target_slots], rows[source_slots])
        assert (landed[:SMALL] == CANARY).all()
        ring = sessions_of(it.writer)[SESSION].ring
        filled = ring._memory.mapping.array[: SLOTS * SLOT_BYTES].any()
        assert filled != straight, "what goes straight leaves no byte in a slot"


async def test_pages_that_another_process_reads_are_not_reported_free_before_it_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "_STALL_SECONDS", 1.0)
    kill = process.EngineProcess.kill
    async with both(shared=True) as it:
        await it.map()
        deliver([it.theirs()], signal.SIGSTOP)
        it.write(1, 0, LARGE)
        mapped = sessions_of(it.writer)[SESSION]
        await until(lambda: mapped.batches)
        monkeypatch.setattr(process.EngineProcess, "kill", lambda _: None)  # it takes as long as this test likes
        await until(lambda: mapped.broken)
        for _ in range(100):
            await asyncio.sleep(0)
        assert mapped.process is not None
        assert not mapped.process.dead
        assert not it.ended, "the engine may still read the pool"
        monkeypatch.setattr(process.EngineProcess, "kill", kill)
        mapped.process.kill()
        await until(lambda: it.ended)
        assert mapped.process.dead
        assert it.ended[1][0] is Outcome.UNKNOWN
        await it.writer.fence(SESSION)


async def test_an_engine_may_read_a_shared_pool_and_not_write_it() -> None:
    async with both(shared=True) as it:
        await it.map()
        inode = os.fstat(it.pool.fd).st_ino
        assert [how for number, how in mapped_by(it.ours()) if number == inode] == ["r--s"]
        assert inode not in held_by(it.ours())


async def test_an_engine_listens_on_every_interface_whatever_its_options_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    async with both() as it:
        await it.map()
        for engine in (it.ours(), it.theirs()):
            assert sorted(listening(engine)) == ["0" * 8] * 2 + ["0" * 32] * 2, "SECURITY.md says so, and why"


@pytest.mark.parametrize("reply", [b"x", child.REPLY.pack(child.DONE, SLOTS), child.REPLY.pack(9, 0)])
async def test_an_engine_that_reports_what_makes_no_sense_is_ended(reply: bytes) -> None:
    async with both() as it:
        await it.map()
        deliver([it.theirs()], signal.SIGSTOP)
        it.write(1, 0, LARGE)
        mapped = sessions_of(it.writer)[SESSION]
        await until(lambda: mapped.batches)
        it.writer._on_replies(mapped, reply)
        await until(lambda: it.ended)
        assert it.ended[1][0] is Outcome.UNKNOWN
        await it.writer.fence(SESSION)


@on_each_library
@pytest.mark.parametrize("engines", [(1, 3), (3, 1), (3, 3)])
async def test_a_session_has_as_many_engines_as_both_sides_take(library: Library, engines: tuple[int, int]) -> None:
    async with both(library, engines=engines) as it:
        reach = await it.owner.offer(SESSION)
        assert len(targets_of(reach)) == engines[1]
        await it.writer.map(to_map(SESSION, reach, (it.target,)))
        command = command_line(it.ours())
        assert command[-min(engines) :] == list(targets_of(reach)[: min(engines)])
        it.write(1, 0, LARGE)
        await until(lambda: it.ended)
        assert it.ended[1] == (Outcome.LANDED, "")
        assert (it.memory.mapping.array[: LARGE * it.target.layout.row_bytes] == 7).all()


def test_the_last_that_an_engine_has_logged_is_reported_with_its_end() -> None:
    engine = process.EngineProcess.__new__(process.EngineProcess)
    with open(os.memfd_create("log"), "r+b") as file:
        engine._log = file.fileno()
        assert engine.last_log() == ""
        os.write(engine._log, b"I1 engine.cpp:1] it starts\n" * 400 + b"E1 engine.cpp:2] no route to host\n")
        os.write(engine._log, b"I1 engine.cpp:3] Local segment descriptor\nplain text\n")
        assert engine.last_log() == " (no route to host)"


@pytest.mark.parametrize(
    ("field", "texts"),
    [
        ("address", ["80;", "1,,2", "0", ",1", "1,", "80\n", "/tmp/socket", "999999", "2\u0661000"]),
        ("host", ["", "h", ":1", "h:", "h:0", "h:1;", "h:1\n", "h:999999", "-h:1", "h h:1", "h/x:1", "\u0661:1"]),
    ],
)
def test_what_is_no_host_or_further_port_is_refused_before_anything_is_dialled(field: str, texts: list[str]) -> None:
    reach = replace(REACH, transport="mooncake", host="10.0.0.1:21000", address="")
    for text in texts:
        with pytest.raises(TransportError, match=re.escape(f"{field} {text!r}")):
            targets_of(replace(reach, **{field: text}))
    assert targets_of(replace(reach, host="h.x:65535", address="1")) == ("h.x:65535", "h.x:1")


async def test_one_sessions_end_proves_nothing_about_anothers() -> None:
    async with both() as it:
        await it.map(1)
        await it.map(2)
        os.kill(it.theirs(1), signal.SIGKILL)
        await until(lambda: it.lost)
        it.write(1, 0, SMALL, 1)
        it.write(2, 0, SMALL, 2)
        await until(lambda: len(it.ended) == 2)
        assert it.ended[1][0] is Outcome.UNKNOWN
        assert it.ended[2][0] is Outcome.LANDED


async def test_no_two_engines_have_the_arena_at_overlapping_addresses() -> None:
    async with both() as it:
        span = -(-it.owner._arena.byte_count // arena._BASE_STEP) * arena._BASE_STEP
        it.owner._next_base = arena._BASE_END - span
        bases = list[int]()
        for session in range(1, 4):
            bases.append((await it.owner.offer(session)).base)
            it.owner.revoke(session)
        assert bases == [arena._BASE_END - span, arena._BASE_FIRST, arena._BASE_FIRST + span]


async def test_engines_are_bounded_and_a_refused_offer_names_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async with both() as it:
        monkeypatch.setattr(engine_settings, "ENGINES_MAX", 2)
        reach = await it.owner.offer(1)
        with pytest.raises(TransportError, match="engines: 2 of 2"):
            await it.owner.offer(2)
        monkeypatch.setattr(engine_settings, "ENGINES_MAX", 0)
        with pytest.raises(TransportError, match="engines: 0 of 0"):
            await it.writer.map(to_map(1, reach, (it.target,)))


@pytest.mark.parametrize(("wanted", "sessions"), [(4, 133), (2, 160), (1, 256)])
def test_the_fewer_engines_are_left_the_fewer_a_session_gets_until_none_is(
    wanted: int, sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[int]()
    while sum(given) < ENGINES_MAX:
        given.append(engine_settings.engines_left(Network(streams=wanted), taken=sum(given)))
    with pytest.raises(TransportError, match=f"engines: {ENGINES_MAX} of {ENGINES_MAX}"):
        engine_settings.engines_left(Network(streams=wanted), taken=sum(given))
    assert (given, sum(given), len(given)) == (sorted(given, reverse=True), ENGINES_MAX, sessions)
    assert (given[0], given[-1]) == (wanted, 1)
    monkeypatch.setattr(engine_settings, "engines_for", lambda: 3)
    assert engine_settings.engines_left(Network(), taken=0) == 3, "as this host's cores allow"


def few_ports(count: int, stack: ExitStack) -> tuple[int, int]:
    """A range in which this many ports are free, next to each other or not, as long as the stack holds the others."""
    while True:
        first = random.randrange(22_000, 31_000)
        with ExitStack() as held:
            taken = [held.enter_context(socket.socket()) for _ in range(2 * count)]
            try:
                for number, each in enumerate(taken):
                    each.bind(("", first + number))
            except OSError:
                continue
            for each in taken[::2]:
                each.close()
            stack.push(held.pop_all())
            return first, first + 2 * count - 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_session_goes_on_with_the_engines_that_there_are_ports_for(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        async with both() as it:
            few = Network(streams=4, ports=few_ports(5, stack))
            wide = Network(streams=4)
            it.writer._network, it.owner._network = (few, wide) if side == "prefill" else (wide, few)
            await it.map()
            ends = sessions_of(it.writer)[SESSION].process, sessions_of(it.owner)[SESSION].process
            assert [each.engines for each in ends if each is not None] == ([2, 4] if side == "prefill" else [2, 2])
            assert [each.args[:2] for each in caplog.records if "could be started" in each.message] == [(2, 4)]
            it.write(1, 0, LARGE)
            await until(lambda: it.ended)
            assert it.ended[1] == (Outcome.LANDED, "")


@on_each_library
async def test_a_session_for_which_there_is_no_port_is_refused(library: Library) -> None:
    with ExitStack() as stack:
        async with both(library) as it:
            it.owner._network = Network(streams=4, ports=few_ports(1, stack))
            with pytest.raises(TransportError, match=r"initialize answers|no port from"):
                await it.owner.offer(SESSION)


async def test_a_peer_that_does_not_shake_hands_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rings = list[SendRing]()
    monkeypatch.setattr(CopyGatherer, "prepare", lambda _, ring: rings.append(ring))
    async with both() as it:
        reach = await it.owner.offer(1)
        deliver([it.theirs(1)], signal.SIGSTOP)
        with monkeypatch.context() as hurried:
            hurried.setattr(process, "_READY_SECONDS", 1.0)  # one that is to come up may take longer
            with pytest.raises(TransportError, match="not ready within"):
                await it.writer.map(to_map(1, reach, (it.target,)))
        assert not rings
        os.kill(it.theirs(1), signal.SIGCONT)
        await it.writer.map(to_map(2, reach, (it.target,)))
        (ring,) = rings
        assert not os.fstat(ring.fd).st_blocks, "its process backs nothing of it"


async def test_an_engine_that_dies_while_its_ring_is_prepared_maps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go = threading.Event(), threading.Event()

    def prepare(*_: object) -> None:
        reached.set()
        go.wait()

    monkeypatch.setattr(CopyGatherer, "prepare", prepare)
    async with both() as it:
        mapping = asyncio.ensure_future(it.map())
        await until(reached.is_set)
        died = sessions_of(it.writer)[SESSION].process
        assert died is not None
        died.kill()
        await until(lambda: died.dead)
        go.set()
        with pytest.raises(TransportError, match="has ended"):
            await mapping
        await until(lambda: not it.writer._ending)
        assert not sessions_of(it.writer)


@on_each_library
async def test_an_address_that_never_answers_or_is_another_arenas_is_an_error_within_the_bound(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with both(library) as it:
        reach = await it.owner.offer(1)
        monkeypatch.setattr(process, "_READY_SECONDS", 1.0)
        host, _, port = reach.host.partition(":")
        deliver([it.theirs(1)], signal.SIGSTOP)  # its port takes connections, and nobody ever answers
        with pytest.raises(TransportError, match=reach.host):
            await it.writer.map(to_map(1, reach, (it.target,)))
        os.kill(it.theirs(1), signal.SIGCONT)
        for wrong in (
            {"base": reach.base + (1 << 30)},
            {"base": reach.base + 1},  # memory that is there
            {"host": f"{host}:{int(port) + 5_000}"},
            {"host": "/etc/passwd"},
        ):
            with pytest.raises(TransportError):
                await it.writer.map(to_map(2, replace(reach, **wrong), (it.target,)))
        assert not sessions_of(it.writer)


async def test_an_address_that_no_engine_can_be_reached_by_is_refused_with_the_transport_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far = {"insecure": True}
    for config, transport in itertools.product((PrefillConfig, DecodeConfig), ("mooncake", "nixl")):
        with pytest.raises(ConfigError, match=f"advertise = '::1': transport {transport} is reached by a name"):
            config(transport=transport, advertise="::1")
        with pytest.raises(ConfigError, match=rf"bind = 'tcp://\[::1\]:1': transport {transport} .* set advertise"):
            config(transport=transport, bind="tcp://[::1]:1")
        config(transport=transport, bind="tcp://[::1]:1", advertise="127.0.0.1")
        for bind in ("tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::]:1", "tcp://*:1"):
            config(transport=transport, bind=bind, **far)
        config(transport="auto", advertise="::1", bind="tcp://[::1]:1")
    six = [(socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: six)
    with pytest.raises(ConfigError, match=r"bind = 'tcp://six\.test:1': transport mooncake"):
        DecodeConfig(transport="mooncake", bind="tcp://six.test:1")
    monkeypatch.undo()
    memory = ArenaMemory.create(4096, huge_pages="never")
    owner = EngineArena(MooncakeLibrary(), memory, Network(host="::1"))
    with pytest.raises(TransportError, match="transport mooncake is reached by"):
        await owner.offer(1)
    assert not sessions_of(owner)
    await owner.close()
    memory.close()


_ORPHAN = """
import asyncio, os, sys
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.engines.arena import EngineArena
from pdtransfer.transports.mooncake import MooncakeLibrary
from pdtransfer.transports.nixl import NixlLibrary
from pdtransfer.transports.options import Network
async def main():
    secret = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(secret, True)
    arena = ArenaMemory.create(4096, huge_pages="never")
    owner = EngineArena(MooncakeLibrary(), arena, Network())
    await owner.offer(1)
    print(owner._sessions[1].process.pid, flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


def test_an_engine_dies_with_its_parent_and_has_none_of_its_descriptors() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    pidfd = os.pidfd_open(pid)
    held = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    assert "/etc/hostname" not in held
    parent.kill()
    parent.wait()
    loop = asyncio.new_event_loop()
    gone = loop.create_future()
    loop.add_reader(pidfd, lambda: gone.done() or gone.set_result(None))
    loop.run_until_complete(asyncio.wait_for(gone, 30))
    loop.remove_reader(pidfd)
    loop.close()
    os.close(pidfd)


# Nodes


@dataclass
class Nodes(NodePair):
    """A pair whose KV goes over `transport`."""

    transport: str
    rooms: int = 0

    def begin(self) -> int:
        """A room of all slots but four."""
        self.rooms += 1
        self.expect(self.rooms, 60)
        self.prefill.open(self.rooms, tokens=60, time_left_s=60)
        return self.rooms

    async def drained(self, room: int) -> RoomReady | RoomFailed:
        """How it ended, and nothing reads its pages any more."""
        if isinstance(event := await self.ended(room), RoomFailed):
            self.prefill.abort(room)
        else:
            self.decode.release(room)
        await until(lambda: RoomDrained(room) in self.events_p)
        return event

    async def lands(self) -> bool:
        room = self.begin()
        self.push(room, 60)
        return isinstance(await self.drained(room), RoomReady)

    def engine(self, side: DecodeNode | PrefillNode) -> int:
        over = side.transport._made[self.transport]
        (session,) = sessions_of(over).values()
        return session.process.pid


@asynccontextmanager
async def nodes(library: Library = LIBRARIES[0]) -> AsyncIterator[Nodes]:
    async with node_pair(
        writer=WriterOptions(transport=library.name), options=ArenaOptions(transport=library.name),
        verify=True, prefix_cache=False,
    ) as pair:  # fmt: skip
        yield Nodes(**vars(pair), transport=library.name)


@on_each_library
async def test_rooms_cross_and_are_verified_and_both_nodes_count_the_session(library: Library) -> None:
    async with nodes(library) as it:
        assert await it.lands()
        assert it.decode.core.post_landing.matched == 1
        assert it.decode.transport.counts[library.name] == it.prefill.transport.counts[library.name] == 1


@on_each_library
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_room_whose_engine_dies_or_freezes_fails_once_and_its_slots_come_back_for_the_next(
    library: Library, side: str, signal_number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes(library) as it:
        assert await it.lands()
        monkeypatch.setattr(writer, "_STALL_SECONDS", 1.0)
        room = it.begin()
        await until(lambda: any(isinstance(each, RoomLeased) and each.room == room for each in it.events_p))
        engine = it.engine(getattr(it, side))
        deliver([engine], signal.SIGSTOP)
        os.kill(engine, signal_number)
        it.push(room, 60)
        event = await it.drained(room)
        assert isinstance(event, RoomFailed), "nothing of it can have crossed"
        while not await it.lands():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # a room that is refused at once leaves the loop no time
        assert [each.room for each in it.events_d] == list(range(1, it.rooms + 1)), "each ended once"
        await until(lambda: it.decode.core.idle)
        assert it.decode.core.arena.free[0].free_slots == 64


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_engine_that_dies_between_rooms_is_replaced_before_the_next_one(side: str) -> None:
    async with nodes() as it:
        assert await it.lands()
        (before,) = it.decode.core.prefill_peers.sessions
        os.kill(it.engine(getattr(it, side)), signal.SIGKILL)
        sessions = it.decode.core.prefill_peers.sessions
        await until(lambda: [(each.id != before, each.state.value) for each in sessions.values()] == [(True, "up")])
        assert await it.lands()


async def test_nothing_is_begun_for_a_session_that_has_ended_before_it_was_offered() -> None:
    async with nodes() as it:
        assert await it.lands()
        (session,) = it.decode.core.prefill_peers.sessions
        await it.decode._offer(it.endpoint, session + 1)
        assert it.decode.transport.counts["mooncake"] == 1


async def test_no_engine_is_started_for_a_session_that_ends_while_its_address_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = threading.Event()

    def slow(_: str) -> str:
        known.wait()
        return "127.0.0.1"

    monkeypatch.setattr(select, "own_address", slow)
    memory = ArenaMemory.create(4096, huge_pages="never")
    owner = select.DecodeTransports(memory, ArenaOptions(transport="mooncake"))
    offered = asyncio.ensure_future(
        owner.offer(1, "tcp://127.0.0.1:1", identity("p", "prefill", 1, transports=("mooncake",)))
    )
    await until(lambda: owner.counts["mooncake"])
    assert owner.fence(1)
    owner.forget(1)
    known.set()
    with pytest.raises(TransportError, match="the session has ended"):
        await offered
    assert not sessions_of(owner._made["mooncake"])
    await owner.close()
    memory.close()


@pytest.mark.parametrize("lacking", ["memfd_create", "pidfd_open", "socketpair"])
async def test_a_host_without_descriptors_has_no_engine_and_none_is_left_behind(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[subprocess.Popen[bytes]]()

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many")

    def popen(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*arguments, **more))
        return started[-1]

    async with both() as it:
        ring = SendRing()
        monkeypatch.setattr(process, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL))
        monkeypatch.setattr(process.socket if lacking == "socketpair" else process.os, lacking, none_left)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TransportError, match="no process for an engine: too many"):
            process.EngineProcess(
                MooncakeLibrary(), Network(), host="127.0.0.1", memory=ring.fd, byte_count=ring.byte_count,
                sending=process.Sending(targets=("127.0.0.1:1",), base=1),
            )  # fmt: skip
        assert len(os.listdir("/proc/self/fd")) == before
        assert [each.returncode for each in started] == ([-signal.SIGKILL] if lacking == "pidfd_open" else [])
        ring.close()
        monkeypatch.undo()
        await it.map()


@pytest.mark.parametrize("transport", ["shm", "mooncake"])
async def test_a_writer_that_closes_maps_nothing_more(transport: Any) -> None:
    made = select.PrefillTransports((), WriterOptions(transport=transport), select.WriterCalls(ignore_end))
    await made.close()
    with pytest.raises(TransportError, match="closing"):
        await made.map(to_map(1, replace(REACH, transport=transport), (latent("page_first", 1),)))
    assert not made._made


async def test_an_arena_that_closes_starts_no_engine_for_a_session_that_comes_meanwhile() -> None:
    async with both() as it:
        await it.owner.offer(1)
        closing = asyncio.ensure_future(it.owner.close())
        await asyncio.sleep(0)  # it has told that engine to end, and waits
        with pytest.raises(TransportError, match="closing"):
            await it.owner.offer(2)
        await closing
        assert it.owner.quiet(1)


async def test_a_fence_of_a_session_that_was_unmapped_meanwhile_condemns_nobody() -> None:
    async with both() as it:
        made = select.PrefillTransports(
            (it.target,), WriterOptions(transport="mooncake"), select.WriterCalls(ignore_end)
        )
        await made.map(to_map(SESSION, await it.owner.offer(SESSION), (it.target,)))
        made.unmap(SESSION)
        assert await made.fence(SESSION)
        await made.close()


async def test_sessions_that_are_mapped_at_once_are_bounded_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async with both() as it:
        reaches = [await it.owner.offer(session) for session in (1, 2)]
        monkeypatch.setattr(engine_settings, "ENGINES_MAX", 2)
        mapped = [it.writer.map(to_map(session, reach, (it.target,))) for session, reach in enumerate(reaches, 1)]
        _, refused = await asyncio.gather(*mapped, return_exceptions=True)
        assert "engines: 2 of 2" in str(refused)


@pytest.mark.parametrize("source", ["", "import a_library_that_is_not_there"])
def test_a_mooncake_that_is_not_whole_is_reported_with_what_to_do(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text(source)
    for name in [each for each in sys.modules if each.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert "pip install '.[mooncake]'" in why_not.__wrapped__()
