"""Where a KV cache lies, and what decode offers to writers; a GPU is a stand-in here."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")

import torch

from pdtransfer import Component, DecodeClient, Layout, NodeSettings, Plane, PrefillClient, Span, WriterOptions
from pdtransfer.adapters.kit import cache_memory
from pdtransfer.adapters.kit.cache_memory import CacheMemory, Extent, exported, made_in_one_piece
from pdtransfer.errors import ConfigError, WorldError
from pdtransfer.memory import cuda_ipc
from pdtransfer.memory.arena_memory import ArenaMemory
from tests.support.client_pair import LIMITS
from tests.support.waiting import wait_for

SIZE = 1 << 16
UUID, IPC = b"u" * 16, b"h" * 64


class Gpu:
    """A GPU with one allocation, which may have no handle."""

    uuid = UUID

    def __init__(self, first: int, byte_count: int, *, refuses: bool = False) -> None:
        self.first, self.byte_count, self.refuses = first, byte_count, refuses

    def range_of(self, address: int) -> tuple[int, int]:
        assert self.first <= address < self.first + self.byte_count
        return self.first, self.byte_count

    def host_register(self, address: int, _: int) -> int:
        return address

    def host_unregister(self, address: int) -> None:
        pass

    def ipc_handle(self, base: int) -> bytes:
        assert base == self.first
        if self.refuses:
            raise WorldError("cuIpcGetMemHandle: invalid argument")
        return IPC


def with_gpu(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    monkeypatch.setattr(cache_memory, "gpu_at", lambda _: gpu)
    monkeypatch.setattr(cuda_ipc.gpus, "gpu_at", lambda _: gpu)


def extent_of(tensor: torch.Tensor, device: int | None = None) -> Extent:
    return Extent(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), device)


def test_a_cache_on_the_cpu_is_the_arena() -> None:
    cache_memory = CacheMemory([SIZE])
    with cache_memory.pooled():
        cache = torch.zeros(SIZE, dtype=torch.int8)
    extent = extent_of(cache)
    target = cache_memory.target(extent)
    assert (target.base, target.memory, target.copied_up) == (cache.data_ptr(), "dram", False)
    assert target.arena.hbm is None
    assert target.arena.bytes_ready >= SIZE
    assert cache_memory.base(extent) == cache.data_ptr()
    assert cache_memory.pool_fd(extent) == target.arena.fd >= 0
    target.arena.mapping.view[3] = 7
    assert cache[3] == 7
    cache_memory.close()  # the tensor is still there, so it stays mapped
    assert cache[3] == 7
    del cache


def test_tensors_of_layers_are_one_allocation() -> None:
    with CacheMemory([SIZE] * 3).pooled_on(torch.device("cpu")):
        caches = [torch.zeros(SIZE, dtype=torch.int8) for _ in range(3)]
    assert len({cache.untyped_storage().data_ptr() for cache in caches}) == 1
    assert [cache.data_ptr() - caches[0].data_ptr() for cache in caches] == [0, SIZE, 2 * SIZE]


class Caches:
    """An engine that allocates a tensor for each layer, and frees them late."""

    def __init__(self, device: str) -> None:
        self.device, self.alive = device, list[weakref.ref[torch.Tensor]]()
        self.alive_before: list[int] = []

    def __call__(self) -> list[torch.Tensor]:
        self.alive_before.append(sum(each() is not None for each in self.alive))
        made = [torch.zeros(SIZE, dtype=torch.int8, device=self.device) for _ in range(3)]
        self.alive += map(weakref.ref, made)
        held: list[object] = [made]
        held.append(held)  # which reference counts alone do not free
        return made


def test_layers_that_an_engine_allocates_one_by_one_are_made_in_one_piece() -> None:
    """On a device where memory is taken at once: a stand-in for a GPU."""
    make = Caches("meta")
    _, made = made_in_one_piece(make, torch.device("meta"))
    assert [each.storage_offset() for each in made] == [0, SIZE, 2 * SIZE]
    assert make.alive_before == [0, 0]


def test_layers_in_one_piece_on_the_cpu_are_the_arena() -> None:
    memory, made = made_in_one_piece(Caches("cpu"), torch.device("cpu"))
    target = memory.target(Extent(made[0].data_ptr(), made[2].data_ptr() + SIZE))
    assert (target.base, target.memory, target.copied_up) == (made[0].data_ptr(), "dram", False)


def test_layers_on_the_cpu_with_host_memory_beside_them_land_there_first() -> None:
    """As on a GPU, of which peers cannot write: the engine's layers are in one piece, which is not an arena."""
    memory, made = made_in_one_piece(Caches("cpu"), torch.device("cpu"), has_beside=True)
    assert [each.storage_offset() for each in made] == [0, SIZE, 2 * SIZE]
    extent = Extent(made[0].data_ptr(), made[2].data_ptr() + SIZE)
    assert memory.pooled_extent == extent
    host = memory.beside(extent, SIZE)
    target = memory.target(extent)
    assert (target.memory, target.copied_up) == ("hbm", True)
    assert [target.locate(each.data_ptr())[1] for each in (made[2], host)] == ["hbm", "dram"]
    for address in (extent.first - 1, extent.end):
        with pytest.raises(ConfigError, match=f"^KV cache: a buffer at {address:#x} is where no peer can write: "):
            target.locate(address)


