"""KV over shared memory: decode's memfd, its hand-over and fence, and prefill's mapping (memory.md)."""

import fcntl
import mmap
import os
import secrets
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.serve.stranger.peer import Fields, require

MAGIC = b"pdt-shm1"
REQUEST, REPLY = struct.Struct("<8sQ32s"), struct.Struct("<8sQ")
HAND_OVER_S = 5.0
KEPT_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
NO_SEALS = fcntl.F_SEAL_WRITE | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)
FLOCK = "hhqqi0q"  # struct flock of a 64-bit kernel: type, whence, start, length, pid


def place() -> list[str]:
    """Boot id, network namespace, mount namespace and user: what Identity.place joins by spaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/mnt"), str(os.geteuid())]


def ours(connection: socket.socket) -> bool:
    """Whether the other end is root or this user."""
    size = struct.calcsize("3i")
    user = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
    return user in (0, os.geteuid())


class Arena:
    """Decode's memory, handed to each writer with a lock of its own."""

    transport = "shm"

    def __init__(self, size: int, **hbm: int) -> None:
        self.size, self.hbm = size, hbm
        self.file = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.file, size)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, KEPT_SEALS)
        self.memory = mmap.mmap(self.file, size)
        self.tokens: dict[int, bytes] = {}  # of hand-overs that are still to come, by session
        self.locks: dict[int, int] = {}  # the byte that a session's writer has locked
        self.address = f"@pdtransfer-{secrets.token_hex(8)}"
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind("\0" + self.address[1:])
        self.socket.listen()

    def open(self, watch: Callable[[Any, Callable[[], None]], None]) -> None:
        """Hand-overs are served whenever `watch` sees one."""
        watch(self.socket, self._hand_over)

    def reach(self, session: int) -> Fields:
        """The same for each repeat of a session's Register."""
        token = self.tokens.setdefault(session, secrets.token_bytes(32))
        return {
            "transport": "shm", "host": " ".join(place()[:2]), "address": self.address, "token": token, "base": 0,
            "arena_bytes": self.size, **self.hbm,
        }  # fmt: skip

    def _hand_over(self) -> None:
        """One request, one reply: whatever is wrong ends the connection without a byte."""
        connection, _ = self.socket.accept()
        with connection:
            connection.settimeout(HAND_OVER_S)
            request = connection.recv(REQUEST.size + 1)
            if not ours(connection) or len(request) != REQUEST.size:
                return
            magic, session, token = REQUEST.unpack(request)
            if magic != MAGIC or not secrets.compare_digest(self.tokens.get(session, b""), token):
                return
            self.tokens[session] = b""  # it was used
            self.locks[session] = self.size + len(self.locks)
            file = os.open(f"/proc/self/fd/{self.file}", os.O_RDWR | os.O_CLOEXEC)  # a description of its own
            try:
                lock = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, self.locks[session], 1, 0)
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
                socket.send_fds(connection, [REPLY.pack(MAGIC, self.size)], [file])
            finally:
                os.close(file)

    def fenced(self, session: int) -> bool:
        """Whether nobody can write through this session's hand-over any more. Voids its token."""
        self.tokens[session] = b""
        if session not in self.locks:
            return True
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, self.locks[session], 1, 0)
        return struct.unpack(FLOCK, fcntl.fcntl(self.file, fcntl.F_OFD_GETLK, asked))[0] == fcntl.F_UNLCK

    def read(self, at: int, size: int) -> bytes:
        return self.memory[at : at + size]

    def close(self) -> None:
        self.socket.close()
        self.memory.close()
        os.close(self.file)


class Target:
    """A decode's arena, as prefill writes it: one mapping for one session."""

    def __init__(self, session: int, reach: Fields) -> None:
        here = " ".join(place()[:2])
        require(reach["host"] == here, f"reach.host = {reach['host']!r}: this is {here!r}")
        require(len(reach["token"]) == 32, "reach.token: of 32 bytes")
        address = reach["address"]
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(HAND_OVER_S)
            connection.connect("\0" + address[1:] if address.startswith("@") else address)
            require(ours(connection), "reach.address: another user's")
            connection.sendall(REQUEST.pack(MAGIC, session, reach["token"]))
            reply, files, _, _ = socket.recv_fds(connection, REPLY.size, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            require(len(reply) == REPLY.size and len(files) == 1, "reach.token: refused")
            require(REPLY.unpack(reply) == (MAGIC, reach["arena_bytes"]), "the reply: of another arena")
            self.memory = self._map(files[0], reach["arena_bytes"])
        finally:
            for file in files:
                os.close(file)  # the mapping keeps the lock

    def _map(self, file: int, size: int) -> mmap.mmap:
        found, seals = os.fstat(file), fcntl.fcntl(file, fcntl.F_GET_SEALS)
        require(stat.S_ISREG(found.st_mode) and found.st_size == size, "reach.arena_bytes: not the file's size")
        require(seals & KEPT_SEALS == KEPT_SEALS and not seals & NO_SEALS, "the arena: wrong seals")
        require(size <= 2**26 or found.st_blocks, "the arena: nothing of it is backed")
        return mmap.mmap(file, size)

    def write(self, at: int, content: bytes) -> None:
        self.memory[at : at + len(content)] = content

    def flush(self) -> None:
        """What is written is there."""

    def close(self) -> None:
        """Decode's fence waits for this."""
        self.memory.close()
