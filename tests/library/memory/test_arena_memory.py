"""Arenas: sealed, prefaulted, refused where memory does not suffice; received ones, mapped only when sound."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdtransfer.errors import TransportError, WorldError
from pdtransfer.kernels import registered
from pdtransfer.memory import arena_memory, available_memory
from pdtransfer.memory import mapping as mappings
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.mapping import allocate, map_received
from pdtransfer.transports.shm.entering import EnteredArena

F_ADD_SEALS, SEAL, SHRINK, GROW, WRITE, FUTURE_WRITE = 1033, 1, 2, 4, 8, 16
MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[ArenaMemory]:
    made = ArenaMemory.create(4 * MIB, huge_pages="never")
    yield made
    made.close()


def opened_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the listing's own
            continue
    return sorted(found)


def test_an_arena_cannot_change_its_size_and_can_be_written_and_locked(arena: ArenaMemory) -> None:
    for size in (arena.byte_count - mmap.PAGESIZE, arena.byte_count + mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, F_ADD_SEALS, WRITE)
    fd = arena.reopen()
    os.pwrite(fd, b"written", 100)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, arena.byte_count + 5)
    os.close(fd)
    assert bytes(arena.mapping.view[100:107]) == b"written"
    assert not os.get_inheritable(arena.fd)


def test_address_view_and_array_are_the_same_bytes(arena: ArenaMemory) -> None:
    arena.mapping.view[7:10] = b"abc"
    assert ctypes.string_at(arena.mapping.address + 7, 3) == b"abc"
    assert arena.mapping.array[7:10].tobytes() == b"abc"
    assert arena.mapping.address % mmap.PAGESIZE == 0


def test_an_arena_is_whole_pages_and_at_least_what_was_asked() -> None:
    made = ArenaMemory.create(mmap.PAGESIZE + 1, huge_pages="never")
    assert made.byte_count == 2 * mmap.PAGESIZE == os.fstat(made.fd).st_size
    made.close()


@pytest.mark.parametrize("kernel", ["this one", "older than 5.14"])
def test_prefault_backs_every_byte_and_keeps_what_is_there(
    arena: ArenaMemory, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    monkeypatch.setattr(mappings, "CHUNK_BYTES", MIB)
    if kernel != "this one":
        monkeypatch.setattr(mappings, "_MADV_POPULATE_WRITE", 9_999)  # EINVAL
    arena.mapping.view[5] = 77
    ready: list[int] = []
    assert arena.prefault(ready.append)
    assert ready == [MIB, 2 * MIB, 3 * MIB, 4 * MIB]
    assert arena.bytes_ready == arena.byte_count
    assert os.fstat(arena.fd).st_blocks * 512 >= arena.byte_count
    assert arena.mapping.view[5] == 77
    assert not np.flatnonzero(arena.mapping.array)[1:].size


def test_prefault_stops_when_asked(arena: ArenaMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "CHUNK_BYTES", MIB)
    assert not arena.prefault(stop=lambda: arena.bytes_ready >= 2 * MIB)
    assert arena.bytes_ready == 2 * MIB


def test_an_arena_beyond_the_hosts_memory_is_refused_with_both_values() -> None:
    left = available_memory.available_memory()
    with pytest.raises(WorldError, match=rf"{left.bytes * 2} bytes.*is \d+ bytes"):
        ArenaMemory.create(left.bytes * 2, huge_pages="never")
    with pytest.raises(WorldError, match=rf"{left.bytes * 2} bytes.*is \d+ bytes"):
        allocate(left.bytes * 2)


def test_a_staging_buffer_that_no_writer_needs_takes_no_memory_until_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    left = available_memory.available_memory().bytes
    made = ArenaMemory.create(MIB + 1, staging_bytes=2 * left)
    assert made.prefault()
    assert made.bytes_ready == made.needed == MIB + mmap.PAGESIZE
    assert os.fstat(made.fd).st_blocks * 512 < 4 * MIB  # huge pages may be larger than what was asked for
    none = ArenaMemory.create(0, huge_pages="never", staging_bytes=4 * MIB)
    none.prefault()
    assert os.fstat(none.fd).st_blocks * 512 == mmap.PAGESIZE, "a writer maps no arena of which nothing is backed"
    none.need_all()
    assert none.prefault()
    assert os.fstat(none.fd).st_blocks * 512 == none.bytes_ready == 4 * MIB
    none.close()
    made.need_all()
    monkeypatch.setattr(arena_memory, "available_memory", lambda: available_memory.AvailableMemory("a cgroup", MIB))
    with pytest.raises(WorldError, match=rf"bytes are to be backed, a cgroup is {MIB} bytes"):
        made.prefault()
    made.close()


def test_memory_that_runs_out_on_the_way_ends_the_prefault(arena: ArenaMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "CHUNK_BYTES", MIB)
    figures = iter([100 * MIB, 3 * MIB, 2 * MIB - 1])  # as much as is needed, then a byte less
    left = (available_memory.AvailableMemory("a cgroup", each) for each in figures)
    monkeypatch.setattr(arena_memory, "available_memory", lambda: next(left))
    with pytest.raises(WorldError, match=f"{2 * MIB} bytes.*a cgroup is {2 * MIB - 1} bytes"):
        arena.prefault()
    assert arena.bytes_ready == 2 * MIB


def test_a_chunk_that_the_kernel_cannot_back_is_an_error_and_no_signal(
    arena: ArenaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        @staticmethod
        def madvise(*_: int) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr(mappings, "_libc", Libc)
    with pytest.raises(WorldError, match=f"of {4 * MIB}: Cannot allocate memory; .*: \\d+ bytes"):
        arena.prefault()


def cgroup_v2(root: Path) -> str:
    for name, limit, usage in (("pod", 1_000 * MIB, 900 * MIB), ("pod/box", 400 * MIB, 350 * MIB)):
        (root / name).mkdir()
        (root / name / "memory.max").write_text(f"{limit}\n")
        (root / name / "memory.current").write_text(f"{usage}\n")
        (root / name / "memory.stat").write_text(f"anon 1\ninactive_file {20 * MIB}\n")
    return "0::/pod/box\n"


def cgroup_v1(root: Path) -> str:
    for name, limit in (("", (1 << 63) - 4096), ("box", 400 * MIB)):
        directory = root / "memory" / name
        directory.mkdir(exist_ok=True)
        (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (directory / "memory.usage_in_bytes").write_text(f"{350 * MIB}\n")
        (directory / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {20 * MIB}\n")
    return "5:devices:/\n4:cpu,memory:/box\n"


def cgroup_v2_seen_from_inside(root: Path) -> str:
    (root / "memory.max").write_text(f"{400 * MIB}\n")
    (root / "memory.current").write_text(f"{330 * MIB}\n")
    (root / "memory.stat").write_text("anon 1\n")
    return "0::/not/visible/here\n"


@pytest.mark.parametrize("world", [cgroup_v2, cgroup_v1, cgroup_v2_seen_from_inside])
def test_the_tightest_cgroup_limits_an_arena(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Callable[[Path], str]
) -> None:
    (tmp_path / "memory").mkdir()
    own = tmp_path / "own"
    own.write_text(world(tmp_path))
    monkeypatch.setattr(available_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(available_memory, "_OWN_CGROUPS", own)
    assert available_memory.available_memory().bytes == 70 * MIB
    with pytest.raises(WorldError, match=rf"{80 * MIB} bytes: memory\S+ of cgroup {tmp_path}\S* is {70 * MIB} bytes"):
        ArenaMemory.create(80 * MIB, huge_pages="never")


def test_huge_pages_that_are_missing_are_named_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_memory, "huge_pages_free", lambda: 3)
    with pytest.raises(WorldError, match=r"4 pages of 2 MiB, 3 are free; sysctl vm.nr_hugepages=4"):
        ArenaMemory.create(7 * MIB, huge_pages="always")
    auto = ArenaMemory.create(7 * MIB, huge_pages="auto")
    assert not auto.huge
    auto.close()


def test_pages_that_others_have_reserved_are_not_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(available_memory, "_HUGE_PAGES", tmp_path)
    assert available_memory.huge_pages_free() == 0, "a kernel without them"
    for name, count in (("free_hugepages", 5), ("resv_hugepages", 2)):
        (tmp_path / name).write_text(f"{count}\n")
    assert available_memory.huge_pages_free() == 3


@pytest.mark.parametrize(("huge_pages", "staging_bytes", "asked"), [("never", 0, 0), ("auto", 0, 1), ("auto", MIB, 1)])
def test_huge_pages_are_asked_for_where_they_may_be(
    monkeypatch: pytest.MonkeyPatch, huge_pages: Any, staging_bytes: int, asked: int
) -> None:
    advised: list[object] = []
    monkeypatch.setattr(arena_memory, "advise_huge", advised.append)
    monkeypatch.setattr(arena_memory, "huge_pages_free", lambda: 0 if not staging_bytes else 100)
    made = ArenaMemory.create(MIB, huge_pages=huge_pages, staging_bytes=staging_bytes)
    assert (len(advised), made.huge) == (asked, False)
    made.close()


def test_huge_pages_that_somebody_else_took_first_fall_back_when_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    if available_memory.huge_pages_free():
        pytest.skip("this host has huge pages")
    monkeypatch.setattr(arena_memory, "huge_pages_free", lambda: 100)
    auto = ArenaMemory.create(7 * MIB, huge_pages="auto")
    assert not auto.huge
    auto.close()
    with pytest.raises(WorldError, match=f"{8 * MIB} bytes"):
        ArenaMemory.create(7 * MIB, huge_pages="always")


def test_huge_pages_back_an_arena_where_there_are_some() -> None:
    if available_memory.huge_pages_free() < 4:
        pytest.skip("no huge pages are set aside")
    made = ArenaMemory.create(7 * MIB, huge_pages="always")
    assert made.huge
    assert made.byte_count == 8 * MIB
    assert made.prefault()
    made.close()


def test_close_gives_back_memory_and_descriptors() -> None:
    before = opened_files()
    made = ArenaMemory.create(MIB, huge_pages="never")
    received = map_received(made.fd, MIB)
    fd = made.reopen()
    os.close(fd)
    for each in (made, received, made, received):
        each.close()
    assert opened_files() == before


class Registered(list[tuple[int, int]]):
    """A GPU's registered ranges."""

    refuses = False

    def host_register(self, address: int, byte_count: int) -> int:
        self.append((address, byte_count))
        return address

    def host_unregister(self, address: int) -> None:
        if self.refuses:
            raise WorldError("refused")
        self[:] = [(start, size) for start, size in self if start != address]