@pytest.mark.parametrize("has_beside", [False, True], ids=["in the arena", "on a device"])
def test_what_an_engine_allocates_later_lies_in_the_same_allocation(has_beside: bool) -> None:
    make = Caches("cpu")
    memory, layers = made_in_one_piece(make, torch.device("cpu"), has_beside=has_beside, make_later=lambda _: make())
    with memory.pooled_later():
        drafts = make()
    offsets = [tensor.data_ptr() - layers[0].data_ptr() for tensor in layers + drafts]
    assert offsets == [SIZE * place for place in range(6)]
    assert memory.target(Extent(layers[0].data_ptr(), drafts[2].data_ptr() + SIZE)).copied_up == has_beside
    with memory.pooled_later():
        elsewhere = make()
    assert {tensor.storage_offset() for tensor in elsewhere} == {0}


def test_an_arena_is_closed_once_the_engine_has_dropped_its_tensors() -> None:
    memory = CacheMemory([SIZE])
    with memory.pooled():
        layer = torch.zeros(SIZE, dtype=torch.int8)
    arena = memory.target(extent_of(layer)).arena
    del layer
    memory.close()
    assert arena.fd == -1


def test_a_card_without_room_for_one_piece_has_the_layers_as_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 192 KiB")

    monkeypatch.setattr(CacheMemory, "pooled_on", full)
    with caplog.at_level(logging.WARNING):
        _, made = made_in_one_piece(Caches("meta"), torch.device("meta"))
    assert [each.storage_offset() for each in made] == [0, 0, 0]
    assert "is not in one allocation: tried to allocate 192 KiB" in caplog.text


def test_a_cache_elsewhere_is_copied_up_and_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    cache_memory, cache = CacheMemory([SIZE]), torch.zeros(SIZE, dtype=torch.int8)
    extent = extent_of(cache)
    with caplog.at_level(logging.WARNING):
        target = cache_memory.target(extent)
    assert "what lands is copied once more" in caplog.text
    assert (target.base, target.memory, target.copied_up) == (cache.data_ptr(), "hbm", True)
    assert target.arena.hbm is not None
    assert (target.arena.hbm.address, target.arena.hbm.handle) == (cache.data_ptr(), b"")
    assert (cache_memory.base(extent), cache_memory.pool_fd(extent)) == (cache.data_ptr(), -1)
    cache_memory.close()


def test_a_cache_in_too_many_places_is_refused() -> None:
    with pytest.raises(ConfigError, match="KV cache: 65536 bytes are spread over a range of"):
        CacheMemory([SIZE]).target(Extent(1 << 32, 1 << 40))


def test_a_cache_on_a_card_is_named_to_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, Gpu(1 << 40, 4 * SIZE))
    handle = cuda_ipc.Handle.unpack(exported(Extent((1 << 40) + SIZE, (1 << 40) + 3 * SIZE, 0), 0))
    assert (handle.kind, handle.gpu, handle.handle) == ("gpu", UUID, IPC)
    assert (handle.offset, handle.byte_count) == (SIZE, 2 * SIZE)


