"""The shared-memory transport: what the fence proves of real processes, whom the hand-over refuses, how writes end."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import socket
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pdtransfer import kernels
from pdtransfer.bus.line import OPENING
from pdtransfer.errors import LayoutMismatchError, RemoteProtocolError, TransportError
from pdtransfer.handoff.effects import Outcome, Write
from pdtransfer.layout.checksum import Lines, lines_of
from pdtransfer.layout.layout import Component, Span, expand_pages
from pdtransfer.layout.pairing import pair
from pdtransfer.memory import mapping as mappings
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.mapping import Mapping
from pdtransfer.transports import copier
from pdtransfer.transports.copier import Copier, CopyWork, copy_job
from pdtransfer.transports.options import WriterOptions
from pdtransfer.transports.shm import arena as shm_arena
from pdtransfer.transports.shm import entering, handover
from pdtransfer.transports.shm import writer as shm_writer
from pdtransfer.transports.shm.arena import ShmArena
from pdtransfer.transports.shm.handover import receive
from pdtransfer.transports.shm.writer import ShmWriter
from pdtransfer.wire import Reach
from tests.library.transports.fake_transport import ignore_end
from tests.support.internals import sessions_of
from tests.support.processes import deliver, forked_descriptors, no_descriptors, open_files
from tests.support.shm_pair import LAYERS, PAGE, ROW, SLOTS, WRITER, Pair, Pool, Process, component, page_first, to_map
from tests.support.waiting import run_on_loop, until


def count_in(arena: ArenaMemory) -> int:
    return int(arena.mapping.array[:8].view(np.uint64)[0])


async def counts_on(arena: ArenaMemory) -> None:
    """Returns once the arena has been seen to change."""
    before = count_in(arena)
    await until(lambda: count_in(arena) != before)


# The fence


@pytest.mark.parametrize("way", ["unmap", "exit", "kill"])
async def test_a_writer_is_quiet_only_when_its_mapping_is_gone(owner: ShmArena, way: str) -> None:
    async with Process(await owner.offer(WRITER)) as process:
        owner.revoke(WRITER)
        assert not owner.quiet(WRITER)
        if way == "kill":
            process.started.kill()
        else:
            process.send(way)
        await until(lambda: owner.quiet(WRITER))
        if way == "unmap":
            assert process.started.poll() is None, "it lives, and cannot write"
    owner.forget(WRITER)


async def test_a_forked_child_keeps_its_killed_writer_from_being_quiet(owner: ShmArena, arena: ArenaMemory) -> None:
    async with Process(await owner.offer(WRITER)) as process:
        child = await process.child("fork")
        owner.revoke(WRITER)
        process.started.kill()
        process.started.wait()
        for _ in range(20):
            await counts_on(arena)
            assert not owner.quiet(WRITER), "the arena still changes"
        os.kill(child, signal.SIGKILL)
        process.forked.clear()
        await until(lambda: owner.quiet(WRITER))
        last = count_in(arena)
        await asyncio.sleep(0.05)
        assert count_in(arena) == last


async def test_a_frozen_writer_is_not_quiet_until_it_is_killed(owner: ShmArena, arena: ArenaMemory) -> None:
    async with Process(await owner.offer(WRITER)) as process:
        process.send("count")
        await counts_on(arena)
        owner.revoke(WRITER)
        deliver([process.started.pid], signal.SIGSTOP)
        assert not owner.quiet(WRITER)
        process.started.send_signal(signal.SIGCONT)
        await counts_on(arena)
        process.started.send_signal(signal.SIGSTOP)
        process.started.kill()
        await until(lambda: owner.quiet(WRITER))


async def test_one_writers_end_proves_nothing_about_another(owner: ShmArena) -> None:
    async with Process(await owner.offer(1), 1) as first, Process(await owner.offer(2), 2):
        for session in (1, 2):
            owner.revoke(session)
        first.started.kill()
        await until(lambda: owner.quiet(1))
        assert not owner.quiet(2)


async def test_a_descriptor_under_way_counts_as_a_writer(owner: ShmArena) -> None:
    peer, _ = await asked(owner, await owner.offer(WRITER))
    await until(lambda: not sessions_of(owner)[WRITER].token)
    owner.revoke(WRITER)
    assert not owner.quiet(WRITER), "it lies in the socket's buffer, and can be taken out any time"
    peer.close()
    assert owner.quiet(WRITER)


async def test_a_session_whose_token_is_good_is_not_quiet(owner: ShmArena) -> None:
    assert owner.quiet(WRITER), "nothing was ever offered"
    await owner.offer(WRITER)
    assert not owner.quiet(WRITER)
    owner.revoke(WRITER)
    assert owner.quiet(WRITER)


# The hand-over


async def asked(owner: ShmArena, reach: Reach, session: int = WRITER) -> tuple[socket.socket, bytes]:
    """A connection that has shown a token, and what it must say to do so."""
    peer = connected(reach)
    request = handover.REQUEST.pack(handover.MAGIC, session, reach.token)
    peer.sendall(request)
    return peer, request


def connected(reach: Reach) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect("\0" + reach.address[1:] if reach.address.startswith("@") else reach.address)
    peer.setblocking(False)
    return peer


async def read_all(peer: socket.socket) -> bytes:
    """What came until the other end closed."""
    got = b""
    while True:
        try:
            part = peer.recv(100)
        except BlockingIOError:
            await asyncio.sleep(0.005)
        except ConnectionResetError:
            return got
        else:
            if not part:
                return got
            got += part


@pytest.mark.parametrize("abstract", [False, True])
async def test_who_shows_the_token_gets_the_arena_once(arena: ArenaMemory, directory: Path, abstract: bool) -> None:
    before = open_files()
    owner = ShmArena(arena, directory=None if abstract else directory)
    reach = await owner.offer(WRITER)
    fd = await receive(reach, WRITER, seconds=60)
    assert os.fstat(fd).st_ino == os.fstat(arena.fd).st_ino
    assert not os.get_inheritable(fd)
    with pytest.raises(TransportError, match="refused the token"):
        await receive(reach, WRITER, seconds=60)
    os.close(fd)
    await owner.close()
    assert open_files() == before
    assert abstract or os.listdir(directory) == []


async def test_a_wrong_token_is_refused_and_spoils_nothing(owner: ShmArena) -> None:
    reach, other = await owner.offer(WRITER), await owner.offer(8)
    wrong = msgspec.structs.replace(reach, token=secrets.token_bytes(32))
    for session, shown in ((WRITER, wrong), (WRITER, other), (99, reach)):
        with pytest.raises(TransportError, match="refused the token"):
            await receive(shown, session, seconds=60)
    for session, shown in ((WRITER, reach), (8, other)):
        os.close(await receive(shown, session, seconds=60))


async def test_a_token_of_which_one_byte_is_another_is_refused(owner: ShmArena) -> None:
    """Whichever byte: a comparison of a part of it would let a guess of that part in."""
    reach = await owner.offer(WRITER)
    for place in range(len(reach.token)):
        token = bytearray(reach.token)
        token[place] ^= 1
        with pytest.raises(TransportError, match="refused the token"):
            await receive(msgspec.structs.replace(reach, token=bytes(token)), WRITER, seconds=60)
    os.close(await receive(reach, WRITER, seconds=60))


async def test_an_old_or_a_revoked_token_is_refused(owner: ShmArena) -> None:
    old, new = await owner.offer(WRITER), await owner.offer(WRITER)
    with pytest.raises(TransportError, match="refused the token"):
        await receive(old, WRITER, seconds=60)
    owner.revoke(WRITER)
    with pytest.raises(TransportError, match="refused the token"):
        await receive(new, WRITER, seconds=60)


async def test_a_token_that_is_shown_too_late_is_refused(owner: ShmArena) -> None:
    owner.listener.seconds = 0.05
    reach = await owner.offer(WRITER)
    peer = connected(reach)
    request = handover.REQUEST.pack(handover.MAGIC, WRITER, reach.token)
    peer.send(request[:20])
    assert await read_all(peer) == b""
    with pytest.raises(BrokenPipeError):
        peer.send(request[20:])
    peer.close()
    owner.listener.seconds = 5
    os.close(await receive(reach, WRITER, seconds=60))


@pytest.mark.parametrize("junk", [b"\xff" * 48, b"GET / HTTP/1.1\r\n" * 40, b"\0" * 49, b""])
async def test_junk_is_closed_as_is_a_request_with_something_behind_it_and_others_go_on(
    owner: ShmArena, junk: bytes
) -> None:
    reach = await owner.offer(WRITER)
    peer = connected(reach)
    peer.send(junk or handover.REQUEST.pack(handover.MAGIC, WRITER, reach.token) + b"!")
    assert await read_all(peer) == b""
    peer.close()
    os.close(await receive(reach, WRITER, seconds=60))


async def test_the_connection_of_a_hand_over_becomes_the_line_of_its_session(
    arena: ArenaMemory, directory: Path
) -> None:
    kept: list[tuple[int, socket.socket]] = []
    theirs: list[tuple[int, socket.socket]] = []
    owner = ShmArena(arena, directory=directory, keep_line=lambda *line: kept.append(line))
    os.close(await receive(await owner.offer(WRITER), WRITER, seconds=60, keep_line=lambda *line: theirs.append(line)))
    (session, line), *_ = theirs
    assert session == WRITER
    assert not line.get_inheritable()
    for part in (OPENING[:2], OPENING[2:] + b"what follows"):
        line.sendall(part)
        await asyncio.sleep(0.01)
    await until(lambda: kept)
    assert kept[0][0] == WRITER
    assert kept[0][1].recv(100) == b"what follows", "not a byte of it is read here"
    line.close()
    kept[0][1].close()
    await owner.close()


async def test_a_line_that_the_writer_cannot_keep_leaves_no_descriptor_and_no_lock(
    arena: ArenaMemory, directory: Path
) -> None:
    def keep_line(session: int, _: socket.socket) -> None:
        raise RuntimeError(f"no line for {session}")

    before = open_files()
    owner = ShmArena(arena, directory=directory, keep_line=lambda *_: None)
    reach = await owner.offer(WRITER)
    with pytest.raises(RuntimeError, match="no line for 7"):
        await receive(reach, WRITER, seconds=60, keep_line=keep_line)
    assert owner.quiet(WRITER), "the lock went with the descriptor"
    await owner.close()
    assert open_files() == before


async def test_a_line_that_the_owner_cannot_keep_is_closed(arena: ArenaMemory, directory: Path) -> None:
    kept, faults = list[socket.socket](), list[object]()

    def keep_line(_: int, line: socket.socket) -> None:
        kept.append(line)  # so that no garbage collection closes it
        raise RuntimeError("no line")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context.get("exception")))
    owner = ShmArena(arena, directory=directory, keep_line=keep_line)
    peer, _ = await asked(owner, await owner.offer(WRITER))
    await handover.readable(peer)
    peer.send(OPENING)
    assert len(await read_all(peer)) == 16, "the reply, and the end"
    assert [str(fault) for fault in faults] == ["no line"]
    assert kept[0].fileno() < 0
    peer.close()
    await owner.close()


async def test_a_hand_over_ends_although_a_forked_child_has_its_descriptors(owner: ShmArena) -> None:
    wrong = msgspec.structs.replace(await owner.offer(WRITER), token=bytes(32))
    before = open_files()
    waiting, peer = connected(wrong), connected(wrong)
    await until(lambda: open_files() == before + 4)  # both are accepted
    with forked_descriptors():
        waiting.sendall(bytes(48))
        async with asyncio.timeout(10):
            assert (await read_all(waiting)) == b"", "the refusal"
        late = connected(wrong)  # it is not accepted before the listener ends
        await owner.close()
        async with asyncio.timeout(10):
            assert (await read_all(peer)) == (await read_all(late)) == b""
        with pytest.raises(OSError, match=r"refused|No such file"):
            connected(wrong)
    for each in (peer, waiting, late):
        each.close()


@pytest.mark.parametrize("shown", [b"pdt-lime", b"GET / HTTP/1.1"])
async def test_whoever_opens_no_line_behind_the_hand_over_is_closed(
    arena: ArenaMemory, directory: Path, shown: bytes
) -> None:
    kept: list[int] = []
    owner = ShmArena(arena, directory=directory, keep_line=lambda session, _: kept.append(session))
    before = open_files()
    reach = await owner.offer(WRITER)
    peer, _ = await asked(owner, reach)
    await handover.readable(peer)
    peer.send(shown)
    assert len(await read_all(peer)) == 16, "the reply, and the end"
    peer.close()
    assert kept == []
    assert open_files() == before
    await owner.close()


async def test_a_writer_that_shows_no_token_gets_no_line(arena: ArenaMemory, directory: Path) -> None:
    kept: list[int] = []
    owner = ShmArena(arena, directory=directory, keep_line=lambda session, _: kept.append(session))
    reach = msgspec.structs.replace(await owner.offer(WRITER), token=bytes(32))
    peer, _ = await asked(owner, reach)
    with suppress(OSError):
        peer.send(OPENING)
    assert await read_all(peer) == b""
    peer.close()
    assert kept == []
    await owner.close()


async def test_a_flood_of_silent_connections_keeps_no_writer_out(arena: ArenaMemory, directory: Path) -> None:
    before = open_files()
    owner = ShmArena(arena, directory=directory)
    reach = await owner.offer(WRITER)
    crowd: list[socket.socket] = []
    for _ in range(10):
        crowd += [connected(reach) for _ in range(30)]
        await asyncio.sleep(0.01)
    await until(lambda: len(owner.listener._connections) == 64)
    os.close(await receive(reach, WRITER, seconds=60))
    await owner.close()
    for peer in crowd:
        peer.close()
    assert open_files() == before


async def test_a_listener_without_descriptors_logs_it_and_recovers(
    owner: ShmArena, arena: ArenaMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reach = await owner.offer(WRITER)
    reopen, failures = arena.reopen, iter([True])

    def none_left(self: ArenaMemory) -> int:
        if next(failures, False):
            raise OSError(24, "Too many open files")
        return reopen()

    monkeypatch.setattr(ArenaMemory, "reopen", none_left)
    with pytest.raises(TransportError, match="the arena's owner has no descriptor left"):
        await receive(reach, WRITER, seconds=60)
    assert f"for the writer of session {WRITER:#x}: Too many open files" in caplog.text
    os.close(await receive(reach, WRITER, seconds=60))


async def test_a_writer_follows_what_the_arenas_owner_backs_and_backs_nothing_for_it(
    owner: ShmArena, writer: ShmWriter, arena: ArenaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = arena.byte_count // 2 // 4_096 * 4_096
    monkeypatch.setattr(mappings, "UNBACKED_BYTES_MAX", 0)
    arena.mapping.prefault(end=half)
    progress: list[int] = []
    reach = await owner.offer(WRITER)
    assert await writer.map(to_map(WRITER, reach, ()), progress.append) == half
    held = open_files()
    assert os.fstat(arena.fd).st_blocks * 512 == half
    arena.mapping.prefault(first=half, end=half + 4_096)
    await until(lambda: progress == [half + 4_096])
    arena.mapping.prefault(first=half + 8_192)  # all but one page: what is behind a hole is not ready
    await asyncio.sleep(3 * shm_writer._FOLLOW_SECONDS)
    assert progress == [half + 4_096]
    arena.mapping.prefault()
    await until(lambda: progress == [half + 4_096, arena.byte_count])
    await until(lambda: open_files() < held)  # the mapping alone keeps the lock
    owner.revoke(WRITER)
    assert not owner.quiet(WRITER)
    writer.unmap(WRITER)
    await until(lambda: owner.quiet(WRITER))


async def test_all_that_is_backed_of_an_arena_is_ready_before_a_writer_has_entered_it(
    owner: ShmArena, writer: ShmWriter, arena: ArenaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings, "UNBACKED_BYTES_MAX", 0)
    monkeypatch.setattr(entering, "STEP_BYTES", 4_096)
    arena.mapping.prefault()
    progress = list[int]()
    enter, entered, go_on = Mapping.prefault, list[int](), threading.Event()

    def slow(mapping: Mapping, *, first: int, end: int) -> bool:
        entered.append(end - first)
        assert first == 0 or go_on.wait(60)
        return enter(mapping, first=first, end=end)

    monkeypatch.setattr(Mapping, "prefault", slow)
    assert await writer.map(to_map(WRITER, await owner.offer(WRITER), ()), progress.append) == arena.byte_count
    await until(lambda: len(entered) == 2)
    assert entered == [4_096, 4_096], "a step at a time"
    monkeypatch.setattr(entering, "STEP_BYTES", arena.byte_count)
    go_on.set()
    await until(lambda: sum(entered) == arena.byte_count)
    assert progress == [], "there is nothing to add"


async def test_a_session_that_ends_before_its_arena_is_ready_leaves_no_lock_and_no_descriptor(
    owner: ShmArena, writer: ShmWriter, arena: ArenaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings, "UNBACKED_BYTES_MAX", 0)
    arena.mapping.prefault(end=4_096)
    assert await writer.map(to_map(WRITER, await owner.offer(WRITER), ())) == 4_096
    held = open_files()
    writer.unmap(WRITER)
    await until(lambda: owner.quiet(WRITER) and open_files() < held)


async def test_who_has_no_descriptors_offers_all_the_same_and_fails_to_map_with_the_reason(
    owner: ShmArena, writer: ShmWriter, arena: ArenaMemory
) -> None:
    with no_descriptors():
        reach = await owner.offer(WRITER)
        with pytest.raises(TransportError, match="Too many open files"):
            await writer.map(to_map(WRITER, reach, ()))
    assert await writer.map(to_map(WRITER, reach, ())) == arena.byte_count  # the token is as good as before


async def test_a_writer_that_runs_out_of_descriptors_at_the_last_moment_learns_that_they_are_its_own(
    owner: ShmArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, readable = ExitStack(), handover.readable

    async def and_then_none(peer: socket.socket) -> None:
        await readable(peer)
        limits.enter_context(no_descriptors())

    monkeypatch.setattr(handover, "readable", and_then_none)
    with limits, pytest.raises(TransportError, match="this process has no descriptor left"):
        await receive(await owner.offer(WRITER), WRITER, seconds=60)


async def test_a_listener_that_cannot_accept_logs_it_once_and_accepts_later(
    owner: ShmArena, arena: ArenaMemory, caplog: pytest.LogCaptureFixture
) -> None:
    reach = await owner.offer(WRITER)
    peer = connected(reach)  # nothing has run since that could accept it
    with no_descriptors():
        await until(lambda: caplog.records)
        await asyncio.sleep(0.25)  # it has tried again
    assert [each.getMessage() for each in caplog.records] == ["writers wait for the arena: Too many open files"]
    peer.close()
    os.close(await receive(reach, WRITER, seconds=60))


async def test_other_users_get_no_arena_and_no_token(owner: ShmArena, monkeypatch: pytest.MonkeyPatch) -> None:
    reach = await owner.offer(WRITER)
    monkeypatch.setattr(handover, "admitted", lambda: {os.geteuid() + 1})
    with pytest.raises(TransportError, match=rf"belongs to user {os.geteuid()}, not to one of \[{os.geteuid() + 1}\]"):
        await receive(reach, WRITER, seconds=5)
    peer = connected(reach)
    with suppress(OSError):  # it may be refused already
        peer.sendall(handover.REQUEST.pack(handover.MAGIC, WRITER, reach.token))
    assert await read_all(peer) == b""
    peer.close()
    assert sessions_of(owner)[WRITER].token, "it is still good"


async def test_what_cannot_be_reached_is_named(owner: ShmArena, directory: Path) -> None:
    reach = await owner.offer(WRITER)
    boot, _, _ = reach.host.partition(" ")
    wrong = {
        f"another host: its boot id is 'elsewhere', here it is '{boot}'": {"host": "elsewhere net:[1]"},
        r"network namespace 'net:\[1\]'": {"host": f"{boot} net:[1]", "address": f"@pdtransfer-{0:016x}"},
        "No such file or directory; containers must share": {"address": str(directory / f"arena-{0:016x}")},
        "longer than 107 bytes": {"address": "/" + "x" * 107 + f"/arena-{0:016x}"},
        "token: 3 bytes, not 32": {"token": b"abc"},
    }
    for text, fields in wrong.items():
        with pytest.raises(TransportError, match=text):
            await receive(msgspec.structs.replace(reach, **fields), WRITER, seconds=60)


@pytest.mark.parametrize(
    "address",
    [
        "relative", "", "@", "@nobody", "@/run/docker.sock", "/run/docker.sock", "/arena-0123456789abcde",
        "/tmp/../run/docker.sock", "/tmp/arena-0123456789ABCDEF", "/tmp/arena-0123456789abcdef/", "//run/x",
        "/tmp/arena-0123456789abcdef\n", "/a\0/arena-0123456789abcdef", "@pdtransfer-0123456789abcdef\0",
        "/proc/self/fd/3", "@/org/freedesktop/systemd1/notify",
    ],
)  # fmt: skip
async def test_a_writer_knocks_at_no_door_that_is_not_an_arenas(
    owner: ShmArena, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    knocked: list[str] = []

    async def connect(_: object, address: str) -> None:
        knocked.append(address)

    monkeypatch.setattr(handover, "_connect", connect)
    reach = msgspec.structs.replace(await owner.offer(WRITER), address=address)
    with pytest.raises(TransportError, match=r"must be /\.\.\./arena-NUMBER or @pdtransfer-NUMBER, in hex"):
        await receive(reach, WRITER, seconds=60)
    assert knocked == []


@pytest.mark.parametrize("kind", ["link", "fifo", "file", "directory"])
async def test_a_writer_is_not_led_by_a_name_to_what_is_no_arenas_socket(directory: Path, kind: str) -> None:
    os.mkdir(directory, 0o700)
    path = directory / f"arena-{0:016x}"
    with socket.socket(socket.AF_UNIX) as other:  # some other daemon of this user
        other.bind(str(directory / "other"))
        other.listen(1)
        other.setblocking(False)
        match kind:
            case "link":
                path.symlink_to(directory / "other")
            case "fifo":
                os.mkfifo(path)
            case "file":
                path.touch()
            case _:
                path.mkdir()
        reach = Reach("shm", handover.host(), str(path), b"FLUSHALL\r\n".ljust(32), 0, 4_096)
        before = open_files()
        with pytest.raises(TransportError, match="is not a socket"):
            await receive(reach, WRITER, seconds=60)
        assert open_files() == before
        with pytest.raises(BlockingIOError):
            other.accept()


@pytest.mark.parametrize("whole", [True, False])
async def test_a_writer_that_locks_bytes_of_others_keeps_them_out_and_breaks_nothing(
    owner: ShmArena, whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hostile = await receive(await owner.offer(1), 1, seconds=60)
    # Its own byte is 0; the next writer's will be 1.
    asked = shm_arena.FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 1, 0 if whole else 1, 0)
    fcntl.fcntl(hostile, shm_arena.F_OFD_SETLK, asked)
    before, reach = open_files(), await owner.offer(WRITER)
    with pytest.raises(TransportError, match="refused the token"):
        await receive(reach, WRITER, seconds=60)
    assert open_files() == before
    assert "locks that are not its own" in caplog.text
    if whole:
        os.close(hostile)
    os.close(await receive(reach, WRITER, seconds=60))  # the token was not used up
    if not whole:
        os.close(hostile)
    assert owner.quiet(1)


async def test_an_owner_that_never_answers_costs_a_bounded_time(directory: Path, arena: ArenaMemory) -> None:
    os.mkdir(directory, 0o700)
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(directory / f"arena-{0:016x}"))
        frozen.listen(1)
        reach = Reach("shm", handover.host(), str(directory / f"arena-{0:016x}"), bytes(32), 0, 4_096)
        crowd = [asyncio.create_task(receive(reach, n, seconds=0.2)) for n in range(6)]  # its backlog is full, too
        for each in crowd:
            with pytest.raises(TransportError, match=r"no answer within 0\.2 s"):
                await each


async def test_a_directory_that_others_may_enter_is_refused(arena: ArenaMemory, directory: Path) -> None:
    os.mkdir(directory)
    for mode, shown in ((0o755, "drwxr-xr-x"), (0o710, "drwx--x---"), (0o720, "drwx-w----"), (0o701, "drwx-----x")):
        os.chmod(directory, mode)
        with pytest.raises(TransportError, match=rf"{shown}.*must be drwx------"):
            ShmArena(arena, directory=directory)
    os.chmod(directory, 0o700)
    await ShmArena(arena, directory=directory).close()


async def test_sockets_of_the_dead_are_swept_and_those_of_the_living_are_not(
    owner: ShmArena, arena: ArenaMemory, directory: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "arena-0123456789abcdef"))
    other = ShmArena(arena, directory=directory)
    assert sorted(os.listdir(directory)) == sorted([Path((await o.offer(1)).address).name for o in (owner, other)])
    os.close(await receive(await owner.offer(2), 2, seconds=60))
    await other.close()


# What a writer takes


async def offering(directory: Path, reply: bytes, fds: list[int]) -> tuple[Reach, asyncio.Server]:
    """An owner that answers whatever it is shown with `reply` and descriptors."""
    os.mkdir(directory, 0o700)
    path = str(directory / f"arena-{0xBAD:016x}")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(48)
        sock = writer.get_extra_info("socket")
        raw = socket.socket(fileno=os.dup(sock.fileno()))
        socket.send_fds(raw, [reply], fds) if fds else raw.send(reply)
        raw.close()
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    return Reach("shm", handover.host(), path, bytes(32), 0, 1 << 20), server


def reply_of(byte_count: int) -> bytes:
    return handover.REPLY.pack(handover.MAGIC, byte_count)


def plain_memfd(byte_count: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, byte_count)
    return fd


@pytest.mark.parametrize(
    ("reply", "files", "text"),
    [
        (reply_of(1 << 20), [1 << 20], "without SEAL"),
        (reply_of(1 << 20), [1 << 19], f"{1 << 19} bytes were received, {1 << 20} were announced"),
        (reply_of(1 << 19), [1 << 20], "an answer of"),
        (reply_of(1 << 20), [], "with 0 descriptors"),
        (reply_of(1 << 20), [1 << 20] * 2, "with 2 descriptors"),
        (reply_of(1 << 20), [1 << 20] * 9, "an answer of"),
        (b"HTTP/1.1 400 Bad", [], "an answer of"),
        (b"x", [1 << 20], "an answer of 1 bytes"),
    ],
)
async def test_what_is_not_a_sealed_arena_is_refused_and_closed(
    directory: Path, reply: bytes, files: list[int], text: str
) -> None:
    fds = [plain_memfd(size) for size in files]
    reach, server = await offering(directory, reply, fds)
    pool = Pool()
    writer = ShmWriter((pool.component,), WriterOptions(pool_address=pool.address), ignore_end)
    before = open_files()
    with pytest.raises(TransportError, match=text):
        await writer.map(to_map(WRITER, reach, ()))
    await until(lambda: open_files() <= before)
    await writer.close()
    server.close()
    for fd in fds:
        os.close(fd)


async def test_writes_large_and_small_land_where_they_belong_and_nowhere_else(
    unmapped: Pair, arena: ArenaMemory
) -> None:
    assert await unmapped.map() == arena.byte_count
    rng = np.random.default_rng(2)
    source, target = rng.permutation(SLOTS), rng.permutation(SLOTS)
    cuts = np.sort(rng.choice(np.arange(1, 8_000), 60, replace=False))  # rooms of 1 to some 1,000 rows; 192 stay free
    rooms = list(zip(np.split(source[:8_000], cuts), np.split(target[:8_000], cuts), strict=True))
    for grant, (ours, theirs) in enumerate(rooms, 1):
        for layers in ((0, 1), (1, LAYERS)):
            unmapped.want(unmapped.write(ours, theirs, grant=grant, layers=layers))
    assert not unmapped.ended, "no end is reported from within write"
    await until(lambda: len(unmapped.ended) == unmapped.writes)
    assert sorted(number for number, _, _ in unmapped.ended) == list(range(1, unmapped.writes + 1))
    assert {outcome for _, outcome, _ in unmapped.ended} == {Outcome.LANDED}
    assert unmapped.right


async def test_pages_become_slots(both: Pair) -> None:
    source = expand_pages([9, 3, 127], PAGE, 2 * PAGE + 5)
    both.want(both.write(source, np.arange(100, 100 + len(source)), grant=1))
    await until(lambda: bool(both.ended))
    assert both.right


async def test_a_cancelled_write_fails_and_is_still(
    both: Pair, arena: ArenaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go = stall_copies(monkeypatch)
    every = np.arange(SLOTS)
    both.write(every, every, grant=1)
    await until(held.is_set)
    both.writer.cancel(WRITER, 2)  # another grant
    both.writer.cancel(WRITER, 1)
    go.set()
    await until(lambda: bool(both.ended))
    assert both.ended == [(1, Outcome.FAILED, "cancelled")]
    frozen = arena.mapping.array.copy()
    await asyncio.sleep(0.05)
    assert np.array_equal(arena.mapping.array, frozen)
    assert not frozen[-ROW:].any(), "it stopped before its end"


def stall_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """From now on a copy says that it was begun, and waits until it may go on."""
    held, go, copy = threading.Event(), threading.Event(), kernels.copy

    def stalled(*args: object, **kwargs: object) -> bool:
        held.set()
        assert go.wait(60)
        return copy(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "copy", stalled)
    return held, go


async def test_a_session_is_unmapped_only_when_its_writes_have_ended(
    both: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go = stall_copies(monkeypatch)
    every = np.arange(SLOTS)
    both.want(both.write(every, every, grant=1))
    await until(held.is_set)
    both.writer.unmap(WRITER)
    both.writer.unmap(WRITER)
    both.owner.revoke(WRITER)
    both.write(every[:1], every[:1], grant=2)
    await until(lambda: bool(both.ended))
    assert both.ended == [(2, Outcome.FAILED, f"session {WRITER:#x} is not mapped")]
    assert not both.owner.quiet(WRITER)
    go.set()
    await until(lambda: both.owner.quiet(WRITER))
    assert both.ended[1:] == [(1, Outcome.LANDED, "")]
    assert both.right


async def test_close_waits_for_what_is_in_flight(
    arena: ArenaMemory, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()
    both = Pair(arena, directory)
    await both.map()
    held, go = stall_copies(monkeypatch)
    every = np.arange(SLOTS)
    both.want(both.write(every, every, grant=1))
    await until(held.is_set)
    closing = asyncio.create_task(both.close())
    await asyncio.sleep(0.02)
    assert not closing.done()
    go.set()
    await closing
    assert both.ended == [(1, Outcome.LANDED, "")]
    assert both.right
    assert both.owner.quiet(WRITER)
    assert open_files() == before
    assert not [each for each in threading.enumerate() if each.name.startswith("pdtransfer")]


async def test_a_layout_beyond_the_arena_is_a_breach_and_leaves_no_lock(unmapped: Pair, arena: ArenaMemory) -> None:
    beyond = component(page_first(slots=SLOTS + 1))
    with pytest.raises(RemoteProtocolError, match=f"ends at byte {beyond.layout.end}, of {arena.byte_count}"):
        await unmapped.writer.map(to_map(WRITER, await unmapped.owner.offer(WRITER), (beyond,)))
    assert unmapped.owner.quiet(WRITER)


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (component(page_first(), "other"), "component 'other': this pool holds latent"),
        (component(page_first(), tokens_per_row=4), r"component 'latent'\.tokens_per_row: 4 there, 1 here"),
        (component(page_first(), span=Span("last", 9)), r"component 'latent'\.span"),
        (component(page_first(first_layer=1)), "layers: source 0..3, target 1..4"),
    ],
)
async def test_another_model_is_refused_field_by_field(unmapped: Pair, theirs: Component, text: str) -> None:
    with pytest.raises(LayoutMismatchError, match=text):
        await unmapped.writer.map(to_map(WRITER, await unmapped.owner.offer(WRITER), (theirs,)))


@pytest.mark.parametrize("way", ["cancel", "unmap"])
async def test_a_map_that_nobody_wants_any_more_leaves_no_lock(
    arena: ArenaMemory, directory: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    before = open_files()
    both = Pair(arena, directory)
    held, go = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> None:
        held.set()
        assert go.wait(60)

    monkeypatch.setattr(shm_writer.Mapping, "prefault", slow)
    mapping = asyncio.create_task(both.map())
    await until(held.is_set)
    both.owner.revoke(WRITER)
    assert not both.owner.quiet(WRITER)
    if way == "cancel":
        mapping.cancel()
    else:
        both.writer.unmap(WRITER)
    await asyncio.sleep(0)
    go.set()
    with pytest.raises((TransportError, asyncio.CancelledError)):
        await mapping
    await both.writer.close()
    assert both.owner.quiet(WRITER)
    await both.close()
    assert open_files() == before


@pytest.mark.parametrize("count", [1, 4_000])
async def test_a_slot_outside_its_side_fails_that_write_alone(both: Pair, count: int) -> None:
    inside, outside = np.arange(count), np.arange(SLOTS - count + 1, SLOTS + 1)
    both.write(inside, outside, grant=1)
    both.want(both.write(inside, inside, grant=1))
    await until(lambda: len(both.ended) == 2)
    outcomes = {write: (outcome, text) for write, outcome, text in both.ended}
    assert outcomes[1][0] is Outcome.FAILED
    assert f"outside 0..{SLOTS - 1}" in outcomes[1][1]
    assert outcomes[2][0] is Outcome.LANDED
    assert both.right


async def test_a_copy_that_raises_fails_its_write_and_not_its_thread(
    arena: ArenaMemory, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Pair(arena, directory, threads=1)
    await both.map()
    copy, failures = kernels.copy, iter([True])

    def failing(*args: object, **kwargs: object) -> bool:
        if next(failures, False):
            raise MemoryError("none left")
        return copy(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "copy", failing)
    every = np.arange(SLOTS)
    both.write(every, every, grant=1)
    both.want(both.write(every, every, grant=2))
    await until(lambda: len(both.ended) == 2)
    assert sorted(both.ended) == [(1, Outcome.FAILED, "MemoryError: none left"), (2, Outcome.LANDED, "")]
    assert both.right
    await both.close()


@pytest.mark.parametrize("entered", [True, False])
async def test_a_write_that_cannot_be_made_fails_and_holds_no_session(
    both: Pair, monkeypatch: pytest.MonkeyPatch, entered: bool
) -> None:
    """Whether its slots are entered when it is ordered, or later."""
    failures = iter([True])

    def failing(*args: Any, **kwargs: Any) -> CopyWork:
        if next(failures, False):
            raise ZeroDivisionError("a layout of no bytes")
        return copy_job(*args, **kwargs)

    monkeypatch.setattr(shm_writer, "copy_job", failing)
    monkeypatch.setattr(shm_writer._WritableArena, "awaits", lambda *_: not entered)
    row = np.arange(1)
    both.write(row, row, grant=1)
    assert not both.ended, "it is reported in a later turn"
    await until(lambda: len(both.ended) == 1)
    both.want(both.write(row, row, grant=1))
    await until(lambda: len(both.ended) == 2)
    assert both.ended == [(1, Outcome.FAILED, "ZeroDivisionError: a layout of no bytes"), (2, Outcome.LANDED, "")]
    assert both.right
    both.writer.unmap(WRITER)
    await until(lambda: both.owner.quiet(WRITER))


async def test_a_report_that_raises_costs_no_other_report(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(str(context["exception"])))

    wrote = both.writer._wrote

    def broken(order: Write, *rest: Any) -> None:
        if order.write == 2:
            raise ValueError("broken")
        wrote(order, *rest)

    monkeypatch.setattr(both.writer, "_wrote", broken)
    row = np.arange(1)
    for _ in range(3):
        both.write(row, row, grant=1)
    await until(lambda: len(both.ended) == 2)
    assert errors == ["broken"]
    both.writer.unmap(WRITER)
    await until(lambda: both.owner.quiet(WRITER))


async def test_the_loop_copies_a_bounded_share_of_small_writes_itself(
    both: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, here, inline = asyncio.get_running_loop(), threading.get_ident(), Counter[int]()
    copy, turn = kernels.copy, 0

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(next_turn)

    def seen(work: object, *args: object, **kwargs: object) -> bool:
        assert threading.get_ident() == here
        inline[turn] += work.bytes  # type: ignore[attr-defined]
        return copy(work, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "copy", seen)
    rows = np.arange(40)  # 184,320 bytes
    for at in range(100):
        both.want(both.write(rows + 40 * at, rows + 40 * at, grant=at + 1))
    assert inline == {0: 5 * 184_320}
    next_turn()
    await until(lambda: len(both.ended) == 100)
    assert max(inline.values()) == 5 * 184_320
    assert len(inline) == 20
    assert both.right


# Turns


def job_of(
    pool: Pool, target: NDArray[np.uint8], *, grant: int, rows: int, write: int = 1, lines: Lines | None = None
) -> tuple[Write, CopyWork]:
    slots = np.arange(rows)
    order = Write(
        session=WRITER, grant=grant, room=grant, write=write, component=0, layers=(0, LAYERS), source_slots=slots,
        target_slots=slots,
    )  # fmt: skip
    pairing, there = pair(pool.layout, page_first()), target.ctypes.data
    job = copy_job(order, pairing, lambda _: None, source_address=pool.address, target_address=there, lines=lines)
    return order, job


def carried(jobs: list[tuple[Write, CopyWork]], *, threads: int) -> list[tuple[int, int]]:
    """Grant and write of each job, in the order in which they end, when all are queued before any is begun."""
    ended: list[tuple[int, int]] = []

    async def carry() -> None:
        turns = Copier(threads)
        with turns._changed:  # no thread takes a turn before all jobs are there
            for order, job in jobs:
                job.report = lambda _, order=order: ended.append((order.grant, order.write))
                turns.add(job)
        await until(lambda: len(ended) == len(jobs))
        await turns.close()

    run_on_loop(carry)
    return ended


def test_a_small_grant_behind_a_large_one_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "PIECE_BYTES", 64 * LAYERS * ROW)
    pool, target = Pool(), np.zeros(SLOTS * LAYERS * ROW, np.uint8)
    large = job_of(pool, target, grant=1, rows=SLOTS)  # 128 pieces
    small = [job_of(pool, target, grant=grant, rows=100) for grant in (2, 3, 4)]
    assert carried([large, *small], threads=1) == [(2, 1), (3, 1), (4, 1), (1, 1)]


def test_within_a_grant_writes_go_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "PIECE_BYTES", 64 * LAYERS * ROW)
    pool, target = Pool(), np.zeros(SLOTS * LAYERS * ROW, np.uint8)
    jobs = [job_of(pool, target, grant=1, rows=rows, write=at) for at, rows in enumerate((1_000, 10, 500))]
    assert carried(jobs, threads=1) == [(1, 0), (1, 1), (1, 2)]


def test_threads_share_one_large_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "PIECE_BYTES", 64 * LAYERS * ROW)
    pool, target, carriers = Pool(), np.zeros(SLOTS * LAYERS * ROW, np.uint8), set[int]()
    both, copy = threading.Barrier(2), kernels.copy

    def seen(*args: object, **kwargs: object) -> bool:
        if threading.get_ident() not in carriers:
            carriers.add(threading.get_ident())
            both.wait(60)  # neither goes on before the other has a piece
        return copy(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "copy", seen)
    assert carried([job_of(pool, target, grant=1, rows=SLOTS)], threads=2) == [(1, 1)]
    assert len(carriers) == 2
    assert target.any()


def test_the_sum_of_a_write_is_that_of_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, target = Pool(), np.zeros(page_first().end, np.uint8)
    sums_of: list[int] = []
    for piece_bytes, threads in ((1 << 30, 1), (64 * LAYERS * ROW, 1), (7 * LAYERS * ROW, 2)):
        monkeypatch.setattr(copier, "PIECE_BYTES", piece_bytes)
        order, job = job_of(pool, target, grant=1, rows=500, lines=lines_of("kv", pool.layout))
        carried([(order, job)], threads=threads)
        assert job.text == ""
        sums_of.append(job.checksum)
    assert len(set(sums_of)) == 1
    assert sums_of[0]
