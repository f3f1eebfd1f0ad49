"""A decode daemon's arena where its engine computes on a GPU."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdtransfer.client.settings import NodeSettings
from pdtransfer.errors import WorldError
from pdtransfer.layout.layout import Component, Span
from pdtransfer.layout.layout_builders import host_layout
from pdtransfer.limits import TOKENS_MAX
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.engine_api import HBM_ALIGNMENT, EngineConfig, EngineDescription, GpuMemory, HiSparse
from pdtransfer.serve.settings.worker import DecodeConfig
from pdtransfer.serve.worker import daemon
from tests.support.fake_gpu import FakeRegistrar

MIB = 1 << 20


class Engine:
    """What a decode daemon's start asks of one."""

    def __init__(self, hbm_bytes: int = 0) -> None:
        self.description = EngineDescription(
            model="m", weights=b"w", components=(), memory_bytes=4 * MIB, hbm_bytes=hbm_bytes
        )
        self.attached: list[tuple[int, int]] = []
        self.hbm: memoryview | GpuMemory | None = None

    def attach(self, arena: memoryview, *, device_address: int = 0, hbm: memoryview | GpuMemory | None = None) -> None:
        self.hbm = hbm
        self.attached.append((arena.nbytes, device_address))


def started(monkeypatch: pytest.MonkeyPatch, gpu: FakeRegistrar, engine: Engine, device: str) -> ArenaMemory:
    gpu.numa_node = None  # type: ignore[attr-defined]
    monkeypatch.setattr(daemon, "gpu_at", lambda number: gpu if number == 3 else None)
    stop = SimpleNamespace(asked=asyncio.Event())
    return asyncio.run(daemon._arena(DecodeConfig(device=device, huge_pages="never"), engine, stop))  # type: ignore[arg-type]


def test_the_engine_gets_the_address_where_its_gpu_sees_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, engine = FakeRegistrar(), Engine()
    arena = started(monkeypatch, gpu, engine, "cuda:3")
    assert engine.attached == [(4 * MIB, arena.mapping.address + gpu.shift)]
    assert gpu.registered == {arena.mapping.address: 4 * MIB}
    arena.close()
    assert gpu.registered == {}


def test_an_engine_that_dies_after_its_loop_has_ended_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    daemon._call(loop, lambda: None)


def test_without_a_card_nothing_is_registered_and_hbm_is_a_range_of_the_arena_behind_its_dram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, engine = FakeRegistrar(), Engine(hbm_bytes=MIB + 5)
    arena = started(monkeypatch, gpu, engine, "cpu")
    assert (engine.attached, gpu.log) == ([(4 * MIB, 0)], [])
    assert isinstance(engine.hbm, memoryview)
    engine.hbm[:4] = b"hbm!"
    base = engine.description.hbm_base
    assert (len(engine.hbm), bytes(arena.mapping.view[base : base + 4])) == (MIB + 5, b"hbm!")
    assert arena.byte_count >= base + MIB + 5
    engine.hbm = None
    arena.close()


def test_hbm_components_are_announced_to_peers_behind_those_of_dram() -> None:
    layout = host_layout(
        "layer_first", kinds=("latent",), layers=2, heads=1, head_bytes=8, dtype="uint8", slots=64, page_size=1
    )
    both = [Component(name, memory, 1, Span(), layout) for name, memory in (("kv", "dram"), ("index", "hbm"))]  # type: ignore[arg-type]
    description = EngineDescription(
        model="m", weights=b"w", components=tuple(both), memory_bytes=layout.end, hbm_bytes=layout.end
    )
    assert description.hbm_base == HBM_ALIGNMENT
    assert description.arena_bytes == HBM_ALIGNMENT + layout.end
    kv, index = description.arena_components
    assert kv is both[0]
    assert [plane.base for plane in index.layout.planes] == [HBM_ALIGNMENT, HBM_ALIGNMENT + 64 * 8]
    assert EngineDescription(model="m", weights=b"w", components=(both[0],), memory_bytes=77).arena_bytes == 77


def test_routers_get_the_engines_context_within_what_a_message_holds() -> None:
    for tokens, expected in ((0, 0), (4_096, 4_096), (1 << 30, TOKENS_MAX)):
        settings = NodeSettings(node="p", model="m", weights=b"w", context_tokens=tokens)
        assert settings.identity("prefill").context_tokens == expected


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_is_as_long_as_its_model_and_its_memory(role: Any) -> None:
    assert EngineConfig(role=role, slots=5_000, page_size=1).context_tokens(9_000) == 5_000
    assert EngineConfig(role=role, slots=5_000, page_size=1).context_tokens(70) == 70
    hot = HiSparse(device_slots=64, hot_tokens=32, dense_slots=6_000)
    longest = EngineConfig(role="decode", slots=5_000, page_size=1, hisparse=hot).context_tokens(9_000)
    assert longest == 6_000, "of a dense request"


def test_an_arena_that_its_card_refuses_ends_the_start_and_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, engine, seen = FakeRegistrar(refused=0), Engine(), list[ArenaMemory]()
    create = ArenaMemory.create

    def created(*args: object, **kwargs: object) -> ArenaMemory:
        seen.append(create(*args, **kwargs))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(ArenaMemory, "create", created)
    with pytest.raises(WorldError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        started(monkeypatch, gpu, engine, "cuda:3")
    assert engine.attached == []
    assert seen[0].mapping._map.closed


async def test_a_daemon_ends_where_backing_its_arena_raises() -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    died = asyncio.Event()
    await daemon._back(SimpleNamespace(bytes_ready=0, needed=1, prefault=broken), None, died)  # type: ignore[arg-type]
    assert died.is_set()
