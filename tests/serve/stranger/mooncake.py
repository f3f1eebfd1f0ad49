"""KV between hosts by Mooncake's TransferEngine: decode's arena and prefill's way to it (memory.md)."""

import ctypes
import mmap
import os
from typing import Any

from tests.serve.stranger.peer import Fields, require

STAGE_BYTES = 2**20


def engine(host: str) -> Any:
    """A TransferEngine that listens on this host."""
    os.environ["MC_FORCE_TCP"] = "1"
    from mooncake.engine import TransferEngine

    transfer_engine = TransferEngine()
    status = transfer_engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
    require(status == 0, f"initialize answers {status}")
    return transfer_engine


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Arena:
    """Decode's memory, registered with an engine of its own."""

    transport = "mooncake"

    def __init__(self, size: int, **hbm: int) -> None:
        self.size, self.hbm = size, hbm
        self.memory = mmap.mmap(-1, size)
        self.engine = engine("127.0.0.1")
        self.base = address_of(self.memory)
        require(self.engine.register_memory(self.base, size) == 0, "the arena cannot be registered")

    def reach(self, session: int) -> Fields:
        return {
            "transport": "mooncake", "host": f"127.0.0.1:{self.engine.get_rpc_port()}", "address": "", "token": b"",
            "base": self.base, "arena_bytes": self.size, **self.hbm,
        }  # fmt: skip

    def read(self, at: int, size: int) -> bytes:
        return self.memory[at : at + size]

    def fenced(self, session: int) -> bool:
        """Never: the proof would be the death of this engine, which has no process of its own here."""
        return False

    def open(self, watch: Any) -> None:
        """Nobody has to ask for this memory."""

    def close(self) -> None:
        self.engine.unregister_memory(self.base)


class Target:
    """Another host's arena, as prefill writes it: staged here, and sent when `flush` is called."""

    def __init__(self, session: int, reach: Fields) -> None:
        self.reach = reach
        self.engine = engine("127.0.0.1")
        found = self.engine.get_first_buffer_address(reach["host"])
        require(found == reach["base"], f"reach.base = {reach['base']:#x}: its engine has {found:#x}")
        self.stage = mmap.mmap(-1, STAGE_BYTES)
        self.address, self.staged = address_of(self.stage), 0
        require(self.engine.register_memory(self.address, STAGE_BYTES) == 0, "the stage cannot be registered")
        self.pieces: list[tuple[int, int, int]] = []  # address here, address there, bytes

    def write(self, at: int, content: bytes) -> None:
        if self.staged + len(content) > STAGE_BYTES:
            self.flush()
        self.stage[self.staged : self.staged + len(content)] = content
        self.pieces.append((self.address + self.staged, self.reach["base"] + at, len(content)))
        self.staged += len(content)

    def flush(self) -> None:
        """Returns when all of it has arrived."""
        if self.pieces:
            status = self.engine.batch_transfer_sync_write(
                self.reach["host"], *map(list, zip(*self.pieces, strict=True))
            )
            require(status == 0, f"a write answers {status}")
        self.pieces, self.staged = [], 0

    def close(self) -> None:
        self.engine.unregister_memory(self.address)