def test_a_cache_that_writers_reach_takes_no_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size: the arena is a page for its lock, and a buffer that nobody has needed yet."""
    with_gpu(monkeypatch, Gpu(1 << 40, 1 << 42))
    cache_memory = CacheMemory([1 << 42])
    target = cache_memory.target(Extent(1 << 40, 5 << 40, 0), host_buffer_gib=0.25)
    assert (target.memory, target.copied_up) == ("hbm", False)
    assert target.arena.byte_count == target.arena.staging_bytes == 1 << 28
    assert os.fstat(target.arena.fd).st_blocks * 512 == target.arena.bytes_ready == 4096
    cache_memory.close()


@pytest.mark.parametrize(
    ("gpu", "text"),
    [
        (Gpu(1 << 40, 4 * SIZE, refuses=True), "cuIpcGetMemHandle: invalid argument"),
        (Gpu(1 << 40, SIZE), "it lies in several allocations, the first has 65536 bytes"),
    ],
)
def test_a_cache_that_a_card_cannot_share_has_its_reason(
    gpu: Gpu, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_gpu(monkeypatch, gpu)
    with caplog.at_level(logging.WARNING):
        assert exported(Extent(1 << 40, (1 << 40) + 2 * SIZE, 0), 0) == b""
    assert text in caplog.text
    assert "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in caplog.text


def test_a_cache_that_is_copied_up_arrives() -> None:
    """By the same way as a GPU's, with this process's memory in its place."""
    source, target = np.arange(SIZE, dtype=np.uint8), np.zeros(SIZE, np.uint8)
    cache_memory = CacheMemory([SIZE])
    landing = cache_memory.target(Extent(target.ctypes.data, target.ctypes.data + SIZE))
    options: dict[str, Any] = {"model": "m", "weights": b"w", "limits": LIMITS}

    def component(where: Any) -> Component:
        return Component(
            "group0", where, 16, Span(), Layout((Plane(0, "kv", "uint8", 0, 1, 0, 256, 256, 256),), 1, 256)
        )

    writer = WriterOptions(pool_address=source.ctypes.data)
    prefill = PrefillClient(NodeSettings(node="p", **options), [component("dram")], writer=writer)
    decode = DecodeClient(
        NodeSettings(node="d", **options), [component(landing.memory)], landing.arena, engine_slots=True,
        prefix_cache=False,
    )  # fmt: skip
    with prefill, decode:
        decode.expect(1, tokens=32, sources=[prefill.endpoint], slots={"group0": [9, 4]})
        prefill.open(1, tokens=32, grants=None)
        prefill.push(1, [200, 7], rows=(0, 2), component="group0")
        prefill.finish(1)
        wait_for(lambda: any(type(each).__name__ == "RoomDrained" for each in decode.poll()))
    assert np.array_equal(target.reshape(256, 256)[[9, 4]], source.reshape(256, 256)[[200, 7]])
    cache_memory.close()


def test_host_memory_lies_in_one_arena_with_where_rows_land() -> None:
    cache_memory, cache = CacheMemory([SIZE]), torch.zeros(SIZE, dtype=torch.int8)
    extent = extent_of(cache)
    assert not cache_memory.has_beside()
    host = cache_memory.beside(extent, 1000)
    assert (host.dtype, tuple(host.shape), bool(host.any())) == (torch.uint8, (1000,), False)
    target = cache_memory.target(extent)
    start, behind = target.arena.mapping.address, 4096  # rows that land for the cache do not reach the host's memory
    assert (target.base, target.memory, target.copied_up) == (cache.data_ptr() - behind, "hbm", True)
    assert target.locate(cache.data_ptr()) == (cache.data_ptr() - behind, "hbm")
    assert target.locate(host.data_ptr()) == (start, "dram")
    assert host.data_ptr() - start == 0
    assert target.arena.hbm is not None
    assert (target.arena.hbm.base, target.arena.hbm.byte_count) == (behind, SIZE)
    assert target.arena.bytes_ready >= SIZE + behind
    assert (cache_memory.has_beside(host.data_ptr()), cache_memory.has_beside(cache.data_ptr())) == (True, False)
    target.arena.mapping.view[host.data_ptr() - start + 3] = 7
    assert host[3] == 7
    with pytest.raises(ConfigError, match="it is not where it was when host memory was set aside"):
        cache_memory.target(Extent(extent.first - 4096, extent.end, None))
    del host
    cache_memory.close()


def test_a_host_tensor_that_an_engine_allocates_with_its_cache_lies_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, as a stand-in for a GPU: the first layer of the cache begins behind a part that is not sent."""
    memory, device = CacheMemory([SIZE]), torch.device("cpu")
    backed, prefault = list[int](), ArenaMemory.prefault
    monkeypatch.setattr(ArenaMemory, "prefault", lambda arena: backed.append(arena.needed) or prefault(arena))
    with memory.pooled_beside(device, 9_000, host_buffer_gib=1.0):
        assert not backed, "the engine has not looked yet whether there is memory"
        cache = torch.zeros(SIZE, dtype=torch.int8, device=device)
        host = torch.empty(9_000, dtype=torch.int8, device=device)
        another = torch.empty(9_001, dtype=torch.int8, device=device)
    assert [memory.has_beside(tensor.data_ptr()) for tensor in (cache, host, another)] == [False, True, False]
    assert backed
    target = memory.target(extent_of(cache[256:]))
    assert target.arena.hbm is not None
    assert (target.arena.hbm.address, target.arena.hbm.byte_count) == (cache.data_ptr(), SIZE)
    base, kind = target.locate(cache.data_ptr())
    assert (kind, cache.data_ptr() - base) == ("hbm", target.arena.hbm.base)
    assert target.locate(host.data_ptr()) == (target.arena.mapping.address, "dram")
    host[5] = 3
    assert target.arena.mapping.view[host.data_ptr() - target.arena.mapping.address + 5] == 3
    del host
    memory.close()
