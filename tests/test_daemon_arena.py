"""A decode daemon's arena where its engine computes on a card."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from pdtransfer import daemon
from pdtransfer.config import DecodeConfig
from pdtransfer.errors import WorldError
from pdtransfer.memory import Arena

from .fake_card import FakeRegistrar

MIB = 1 << 20


class Engine:
    """What a decode daemon's start asks of one."""

    card = SimpleNamespace(memory_bytes=4 * MIB)

    def __init__(self) -> None:
        self.attached: list[tuple[int, int]] = []

    def attach(self, arena: memoryview, *, device_address: int = 0) -> None:
        self.attached.append((arena.nbytes, device_address))


def started(monkeypatch: pytest.MonkeyPatch, card: FakeRegistrar, engine: Engine, device: str) -> Arena:
    card.numa_node = None  # type: ignore[attr-defined]
    monkeypatch.setattr(daemon, "card", lambda number: card if number == 3 else None)
    stop = SimpleNamespace(asked=asyncio.Event())
    return asyncio.run(daemon._arena(DecodeConfig(device=device, huge_pages="never"), engine, stop))  # type: ignore[arg-type]


def test_the_engine_is_told_where_its_card_sees_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    card, engine = FakeRegistrar(), Engine()
    arena = started(monkeypatch, card, engine, "cuda:3")
    assert engine.attached == [(4 * MIB, arena.mapping.address + card.shift)]
    assert card.registered == {arena.mapping.address: 4 * MIB}
    arena.close()
    assert card.registered == {}


def test_without_a_card_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    card, engine = FakeRegistrar(), Engine()
    arena = started(monkeypatch, card, engine, "cpu")
    assert engine.attached == [(4 * MIB, 0)]
    assert card.log == []
    arena.close()


def test_an_arena_that_its_card_refuses_ends_the_start_and_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    card, engine, seen = FakeRegistrar(refused=0), Engine(), list[Arena]()
    create = Arena.create

    def created(*args: object, **kwargs: object) -> Arena:
        seen.append(create(*args, **kwargs))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(Arena, "create", created)
    with pytest.raises(WorldError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        started(monkeypatch, card, engine, "cuda:3")
    assert engine.attached == []
    assert seen[0].mapping._map.closed