def test_a_gpu_reaches_what_is_ready_and_nothing_once_it_is_closed(
    arena: ArenaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings, "CHUNK_BYTES", MIB)
    monkeypatch.setattr(registered, "CHUNK_BYTES", 2 * MIB)
    gpu, ready = Registered(), list[int]()
    arena.gpu = gpu
    assert arena.prefault(ready.append)
    assert ready == [2 * MIB, 4 * MIB]
    assert gpu == [(arena.mapping.address + first, 2 * MIB) for first in (0, 2 * MIB)]
    gpu.refuses = True
    with pytest.raises(WorldError, match="2 chunks of host memory stay registered"):
        arena.close()
    arena.mapping.view[0] = 1  # and stay mapped
    gpu.refuses = False
    arena.close()
    assert gpu == []


def test_close_refuses_while_a_view_lives(arena: ArenaMemory) -> None:
    view = arena.mapping.view
    with pytest.raises(BufferError):
        arena.close()
    view.release()
    arena.close()


def memfd(byte_count: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, byte_count)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("seals", "named"),
    [
        (0, "without SEAL, SHRINK, GROW"),
        (SEAL | GROW, "without SHRINK"),
        (SEAL | SHRINK, "without GROW"),
        (SHRINK | GROW, "without SEAL"),
        (SEAL | SHRINK | GROW | WRITE, "with WRITE"),
        (SEAL | SHRINK | GROW | FUTURE_WRITE, "with FUTURE_WRITE"),
    ],
)
def test_a_received_arena_without_the_right_seals_is_refused(seals: int, named: str) -> None:
    fd = memfd(MIB, seals)
    with pytest.raises(TransportError, match=named):
        map_received(fd, MIB)
    os.close(fd)


