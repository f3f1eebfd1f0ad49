"""What rooms over a network are compared with: a bare engine's writes, and a socket, between two processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from pdtransfer.errors import WorldError
from pdtransfer.serve.process.setup import prepare
from pdtransfer.transports.mooncake.settings import environment
from pdtransfer.transports.options import Network

from .processes import begun

BYTES = 128 << 20
_HOST = "127.0.0.1"
_SECONDS = 60.0


class Bare:
    """Two processes with an engine and a socket each; figures in bytes a nanosecond, GB/s."""

    def __init__(self, stack: ExitStack) -> None:
        self._pipe = stack.enter_context(_process(_send))
        receiver = stack.enter_context(_process(_receive))
        self._pipe.send(_answered(receiver))

    def sync_write(self) -> float:
        """One synchronous write of BYTES."""
        return self._ask("sync", BYTES)

    def socket(self) -> float:
        """BYTES through one TCP connection."""
        return self._ask("socket", BYTES)

    def rows(self, row_bytes: int, rows: int) -> float:
        """Rows one after another, each an operation that is waited for before the next."""
        return self._ask("rows", row_bytes, rows)

    def _ask(self, order: str, *numbers: int) -> float:
        self._pipe.send((order, *numbers))
        return _answered(self._pipe)


def _answered(pipe: Connection) -> Any:
    if not pipe.poll(_SECONDS):
        raise WorldError(f"a bare engine has sent nothing for {_SECONDS:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        raise WorldError("a bare engine has died") from None


@contextmanager
def _process(run: Callable[[Connection], None]) -> Generator[Connection, None, None]:
    process, ours = begun(run)
    try:
        yield ours
    finally:
        process.kill()  # destroying an engine takes a second
        process.join()


def _engine() -> Any:
    os.environ.update(environment(Network()))  # for the library, which reads it as it is imported
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its log is of no use here
    engine: Any = import_module("mooncake.engine").TransferEngine()
    if engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""):
        raise WorldError("the bare engine cannot be initialised")
    return engine


def _memory() -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, BYTES)
    memory[:] = b"\7" * BYTES
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _receive(pipe: Connection) -> None:
    prepare()
    engine, (memory, address) = _engine(), _memory()
    engine.register_memory(address, BYTES)
    listener = socket.create_server((_HOST, 0))
    pipe.send((engine.get_rpc_port(), address, listener.getsockname()[1]))
    peer, _ = listener.accept()
    view = memoryview(memory)
    while True:
        left = BYTES
        while left:
            if not (received_bytes := peer.recv_into(view[:left])):
                return
            left -= received_bytes
        peer.sendall(b"!")


def _send(pipe: Connection) -> None:
    prepare()
    engine, (memory, address) = _engine(), _memory()
    port, target_address, socket_port = pipe.recv()
    peer, target = socket.create_connection((_HOST, socket_port)), f"{_HOST}:{port}"
    while True:
        order, *numbers = pipe.recv()
        start, byte_count = time.monotonic_ns(), numbers[0]
        if order == "socket":
            peer.sendall(memory)
            peer.recv(1)
        elif order == "sync":
            if engine.transfer_sync_write(target, address, target_address, byte_count):
                raise WorldError("a bare engine's write has failed")
        else:
            byte_count *= numbers[1]
            for row in range(numbers[1]):
                offset = row * numbers[0] % BYTES
                if engine.transfer_sync_write(target, address + offset, target_address + offset, numbers[0]):
                    raise WorldError("a bare engine's write has failed")
        pipe.send(byte_count / (time.monotonic_ns() - start))
