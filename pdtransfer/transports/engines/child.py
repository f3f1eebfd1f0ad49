"""The program of an engine's own process: the engines of one library over one piece of shared memory, and nothing else.

It is started by its path and imports nothing of the package but `turns` and the library's driver, by their paths as
well. A start costs an interpreter and the engine. It ends with its parent, whatever ended that. `process` is the
parent's half.
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol


def _loaded(name: str, path: str) -> Any:
    """The module in this file."""
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING or __package__:
    from ..turns import Turns
else:
    Turns = _loaded("turns", os.path.join(os.path.dirname(__file__), "..", "turns.py")).Turns

# READY or LISTENS and a number of ports, which follow, with READY also CARD_AT; or NOT_READY, and a text follows
HELLO = struct.Struct("<BB")
PORT = struct.Struct("<H")
ORDER = struct.Struct("<BxxxIIQQ")  # kind, slot, number of operations, offset of their table in the ring, turn
# Of a GPU's memory: its UUID, CUDA's handle, first byte there, bytes, place; see main.
CARD = struct.Struct("<16s64sQQQ")
SPAN = struct.Struct("<QQ")  # addresses: first, end
CARD_AT = struct.Struct("<Q")  # the address of a GPU's memory; 0 where it is not reached, and a text follows
CARD_PACKET_BYTES_MAX = CARD.size + 4_096 * SPAN.size
REPLY = struct.Struct("<BxxxI")  # kind, slot; a packet has several
OPERATION = struct.Struct("<QQQ")  # offset in the ring, or behind its end in the pool; target address; bytes

READY, NOT_READY, LISTENS = 1, 2, 3  # LISTENS: every port that is open, before anything is served there
PUT, CANCEL = 1, 2  # orders
GO = b"g"  # after LISTENS
DONE, CANCELLED, UNKNOWN = 1, 2, 3  # replies; UNKNOWN is the last one

CHUNK_BYTES = 512 << 10  # of one operation: the time of larger ones varies much, smaller ones cost 12 us each
WINDOW_BYTES = 8 << 20  # in flight on up to two engines: some 3 ms, and a small room waits no longer for a large one
_WINDOW_BYTES_MIN = 4 << 20  # on each: twice what one sends between two polls
WINDOW_OPERATIONS = 128  # on each
_POLL_S = 0.0005
_POLL_FULL_S = 0.001  # where windows are half full: a poll costs as much as sending 256 KiB
_PENDING_SEEN_MAX = 16  # operations that a poll finds in flight, oldest first: lanes overtake each other little
_ENTER_BYTES = 64 << 20  # at a time
_ENTER_S, _ENTER_S_MAX = 0.05, 1.0  # before it looks again whether more is backed

_PR_SET_PDEATHSIG, _MADV_POPULATE_WRITE = 1, 23
_LISTEN = "0A"  # the state, in /proc/net/tcp
_PROT_READ, _PROT_WRITE, _MAP_SHARED, _MAP_FIXED_NOREPLACE = 1, 2, 1, 0x100000


class Engine(Protocol):
    """One engine of a library: what the class `ENGINE` of its driver does. A call that has failed raises, RuntimeError
    with a text for people where the library has no better exception."""

    port: int  # that a peer dials

    def __init__(self, host: str, protocol: str, ports: tuple[int, int], *, serves: bool) -> None:
        """Starts it. It listens on `ports`, first and last, alone: all that it takes are to be open once this returns,
        so that they can be closed to strangers. Until `serve` or `meet` is called a stranger there must do no harm.
        Where it `serves` memory, it has to take what peers write by itself: only an engine that writes is called, about
        every millisecond while something is in flight."""
        ...

    def serve(self, address: int, byte_count: int) -> None:
        """Lets peers write this memory."""
        ...

    def read(self, address: int, byte_count: int) -> None:
        """Makes this memory, the ring, ready to be sent from."""
        ...

    def meet(self, target: str, base: int) -> None:
        """Shakes hands with the engine at `target`, host:port, now: with a peer that does not answer, it would block
        every later write. Raises unless memory that begins at `base` is served there."""
        ...

    def submit(self, operations: Sequence[tuple[int, int, int]]) -> Sequence[tuple[Any, int]]:
        """Starts to write to the peer that it has met: source address, target address and bytes each. Returns the
        requests that it has made of them, with the bytes of each. What was begun before it raised is unknown."""
        ...

    def landed(self, request: Any) -> bool:
        """True if all of a request is in the peer's memory; False while it is under way. A request that has landed is
        over. Raises where it has failed: then any part of it may still be written, until the peer's process is dead."""
        ...


