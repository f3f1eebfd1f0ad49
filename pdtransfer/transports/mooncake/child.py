"""What runs in an engine's own process: Mooncake's TransferEngine over one piece of shared memory, and nothing else.

Started by its path, so that nothing of the package is imported: a start costs an interpreter and the engine. It ends
when its parent does, whatever ended that. `process` is the parent's half of what is said here.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

HELLO = struct.Struct("<BB")  # READY, and of how many engines the ports come after it; or NOT_READY, and a text
PORT = struct.Struct("<H")
ORDER = struct.Struct("<BxxxIIQQ")  # kind, slot, operations, where their table lies in the ring, turn
REPLY = struct.Struct("<BxxxI")  # kind, slot; several in one packet
OPERATION = struct.Struct("<QQQ")  # offset in the ring, or behind its end in the pool; address there; bytes

READY, NOT_READY = 1, 2
PUT, CANCEL = 1, 2  # orders
DONE, CANCELLED, UNKNOWN = 1, 2, 3  # replies; after an UNKNOWN there is none

CHUNK_BYTES = 512 << 10  # of one operation: larger ones are erratic, much smaller ones cost 12 us each
WINDOW_BYTES = 8 << 20  # in flight on up to two engines: some 3 ms, and no small room waits longer for a large one
_WINDOW_BYTES_MIN = 4 << 20  # on each: what one sends between two looks, and as much again
WINDOW_OPERATIONS = 128  # on each
_POLL_S = 0.0005
_POLL_FULL_S = 0.001  # where windows are half full: a look costs as much as sending 256 KiB
_PENDING_SEEN_MAX = 16  # of those in flight, oldest first: lanes overtake each other, but not by far
_ENTER_BYTES = 64 << 20  # at a time
_ENTER_S, _ENTER_S_MAX = 0.05, 1.0  # how soon to look whether more is backed

_PR_SET_PDEATHSIG, _MADV_POPULATE_WRITE = 1, 23
_PROT_READ, _PROT_WRITE, _MAP_SHARED, _MAP_FIXED_NOREPLACE = 1, 2, 1, 0x100000


def main() -> None:
    """child.py arena|sender PARENT SOCKET PROTOCOL HOST ENGINES MEMORY BYTES BASE [SENDING...]

    SENDING is POOL POOL_BYTES TARGET_BASE TARGET...
    A sender has an engine for each target, engines of one process that have the same memory. POOL is -1 for none. Where
    not all ENGINES can be started, those do that can.
    """
    role, parent, number, protocol, host, engine_count, memory, byte_count, base, *more = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        return  # it died before we asked to be told
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the whole group: the parent decides
    pipe = socket.socket(fileno=int(number))
    try:
        address = _mapped(libc, int(memory), int(byte_count), int(base))
        engines = _engines(int(engine_count), host, protocol)
        if role == "sender":
            pool, pool_bytes, target_base, *targets = more
            lines = _lines(engines, targets, int(target_base))
            source = _Source(address, int(byte_count), _pool(libc, int(pool), int(pool_bytes)))
            serve = _Sender(lines, pipe, source).serve
        else:
            serve = partial(_enter, libc, pipe, int(memory), address, int(byte_count))
        if role == "arena" or protocol != "tcp":  # where TCP reads from, nobody else need be able to read
            for engine in engines:
                _check("register_memory", engine.register_memory(address, int(byte_count)))
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent is told)
        text = f"{type(error).__name__}: {error}" if not isinstance(error, _NotReadyError) else str(error)
        pipe.send(HELLO.pack(NOT_READY, 0) + text.encode()[:400])
        return
    ports = b"".join(PORT.pack(engine.get_rpc_port()) for engine in engines)
    pipe.send(HELLO.pack(READY, len(engines)) + ports)
    serve()
    os._exit(0)  # destroying an engine takes a second, and nobody needs it


class _NotReadyError(Exception):
    pass


def _mapped(libc: Any, fd: int, byte_count: int, base: int, access: int = _PROT_READ | _PROT_WRITE) -> int:
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    libc.mmap.restype = ctypes.c_void_p
    flags = _MAP_SHARED | (_MAP_FIXED_NOREPLACE if base else 0)
    address = libc.mmap(base, byte_count, access, flags, fd, 0)
    if address == ctypes.c_void_p(-1).value or (base and address != base):
        raise _NotReadyError(f"{byte_count} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return address


def _pool(libc: Any, fd: int, byte_count: int) -> int:
    """Where the pool's memory can be read; 0 where there is none to be read from here."""
    if fd < 0:
        return 0
    address = _mapped(libc, fd, byte_count, 0, _PROT_READ)
    os.close(fd)  # it could be written by
    return address


