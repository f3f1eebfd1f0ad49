"""The arena that a ShmPair's rows fit into, and patience with engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.shm import entering
from tests.support.libraries import slow_starts  # noqa: F401 (a fixture)
from tests.support.shm_pair import LAYERS, ROW, SLOTS


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArenaMemory]:
    """A writer enters it in one step."""
    monkeypatch.setattr(entering, "STEP_BYTES", SLOTS * LAYERS * ROW)
    made = ArenaMemory.create(SLOTS * LAYERS * ROW, huge_pages="never")
    yield made
    made.close()