def main() -> None:
    """child.py arena|sender PARENT SOCKET DRIVER CARD PROTOCOL HOST FIRST LAST HELD ENGINES MEMORY BYTES BASE [SENDING]

    DRIVER is the file of the library's ENGINE, whose ports are FIRST to LAST. Where HELD is 1, it reports all ports
    that its engines listen on, and waits for a packet before it goes on.
    CARD is empty, or the file of the class by which it opens a GPU's memory. The first packet from the parent names
    that memory, as CARD and SPANs: addresses where it may not lie. An arena serves it besides, by the engines that can.
    A sender has it for its pool, whose offset 0 is `place` bytes before it. Where it is not reached, all works as
    without.
    SENDING is POOL POOL_BYTES TARGET_BASE TARGET...
    A sender has one engine for each target; the targets are engines of one process that have the same memory. POOL is
    -1 for none. Where not all ENGINES can be started, it works with those that can.
    """
    role, parent, number, driver, card, protocol, host, first, last, held, *numbers = sys.argv[1:]
    engine_count, memory, byte_count, base, *more = numbers
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        return  # it died before prctl
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group: the parent decides
    pipe = socket.socket(fileno=int(number))
    try:
        address = _mapped(libc, int(memory), int(byte_count), int(base))
        reached, place, card_bytes, why = _opened(card, pipe) if card else (0, 0, 0, "")
        start = partial(
            _loaded("driver", driver).ENGINE, host, protocol, (int(first), int(last)), serves=role == "arena"
        )
        engines = _engines(int(engine_count), start)
        if held == "1" and not _let_go(pipe):
            return
        if role == "sender":
            pool, pool_bytes, target_base, *targets = more
            pool_address = reached - place if reached else _pool(libc, int(pool), int(pool_bytes))
            lines = _lines(engines, targets, int(target_base))
            for engine in engines:
                engine.read(address, int(byte_count))
            serve = _Sender(lines, pipe, _Source(address, int(byte_count), pool_address)).serve
        else:
            for engine in engines:
                engine.serve(address, int(byte_count))
            if reached:
                serving, why = _serving(engines, reached, card_bytes)
                engines, reached = serving or engines, reached if serving else 0
            serve = partial(_enter, libc, pipe, int(memory), address, int(byte_count))
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent gets it)
        text = f"{type(error).__name__}: {error}" if not isinstance(error, RuntimeError) else str(error)
        pipe.send(HELLO.pack(NOT_READY, 0) + text.encode()[:400])
        return
    ports = b"".join(PORT.pack(engine.port) for engine in engines)
    pipe.send(HELLO.pack(READY, len(engines)) + ports + CARD_AT.pack(reached) + why.encode()[:400])
    serve()
    os._exit(0)  # destroying an engine takes a second, for nothing


_kept: list[Any] = []  # as long as this process lives: what has a GPU's memory open, engines that no peer has


def _opened(path: str, pipe: socket.socket) -> tuple[int, int, int, str]:
    """Where the GPU's memory is that the parent names, its place and its bytes; 0, and why it is not reached."""
    packet = pipe.recv(CARD_PACKET_BYTES_MAX)
    uuid, handle, offset, byte_count, place = CARD.unpack_from(packet)
    spans = list(SPAN.iter_unpack(packet[CARD.size :]))
    try:
        card = _loaded("card", path).CARD(uuid)
        try:
            address = card.open(handle, offset, byte_count, spans)
        except Exception:
            card.close()
            raise
    except Exception as error:  # noqa: BLE001 (whatever it is, rows need not go to the GPU's memory, or come from it)
        return 0, place, byte_count, str(error)
    _kept.append(card)
    return address, place, byte_count, ""


def _serving(engines: list[Engine], address: int, byte_count: int) -> tuple[list[Engine], str]:
    """The engines that serve this memory of a GPU besides the arena, and why the next one does not. Then a peer learns
    of these alone: what an engine serves cannot be taken back, and all that a peer has must serve the same."""
    for index, engine in enumerate(engines):
        try:
            engine.serve(address, byte_count)
        except Exception as error:  # noqa: BLE001 (whatever the library raises)
            _kept.extend(engines)
            return engines[:index], str(error)
    return engines, ""


def _let_go(pipe: socket.socket) -> bool:
    """Reports the ports, and waits; False where the parent is gone."""
    found = _listening()
    pipe.send(HELLO.pack(LISTENS, len(found)) + b"".join(map(PORT.pack, found)))
    return bool(pipe.recv(1))