def _enter(libc: Any, pipe: socket.socket, fd: int, address: int, byte_count: int) -> None:
    """Enters what its owner has backed of the arena in this process's page table, lest the engine's threads do it as
    they write, at half the speed; until the parent hangs up."""
    libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    done, backed, wait = 0, 0, _ENTER_S
    while done < byte_count:
        if backed == done:  # looking takes 30 ns for each page that is there
            backed = os.lseek(fd, done, os.SEEK_HOLE)
        end = min(backed, done + _ENTER_BYTES)
        if end > done and libc.madvise(address + done, end - done, _MADV_POPULATE_WRITE):
            break  # an older kernel: page by page then
        wait = _ENTER_S if end > done else min(2 * wait, _ENTER_S_MAX)
        done = end
        if select.select((pipe,), (), (), 0 if backed > done else wait)[0]:
            return
    pipe.recv(1)  # only its end is ever read


def _engines(count: int, host: str, protocol: str) -> list[Any]:
    """As many as there are ports for, one at least."""
    engines = [_engine(host, protocol)]
    while len(engines) < count:
        try:
            engines.append(_engine(host, protocol))
        except _NotReadyError:
            break
    return engines


def _engine(host: str, protocol: str) -> Any:
    engine: Any = import_module("mooncake.engine").TransferEngine()  # it has no types, and may not be there
    _check("initialize", engine.initialize(host, "P2PHANDSHAKE", protocol, ""))
    return engine


def _check(what: str, status: int) -> None:
    if status:
        raise _NotReadyError(f"{what} answers {status}")


class _Batch:
    """The operations of one slot of the ring."""

    __slots__ = ("cancelled", "flying", "operations", "slot", "turn")

    def __init__(self, slot: int, turn: int, operations: Iterator[tuple[int, ...]]) -> None:
        self.slot, self.turn, self.operations = slot, turn, deque(operations)
        self.flying, self.cancelled = 0, False


class _Source:
    """Where operations read: offsets in the ring, and behind its end in the pool."""

    def __init__(self, address: int, byte_count: int, pool: int) -> None:
        self._address, self._byte_count, self._pool = address, byte_count, pool
        self._ring = memoryview((ctypes.c_char * byte_count).from_address(address))

    def address(self, offset: int) -> int:
        if offset < self._byte_count:
            return self._address + offset
        return self._pool + offset - self._byte_count

    def operations(self, table: int, count: int) -> Iterator[tuple[int, ...]]:
        return OPERATION.iter_unpack(self._ring[table : table + count * OPERATION.size])


class _Line:
    """One engine, and the one there that it writes through: a thread on either side, so several take more cores."""

    def __init__(self, engine: Any, target: str, window: int) -> None:
        self._engine, self._target, self._window = engine, target, window
        self._flying: deque[tuple[int, int, _Batch]] = deque()  # number, bytes
        self.byte_count = 0  # of them

    def meet(self, base: int) -> None:
        """The handshake, now: to a peer that does not answer it would hold every later write's thread."""
        found: int = self._engine.get_first_buffer_address(self._target)
        if found != base:
            raise _NotReadyError(f"no engine with this arena answers at {self._target}")

    @property
    def wait_s(self) -> float | None:
        """How soon to look again."""
        if not self._flying:
            return None
        return _POLL_S if 2 * self.byte_count < self._window else _POLL_FULL_S

    @property
    def full(self) -> bool:
        return self.byte_count >= self._window or len(self._flying) >= WINDOW_OPERATIONS

    def submit(self, batch: _Batch, source: int, there: int, byte_count: int) -> bool:
        """Whether the engine has taken it."""
        number: int = self._engine.transfer_submit_write(self._target, source, there, byte_count)
        if number <= 0:
            return False
        self._flying.append((number, byte_count, batch))
        batch.flying += 1
        self.byte_count += byte_count
        return True

    def look(self, over: Callable[[_Batch], None]) -> _Batch | None:
        """Asks how the oldest are; each that has ended is asked no more. Returns whose has failed, and asks nothing
        behind it."""
        pending: list[tuple[int, int, _Batch]] = []
        while self._flying and len(pending) < _PENDING_SEEN_MAX:
            number, byte_count, batch = each = self._flying.popleft()
            status = self._engine.transfer_check_status(number)
            if status == 0:
                pending.append(each)
                continue
            if status < 0:
                return batch
            self.byte_count -= byte_count
            batch.flying -= 1
            if not batch.flying and not batch.operations:
                over(batch)
        self._flying.extendleft(reversed(pending))
        return None