@pytest.mark.parametrize("announced", [MIB - 4096, MIB + 4096, 0])
def test_a_received_arena_of_another_size_is_refused_with_both_values(announced: int) -> None:
    fd = memfd(MIB, SEAL | SHRINK | GROW)
    with pytest.raises(TransportError, match=f"{MIB} bytes were received, {announced} were announced"):
        map_received(fd, announced)
    os.close(fd)


def test_an_arena_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, seek = list[int](), os.lseek

    def counted(fd: int, first: int, how: int) -> int:
        looked.append(first)
        return seek(fd, first, how)

    monkeypatch.setattr(mappings, "UNBACKED_BYTES_MAX", 0)
    monkeypatch.setattr(os, "lseek", counted)
    made = ArenaMemory.create(8 * MIB, huge_pages="never")
    made.mapping.prefault(end=5 * MIB)
    backed = 0
    for _ in range(3):
        backed = mappings.backed_end(made.fd, 8 * MIB, backed)
        assert backed == 5 * MIB
    made.mapping.prefault(first=6 * MIB)
    assert mappings.backed_end(made.fd, 8 * MIB, backed) == 5 * MIB, "what is behind a hole is not ready"
    assert looked == [0, 5 * MIB], "never again for what is known to be there"
    made.mapping.prefault()
    assert mappings.backed_end(made.fd, 8 * MIB, backed) == 8 * MIB
    assert len(looked) == 2, "and for no hole where as much is backed as is needed"
    made.close()


