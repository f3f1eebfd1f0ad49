"""What an engine's process submits, and on which line; and a GPU's memory there. With engines that are none."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence

import numpy as np
import pytest

from pdtransfer.transports.engines import child
from pdtransfer.transports.engines.child import (
    CARD,
    CHUNK_BYTES,
    OPERATION,
    ORDER,
    PUT,
    WINDOW_OPERATIONS,
    _EngineLine,
    _opened,
    _Sender,
    _serving,
    _Source,
)
from tests.support.played_card import BLIND, PlayedCard

WINDOW = 4 << 20


class Engine:
    """Takes everything, and says of nothing that it has ended."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    port = 1

    def submit(self, operations: Sequence[tuple[int, int, int]]) -> Sequence[tuple[int, int]]:
        return [(next(self._numbers), byte_count) for _, _, byte_count in operations]

    def landed(self, _: int) -> bool:
        return False


class Sending:
    """A sender of two lines, with memory for orders."""

    def __init__(self) -> None:
        self.lines = [_EngineLine(Engine(), WINDOW) for _ in range(2)]
        self._memory = np.zeros(1 << 20, np.uint8)
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs, self._slots, self._written = theirs, itertools.count(), 0
        address = self._memory.ctypes.data
        self._sender = _Sender(self.lines, theirs, _Source(address, len(self._memory), 0))

    def order(self, grant: int, count: int, byte_count: int) -> None:
        """This many operations of this many bytes."""
        table = np.tile(np.array([0, 0, byte_count]), (count, 1))
        start, self._written = self._written, self._written + table.nbytes
        self._memory[start : self._written].view(np.int64)[:] = table.reshape(-1)
        assert table.nbytes == count * OPERATION.size
        self.ours.send(ORDER.pack(PUT, next(self._slots), count, start, grant))

    def submit(self) -> None:
        self._sender._receive()
        self._sender._submit()

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


def test_a_line_that_is_full_of_small_operations_leaves_the_others_to_large_ones() -> None:
    sending = Sending()
    sending.order(1, 16, CHUNK_BYTES)
    sending.order(2, 4 * WINDOW_OPERATIONS, 1_024)
    sending.submit()
    assert all(line.full for line in sending.lines)
    assert WINDOW_OPERATIONS in [len(line._flying) for line in sending.lines]
    sending.close()


class Serving(Engine):
    """Serves memory, or refuses a GPU's."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self._refuses = refuses
        self.served = list[tuple[int, int]]()

    def serve(self, address: int, byte_count: int) -> None:
        if self._refuses:
            raise RuntimeError("the GPU's memory cannot be registered")
        self.served.append((address, byte_count))


@pytest.mark.parametrize("refusing", [0, 1, 2, None])
def test_a_peer_learns_of_no_engine_behind_the_first_that_does_not_serve_the_gpus_memory(
    refusing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else some served it, although the parent takes it for memory that no peer reaches."""
    monkeypatch.setattr(child, "_kept", kept := list[object]())
    engines = [Serving(refuses=index == refusing) for index in range(3)]
    serving, why = _serving(engines, 0x1000, 64)
    assert serving == (engines if refusing is None else engines[:refusing])
    assert [engine for engine in engines if engine.served] == serving
    assert why == ("" if refusing is None else "the GPU's memory cannot be registered")
    assert kept == ([] if refusing is None else engines), "ending one takes a second"


def test_a_gpu_whose_memory_cannot_be_opened_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its context would stay as long as the process, which goes on without it."""
    closed = list[bool]()

    class Recorded(PlayedCard):
        def close(self) -> None:
            super().close()
            closed.append(True)

    class Module:
        CARD = Recorded

    monkeypatch.setattr(child, "_loaded", lambda *_: Module)
    monkeypatch.setattr(child, "_kept", kept := list[object]())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(CARD.pack(BLIND, b"", 0, 64, 16))
        assert _opened("card", theirs) == (0, 16, 64, "cuIpcOpenMemHandle answers 2 (out of memory)")
    assert closed == [True]
    assert kept == []
