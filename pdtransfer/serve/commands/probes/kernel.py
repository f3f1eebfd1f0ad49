"""Probes of kernel features: each performs a daemon's system calls on a small scale."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from pathlib import Path

from ....memory.arena_memory import ArenaMemory
from ....memory.mapping import map_received
from ....probe import KERNEL, Seen, missing, ok, read, within
from ....transports.shm import arena as fence


def memfd(_root: Path) -> Seen:
    """A sealed memfd, as of an arena: it must not shrink, or a peer's mapping could end in SIGBUS."""
    arena = ArenaMemory.create(mmap.PAGESIZE, huge_pages="never")
    try:
        map_received(arena.fd, arena.byte_count).close()
        os.ftruncate(arena.fd, 0)
    except PermissionError:
        return ok("can be made and mapped, and cannot be shrunk")
    finally:
        arena.close()
    return missing("a sealed memfd could be shrunk", KERNEL)


def lock(_root: Path) -> Seen:
    """The lock of the fence: a mapping alone must keep a lock on a reopened descriptor, and free it at its end."""
    arena = ArenaMemory.create(mmap.PAGESIZE, huge_pages="never")
    try:
        again = arena.reopen()
        try:
            fence.lock(again, 0)
            address = _map(again)
        finally:
            os.close(again)
        kept = fence.is_locked(arena.fd, 0)
        _unmap(address)
        freed = not fence.is_locked(arena.fd, 0)
    finally:
        arena.close()
    if kept and freed:
        return ok("kept while the memory is mapped, free afterwards")
    return missing(f"kept by the mapping: {kept}, freed after it: {freed}", KERNEL)


def _map(descriptor: int) -> int:
    """Maps shared memory; unlike Python's mmap, keeps no second descriptor."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    address: int = function(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def _unmap(address: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE))


def unix_socket(_root: Path) -> Seen:
    """A descriptor sent over a Unix socket must arrive as the same file."""
    descriptor = os.memfd_create("pdtransfer-doctor", os.MFD_CLOEXEC)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with ours, theirs:
            socket.send_fds(ours, [b"x"], [descriptor])
            _, received, _, _ = socket.recv_fds(theirs, 1, 1)
        same = [os.fstat(fd).st_ino == os.fstat(descriptor).st_ino for fd in received]
        for fd in received:
            os.close(fd)
    finally:
        os.close(descriptor)
    if same == [True]:
        return ok("over a Unix socket")
    return missing("a descriptor did not arrive", KERNEL)


def boot_id(root: Path) -> Seen:
    """The boot id, by which two processes recognise that they are on one host."""
    boot = read(within(root, "/proc/sys/kernel/random/boot_id"))
    return ok(boot) if boot else missing("no boot id", "mount -t proc proc /proc")
