"""The arena that a ShmPair's rows fit into, and patience with engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.engines import process
from tests.support.shm_pair import LAYERS, ROW, SLOTS
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def arena() -> Iterator[ArenaMemory]:
    made = ArenaMemory.create(SLOTS * LAYERS * ROW, huge_pages="never")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def slow_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may take as long to start as a busy machine needs."""
    monkeypatch.setattr(process, "_READY_SECONDS", PATIENCE_S)