@pytest.mark.parametrize("allowed", [0, 64 << 10])
def test_what_is_backed_behind_the_bytes_that_are_needed_is_not_backed_in_front(
    monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """Else whoever enters them would back the holes, of any size."""
    monkeypatch.setattr(mappings, "UNBACKED_BYTES_MAX", allowed)
    arena = ArenaMemory.create(8 * MIB, huge_pages="never")
    arena.mapping.prefault(first=4 * MIB)
    assert mappings.backed_end(arena.fd, 4 * MIB) == 0
    arena.mapping.prefault(end=MIB)
    assert mappings.backed_end(arena.fd, 4 * MIB) == MIB
    arena.mapping.prefault(first=MIB, end=4 * MIB - (32 << 10))
    assert mappings.backed_end(arena.fd, 4 * MIB, MIB) == (4 * MIB if allowed else 4 * MIB - (32 << 10))
    arena.close()


def test_bytes_that_are_needed_are_there_although_none_behind_them_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "UNBACKED_BYTES_MAX", 0)
    arena = ArenaMemory.create(8 * MIB, huge_pages="never")
    arena.mapping.prefault(end=4 * MIB)
    assert mappings.backed_end(arena.fd, 4 * MIB) == 4 * MIB
    arena.mapping.prefault(end=5 * MIB)
    assert mappings.backed_end(arena.fd, 4 * MIB, 4 * MIB) == 4 * MIB
    arena.close()


def test_what_an_arenas_owner_takes_back_meanwhile_is_not_backed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "UNBACKED_BYTES_MAX", 0)
    made = ArenaMemory.create(4 * MIB, huge_pages="never")
    made.mapping.prefault()
    entered = EnteredArena(map_received(made.fd, 4 * MIB), os.dup(made.fd), 4 * MIB, None)
    entered.enter(np.array([[0, MIB]]))
    assert entered.bytes_ready == 4 * MIB
    made.mapping._map.madvise(mmap.MADV_REMOVE, MIB, 3 * MIB)
    with pytest.raises(TransportError, match=f"below byte {3 * MIB}, its owner has backed {MIB}"):
        entered.enter(np.array([[2 * MIB, 3 * MIB]]))
    assert not entered.enter_next()
    assert os.fstat(made.fd).st_blocks * 512 == MIB
    entered.close_fd()
    made.close()


@pytest.mark.parametrize("backed", [False, True])
def test_a_received_arena_that_its_owner_has_not_backed_is_refused(
    backed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings, "UNBACKED_BYTES_MAX", MIB)
    made = ArenaMemory.create(2 * MIB, huge_pages="never")
    if backed:
        made.prefault()
        map_received(made.fd, made.byte_count).close()
    else:
        with pytest.raises(TransportError, match=f"has not backed {2 * MIB} of its {2 * MIB} bytes"):
            map_received(made.fd, made.byte_count)
    made.close()


def test_a_received_sparse_file_of_a_terabyte_costs_nothing() -> None:
    fd = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 40)
    fcntl.fcntl(fd, 1033, 7)
    with pytest.raises(TransportError, match=f"has not backed {1 << 40} of its"):
        map_received(fd, 1 << 40)
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def test_an_arena_for_which_there_are_no_addresses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, byte_count: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    fd = memfd(MIB, SEAL | SHRINK | GROW)
    monkeypatch.setattr(mappings.mmap, "mmap", full)
    with pytest.raises(TransportError, match=rf"arena: {MIB} bytes cannot be mapped \(Cannot allocate memory\)"):
        map_received(fd, MIB)
    os.close(fd)


def test_what_is_no_memfd_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    pipe, other = os.pipe()
    file = os.open(path, os.O_RDWR)
    for fd in (file, pipe):
        with pytest.raises(TransportError, match=r"not a memfd|seals"):
            map_received(fd, MIB)
    for fd in (file, pipe, other):
        os.close(fd)


def test_what_is_received_is_the_arena_itself(arena: ArenaMemory) -> None:
    received = map_received(arena.fd, arena.byte_count)
    received.view[3] = 9
    assert arena.mapping.view[3] == 9
    received.close()


def test_a_pool_is_zeroed_and_writable() -> None:
    pool = allocate(MIB)
    assert not pool.array.any()
    pool.view[:3] = b"abc"
    assert pool.array[1] == ord("b")
    pool.close()