def _listening() -> list[int]:
    """Every TCP port that this process listens on."""
    own: set[str] = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # it was the listing's own
            continue
    ports: set[int] = set()
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{name}") as table:
                lines = [line.split() for line in table][1:]
        except OSError:  # a kernel without IPv6
            continue
        listening = (words for words in lines if words[3] == _LISTEN and f"socket:[{words[9]}]" in own)
        ports.update(int(words[1].rpartition(":")[2], 16) for words in listening)
    return sorted(ports)


def _mapped(libc: Any, fd: int, byte_count: int, base: int, access: int = _PROT_READ | _PROT_WRITE) -> int:
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    libc.mmap.restype = ctypes.c_void_p
    flags = _MAP_SHARED | (_MAP_FIXED_NOREPLACE if base else 0)
    address = libc.mmap(base, byte_count, access, flags, fd, 0)
    if address == ctypes.c_void_p(-1).value or (base and address != base):
        raise RuntimeError(f"{byte_count} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return address


def _pool(libc: Any, fd: int, byte_count: int) -> int:
    """The address of the pool's memory, mapped for reading; 0 for no pool."""
    if fd < 0:
        return 0
    address = _mapped(libc, fd, byte_count, 0, _PROT_READ)
    os.close(fd)  # the pool could be written through it
    return address


def _enter(libc: Any, pipe: socket.socket, fd: int, address: int, byte_count: int) -> None:
    """Enters in this process's page table what the arena's owner has backed, until the parent closes the pipe. Else the
    engine's threads would do it as they write, at half the speed."""
    libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    done, backed, wait = 0, 0, _ENTER_S
    while done < byte_count:
        if backed == done:  # a look takes 30 ns for each page that is backed
            backed = os.lseek(fd, done, os.SEEK_HOLE)
        end = min(backed, done + _ENTER_BYTES)
        if end > done and libc.madvise(address + done, end - done, _MADV_POPULATE_WRITE):
            break  # an older kernel: the engine enters page by page then
        wait = _ENTER_S if end > done else min(2 * wait, _ENTER_S_MAX)
        done = end
        if select.select((pipe,), (), (), 0 if backed > done else wait)[0]:
            return
    pipe.recv(1)  # returns when the parent closes it


def _engines(count: int, start: Callable[[], Engine]) -> list[Engine]:
    """As many engines as there are ports for, at least one."""
    engines = [start()]
    while len(engines) < count:
        try:
            engines.append(start())
        except RuntimeError:
            break
    return engines


class _SlotBatch:
    """The operations of one slot of the ring."""

    __slots__ = ("cancelled", "flying", "operations", "slot", "turn")

    def __init__(self, slot: int, turn: int, operations: Iterator[tuple[int, ...]]) -> None:
        self.slot, self.turn, self.operations = slot, turn, deque(operations)
        self.flying, self.cancelled = 0, False


class _Source:
    """What operations read: the ring, and behind its end the pool."""

    def __init__(self, address: int, byte_count: int, pool: int) -> None:
        self._address, self._byte_count, self._pool = address, byte_count, pool
        self._ring = memoryview((ctypes.c_char * byte_count).from_address(address))

    def address(self, offset: int) -> int:
        if offset < self._byte_count:
            return self._address + offset
        return self._pool + offset - self._byte_count

    def operations(self, table: int, count: int) -> Iterator[tuple[int, ...]]:
        return OPERATION.iter_unpack(self._ring[table : table + count * OPERATION.size])


class _EngineLine:
    """One engine, which has met the peer's engine that it writes through. Each has one thread, so several use more
    cores."""

    def __init__(self, engine: Engine, window: int) -> None:
        self._engine, self._window = engine, window
        self._flying: deque[tuple[Any, int, _SlotBatch]] = deque()  # request, bytes
        self.byte_count = 0  # in flight

    @property
    def wait_s(self) -> float | None:
        """The time until the next poll; None while nothing is in flight."""
        if not self._flying:
            return None
        return _POLL_S if 2 * self.byte_count < self._window else _POLL_FULL_S

    @property
    def room(self) -> int:
        """How many more operations it takes."""
        return WINDOW_OPERATIONS - len(self._flying)

    @property
    def full(self) -> bool:
        return self.byte_count >= self._window or self.room <= 0

    def submit(self, batch: _SlotBatch, operations: list[tuple[int, int, int]]) -> bool:
        """True if the engine has accepted them: source address, target address, bytes."""
        try:
            requests = self._engine.submit(operations)
        except Exception:  # noqa: BLE001 (whatever the library raises)
            return False
        for request, byte_count in requests:
            self._flying.append((request, byte_count, batch))
            batch.flying += 1
            self.byte_count += byte_count
        return True

    def poll(self, over: Callable[[_SlotBatch], None]) -> _SlotBatch | None:
        """Polls the oldest operations and drops finished ones. Returns the batch of the first that failed, and polls no
        operation behind it."""
        pending: list[tuple[Any, int, _SlotBatch]] = []
        while self._flying and len(pending) < _PENDING_SEEN_MAX:
            request, byte_count, batch = flight = self._flying.popleft()
            try:
                landed = self._engine.landed(request)
            except Exception:  # noqa: BLE001 (whatever the library raises)
                return batch
            if not landed:
                pending.append(flight)
                continue
            self.byte_count -= byte_count
            batch.flying -= 1
            if not batch.flying and not batch.operations:
                over(batch)
        self._flying.extendleft(reversed(pending))
        return None


def _lines(engines: list[Engine], targets: list[str], base: int) -> list[_EngineLine]:
    """One for each target, for the first of them where there are fewer engines. All have shaken hands."""
    for engine, target in zip(engines, targets, strict=False):
        engine.meet(target, base)
    window = max(WINDOW_BYTES // len(engines), _WINDOW_BYTES_MIN)
    return [_EngineLine(engine, window) for engine in engines[: len(targets)]]


class _Sender:
    """Submits what is ordered, in turn between grants, and replies for each slot once all of it is in place."""

    def __init__(self, lines: list[_EngineLine], pipe: socket.socket, source: _Source) -> None:
        self._lines, self._pipe, self._source = lines, pipe, source
        self._turns: Turns[_SlotBatch] = Turns()
        self._replies: list[bytes] = []

    def serve(self) -> None:
        """Until the parent closes the pipe, or a write has failed: what it has left in flight is unknown."""
        while True:
            timeout = min((wait for line in self._lines if (wait := line.wait_s) is not None), default=None)
            if select.select((self._pipe,), (), (), timeout)[0] and not self._receive():
                return
            known = self._poll() and self._submit()
            if self._replies:
                self._pipe.send(b"".join(self._replies))
                self._replies.clear()
            if not known:
                self._pipe.recv(1)  # sends nothing more, until the parent ends this process
                return

    def _receive(self) -> bool:
        """Takes the orders that have come; False once the parent has closed the pipe."""
        while True:
            try:
                order = self._pipe.recv(ORDER.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            if not order:
                return False
            kind, slot, count, table, turn = ORDER.unpack(order)
            if kind == PUT:
                batch = _SlotBatch(slot, turn, self._source.operations(table, count))
                self._turns.add(turn, batch)
            else:
                self._cancel(turn)

    def _cancel(self, turn: int) -> None:
        """Submits no more of a grant."""
        for batch in self._turns.drop(turn):
            batch.cancelled = True
            batch.operations.clear()
            if not batch.flying:
                self._over(batch)

    def _submit(self) -> bool:
        """Submits as much as the windows take, one chunk of each grant in turn; False where an engine refused one."""
        while self._turns and (line := self._next_line()) is not None:
            queue = self._turns.take()
            assert queue is not None
            batches, left = queue.items, CHUNK_BYTES
            while batches and left > 0 and not line.full:
                batch = batches[0]
                operations = self._take(batch, left, line.room)
                if not line.submit(batch, operations):
                    self._unknown(batch)
                    return False
                left -= sum(byte_count for _, _, byte_count in operations)
                if not batch.operations:
                    batches.popleft()
            self._turns.put_back(queue)
        return True

    def _take(self, batch: _SlotBatch, byte_count: int, count: int) -> list[tuple[int, int, int]]:
        """The next operations of a batch, at most `count`, until they have `byte_count` bytes."""
        taken: list[tuple[int, int, int]] = []
        while batch.operations and byte_count > 0 and len(taken) < count:
            source, there, size = batch.operations.popleft()
            if size > CHUNK_BYTES:
                batch.operations.appendleft((source + CHUNK_BYTES, there + CHUNK_BYTES, size - CHUNK_BYTES))
                size = CHUNK_BYTES
            taken.append((self._source.address(source), there, size))
            byte_count -= size
        return taken

    def _next_line(self) -> _EngineLine | None:
        """The line with the least in flight of those that are not full. Small operations fill a line long before their
        bytes do."""
        return min((line for line in self._lines if not line.full), key=attrgetter("byte_count"), default=None)

    def _poll(self) -> bool:
        """False where a write has failed."""
        for line in self._lines:
            if (failed := line.poll(self._over)) is not None:
                self._unknown(failed)
                return False
        return True

    def _unknown(self, batch: _SlotBatch) -> None:
        self._replies.append(REPLY.pack(UNKNOWN, batch.slot))

    def _over(self, batch: _SlotBatch) -> None:
        self._replies.append(REPLY.pack(CANCELLED if batch.cancelled else DONE, batch.slot))


if __name__ == "__main__":
    main()
