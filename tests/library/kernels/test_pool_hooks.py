"""What engines' pools call, on the CPU: rows up layer by layer, down all at once, and memory for other processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from pdtransfer.errors import LocalProtocolError, TransportError, WorldError
from pdtransfer.kernels import kv_copy as kv_copies
from pdtransfer.kernels import pool_hooks
from pdtransfer.kernels.pool_hooks import backup_from_device_all_layer, load_to_device_per_layer
from pdtransfer.kernels.pools import Pool
from pdtransfer.memory import cuda_ipc
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.shm.arena import ShmArena
from tests.support import kernels_host
from tests.support.gpu_on_host import GpuOnHost
from tests.support.layout_tensors import CANARY, mha, mla
from tests.support.layout_tensors import Pool as Tensors
from tests.support.paths import REPO
from tests.support.slot_copies import pool_of


@pytest.mark.parametrize("model", [mla(layers=range(3, 8)), mha(layers=range(4), heads=range(8))], ids=["mla", "mha"])
def test_rows_go_up_layer_by_layer_and_down_all_at_once(model) -> None:
    host = Tensors(name="page_first", model=model, page_size=16, slots=64)
    device, back = (Tensors(name="layer_first", model=model, page_size=16, slots=64) for _ in range(2))
    host.fill(np.arange(64) + 1_000)
    rng = np.random.default_rng(1)
    up, down, home = (rng.permutation(64)[:37] for _ in range(3))
    events = load_to_device_per_layer(pool_of(device), pool_of(host), up, down, 37)
    assert list(events) == sorted({layer for _, layer, _ in model.rows()})
    assert all(event.query() for event in events.values())
    backup_from_device_all_layer(pool_of(back), pool_of(device), home, up, 37).wait()
    for kind, layer, head in model.rows():
        assert np.array_equal(back.read(kind, layer, head, home), host.read(kind, layer, head, down))


def test_layers_are_copied_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = (Tensors(name=name, model=mla(), page_size=16, slots=64) for name in ("page_first", "layer_first"))
    seen: list[tuple[int, int]] = []

    def copied(target: Pool, source: Pool, *_: object) -> None:
        seen.append((target.layout.layer_range[0], source.layout.layer_range[0]))

    monkeypatch.setattr(pool_hooks, "kv_copy", copied)
    layers = list(load_to_device_per_layer(pool_of(device), pool_of(host), range(3), range(3), 3))
    assert seen == [(layer, layer) for layer in layers]


def test_where_a_layer_is_refused_none_is_under_way_once_the_caller_gets_the_error(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = GpuOnHost(kernels_host.library(tmp_path_factory.getbasetemp()))
    for module in (pool_hooks, kv_copies):
        monkeypatch.setattr(module, "gpu_at", lambda _: gpu)
    monkeypatch.setattr(pool_hooks, "CudaEvent", lambda _: Mock())
    launch = gpu.launch

    def third_refused(*given: Any, **how: Any) -> None:
        gpu.refuses = "launch" if gpu.launches == 2 else None
        launch(*given, **how)

    monkeypatch.setattr(gpu, "launch", third_refused)
    model = mla(layers=range(4))
    host, device = (Tensors(name="layer_first", model=model, page_size=16, slots=64) for _ in range(2))
    host.fill(np.arange(64) + 1_000)
    up, down = np.arange(9)[::-1], np.arange(40, 49)
    wanted = [host.read(*row, down) for row in model.rows()]
    with pytest.raises(WorldError, match="refused"):
        load_to_device_per_layer(
            replace(pool_of(device), device=0), replace(pool_of(host), device=0, host=True), up, down, 9
        )
    host.memory[:] = 0  # it is the caller's again
    gpu.finish()
    for row, right in zip(model.rows(), wanted, strict=True):
        assert np.array_equal(device.read(*row, up), right) == (row[1] < 2)


@pytest.mark.parametrize("rows", [9, 5_000])
def test_slots_of_any_number_are_queued_behind_what_the_stream_has_to_do(
    rows: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = GpuOnHost(kernels_host.library(tmp_path_factory.getbasetemp()))
    for module in (pool_hooks, kv_copies):
        monkeypatch.setattr(module, "gpu_at", lambda _: gpu)
    monkeypatch.setattr(pool_hooks, "CudaEvent", lambda _: Mock())
    model, stream, computed = mla(layers=range(2)), gpu.stream(), False
    host, device = (Tensors(name="layer_first", model=model, page_size=16, slots=5_008) for _ in range(2))
    host.fill(np.arange(5_008) + 1_000)
    rng = np.random.default_rng(1)
    up, down = (rng.permutation(5_008)[:rows] for _ in range(2))
    gpu._queues[stream].append((lambda: computed, lambda: None))
    load_to_device_per_layer(
        replace(pool_of(device), device=0), replace(pool_of(host), device=0, host=True), up, down, rows, stream=stream
    )
    assert (device.memory == CANARY).all()
    computed = True
    gpu.finish()
    for row in model.rows():
        assert np.array_equal(device.read(*row, up), host.read(*row, down))


def test_wrong_slots_are_refused_before_a_layer_is_copied() -> None:
    host, device = (Tensors(name="layer_first", model=mla(), page_size=16, slots=64) for _ in range(2))
    before = device.memory.copy()
    with pytest.raises(LocalProtocolError, match="64 is outside"):
        load_to_device_per_layer(pool_of(device), pool_of(host), np.array([1, 64]), range(2), 2)
    assert np.array_equal(device.memory, before)


OTHER = """
import sys
import numpy as np
from pdtransfer.memory.cuda_ipc import Handle, Opened
opened = Opened(Handle.unpack(bytes.fromhex(sys.argv[1])))
assert opened.device is None
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
    handle = arena.export()
    with pytest.raises(TransportError, match="is another file now"):
        cuda_ipc.Opened(msgspec.structs.replace(handle, inode=handle.inode + 1))
    with pytest.raises(TransportError, match="exported memory: /proc/"):
        cuda_ipc.Opened(msgspec.structs.replace(handle, descriptor=1 << 20))
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
    own = cuda_ipc.Opened(handle, on=0)
    assert own.same_gpu
    own.close()
    del log[2:]
    assert log == [("open", b"h" * 64), ("close", 1 << 20)]