def _lines(engines: list[Any], targets: list[str], base: int) -> list[_Line]:
    """One for each target, or of the first as many as there are engines; they have shaken hands."""
    window = max(WINDOW_BYTES // len(engines), _WINDOW_BYTES_MIN)
    lines = [_Line(engine, target, window) for engine, target in zip(engines, targets, strict=False)]
    for line in lines:
        line.meet(base)
    return lines


class _Sender:
    """Submits what is ordered, in turn between grants, and says of each slot when all of it is where it should be."""

    def __init__(self, lines: list[_Line], pipe: socket.socket, source: _Source) -> None:
        self._lines, self._pipe, self._source = lines, pipe, source
        self._turns: dict[int, deque[_Batch]] = {}
        self._waiting: deque[int] = deque()  # the same, in the order of their turns
        self._replies: list[bytes] = []

    def serve(self) -> None:
        """Until the parent hangs up, or a write has failed: what that has left on its way nobody knows."""
        while True:
            timeout = min((wait for line in self._lines if (wait := line.wait_s) is not None), default=None)
            if select.select((self._pipe,), (), (), timeout)[0] and not self._hear():
                return
            known = self._look() and self._submit()
            if self._replies:
                self._pipe.send(b"".join(self._replies))
                self._replies.clear()
            if not known:
                self._pipe.recv(1)  # nothing more is sent, and whoever is to end this says when
                return

    def _hear(self) -> bool:
        while True:
            try:
                order = self._pipe.recv(ORDER.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            if not order:
                return False
            kind, slot, count, table, turn = ORDER.unpack(order)
            if kind == PUT:
                batch = _Batch(slot, turn, self._source.operations(table, count))
                if turn not in self._turns:
                    self._turns[turn] = deque()
                    self._waiting.append(turn)
                self._turns[turn].append(batch)
            else:
                self._cancel(turn)

    def _cancel(self, turn: int) -> None:
        """Submits no more of it."""
        for batch in self._turns.pop(turn, ()):
            batch.cancelled = True
            batch.operations.clear()
            if not batch.flying:
                self._over(batch)
        if turn in self._waiting:
            self._waiting.remove(turn)

    def _submit(self) -> bool:
        """As much as the windows take, a chunk's bytes of each grant in turn; False where one was refused."""
        while self._waiting and (line := self._next_line()) is not None:
            turn = self._waiting[0]
            self._waiting.rotate(-1)
            batches, left = self._turns[turn], CHUNK_BYTES
            while batches and left > 0 and not line.full:
                batch = batches[0]
                source, there, byte_count = batch.operations.popleft()
                if byte_count > CHUNK_BYTES:
                    rest = source + CHUNK_BYTES, there + CHUNK_BYTES, byte_count - CHUNK_BYTES
                    batch.operations.appendleft(rest)
                    byte_count = CHUNK_BYTES
                if not line.submit(batch, self._source.address(source), there, byte_count):
                    self._unknown(batch)
                    return False
                left -= byte_count
                if not batch.operations:
                    batches.popleft()
            if not batches:
                del self._turns[turn]
                self._waiting.remove(turn)
        return True

    def _next_line(self) -> _Line | None:
        """The one with the least in flight of those that take more: small operations fill one long before its bytes
        do."""
        return min((line for line in self._lines if not line.full), key=_bytes_of, default=None)

    def _look(self) -> bool:
        """False where a write has failed."""
        for line in self._lines:
            if (failed := line.look(self._over)) is not None:
                self._unknown(failed)
                return False
        return True

    def _unknown(self, batch: _Batch) -> None:
        self._replies.append(REPLY.pack(UNKNOWN, batch.slot))

    def _over(self, batch: _Batch) -> None:
        self._replies.append(REPLY.pack(CANCELLED if batch.cancelled else DONE, batch.slot))


def _bytes_of(line: _Line) -> int:
    return line.byte_count


if __name__ == "__main__":
    main()
