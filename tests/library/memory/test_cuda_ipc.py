"""Memory for other processes, on the CPU: what is exported is read, written and refused there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import msgspec
import pytest

from pdtransfer.errors import LocalProtocolError, TransportError
from pdtransfer.memory import cuda_ipc
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.shm.arena import ShmArena
from tests.support.paths import REPO

OTHER = """
import sys
import numpy as np
from pdtransfer.memory.cuda_ipc import Handle, Opened
opened = Opened(Handle.unpack(bytes.fromhex(sys.argv[1])))
assert (opened.device, opened.same_gpu) == (None, False)
words = np.ctypeslib.as_array((__import__("ctypes").c_uint8 * opened.byte_count).from_address(opened.address))
print(int(words[:100].sum()))
words[100] = 77
opened.close()
opened.close()
"""


def test_another_process_reads_and_writes_what_was_exported() -> None:
    arena = ArenaMemory.create(1 << 20, huge_pages="never")
    arena.prefault()
    arena.mapping.array[:100] = 3
    packed = arena.export().packed
    ran = subprocess.run(
        [sys.executable, "-c", OTHER, packed.hex()], capture_output=True, text=True, check=True, cwd=REPO, timeout=120
    )
    assert ran.stdout.strip() == "300"
    assert arena.mapping.array[100] == 77
    arena.close()


def test_an_arena_that_a_node_serves_is_exported_to_nobody() -> None:
    """Who maps an export holds no lock: the fence would call it quiet while it writes."""

    async def serve(arena: ArenaMemory) -> None:
        await ShmArena(arena, directory=None).close()

    served, exported = (ArenaMemory.create(1 << 20, huge_pages="never") for _ in range(2))
    asyncio.run(serve(served))
    with pytest.raises(LocalProtocolError, match="it is served, so it cannot be exported"):
        served.export()
    exported.export()
    with pytest.raises(LocalProtocolError, match="it is exported, so it cannot be served"):
        asyncio.run(serve(exported))
    asyncio.run(serve(served))
    exported.export()
    for arena in (served, exported):
        arena.close()


def test_memory_that_is_no_more_is_not_opened() -> None:
    arena = ArenaMemory.create(1 << 20, huge_pages="never")
    handle, descriptors = arena.export(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match="is another file now"):
        cuda_ipc.Opened(msgspec.structs.replace(handle, inode=handle.inode + 1))
    with pytest.raises(TransportError, match="exported memory: /proc/"):
        cuda_ipc.Opened(msgspec.structs.replace(handle, descriptor=1 << 20))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    arena.close()


def test_a_handle_that_a_card_is_to_write_through_is_of_a_cards_memory_alone() -> None:
    arena = ArenaMemory.create(1 << 20, huge_pages="never")
    with pytest.raises(TransportError, match="memfd, expected GPU memory"):
        cuda_ipc.Opened(arena.export(), on=0)
    arena.close()


@pytest.mark.parametrize(
    "packed",
    [b"", b"\x90", cuda_ipc.Handle("gpu", 8, gpu=b"x" * 16).packed, cuda_ipc.Handle("memfd", 0).packed,
     cuda_ipc.Handle("gpu", 8, -1, b"x" * 16, b"h" * 64).packed],
)  # fmt: skip
def test_what_is_no_handle_is_refused(packed: bytes) -> None:
    with pytest.raises(TransportError, match="handle of exported memory"):
        cuda_ipc.Handle.unpack(packed)


def test_a_card_that_is_not_seen_here_is_named() -> None:
    handle = cuda_ipc.Handle("gpu", 8, 0, b"\xee" * 16, b"h" * 64)
    with pytest.raises(TransportError, match="ee" * 16):
        cuda_ipc.Opened(cuda_ipc.Handle.unpack(handle.packed))


def test_memory_of_a_card_that_is_not_seen_here_is_opened_for_one_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engines are given a GPU each with CUDA_VISIBLE_DEVICES, and write each other's."""
    log: list[tuple[object, ...]] = []

    class Seen:
        uuid = b"\xdd" * 16

        def ipc_open(self, handle: bytes, flags: int) -> int:
            log.append(("open", handle))
            return 1 << 20

        def ipc_close(self, base: int) -> None:
            log.append(("close", base))

        def range_of(self, address: int) -> tuple[int, int]:
            return address, 4_096

    monkeypatch.setattr(cuda_ipc.gpus, "gpu_at", lambda ordinal: {0: Seen()}[ordinal])
    handle = cuda_ipc.Handle("gpu", 1_024, 256, b"\xee" * 16, b"h" * 64)
    opened = cuda_ipc.Opened(handle, on=0)
    assert (opened.device, opened.address, opened.byte_count) == (0, (1 << 20) + 256, 1_024)
    assert not opened.same_gpu
    opened.close()
    Seen.uuid = handle.gpu
    own, again = cuda_ipc.Opened(handle, on=0), cuda_ipc.Opened(msgspec.structs.replace(handle, byte_count=3_840), on=0)
    assert own.same_gpu
    with pytest.raises(TransportError, match=r"bytes 256\+3841 of an allocation of 4096"):
        cuda_ipc.Opened(msgspec.structs.replace(handle, byte_count=3_841), on=0)
    own.close()
    assert log.count(("close", 1 << 20)) == 1, "the driver has a handle open once, for all that use it"
    again.close()
    assert log == [("open", b"h" * 64), ("close", 1 << 20)] * 2
