"""The arena that a ShmPair's rows fit into, its owner, writers beside it, and patience with engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.options import WriterOptions
from pdtransfer.transports.shm import entering
from pdtransfer.transports.shm.arena import ShmArena
from pdtransfer.transports.shm.writer import ShmWriter
from tests.library.transports.fake_transport import ignore_end
from tests.support.fake_gpu import FakeGpu
from tests.support.libraries import slow_starts  # noqa: F401 (a fixture)
from tests.support.shm_pair import LAYERS, ROW, SLOTS, Pair, opened


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArenaMemory]:
    """A writer enters it in one step."""
    monkeypatch.setattr(entering, "STEP_BYTES", SLOTS * LAYERS * ROW)
    made = ArenaMemory.create(SLOTS * LAYERS * ROW, huge_pages="never")
    yield made
    made.close()


@pytest.fixture
def owner(arena: ArenaMemory, directory: Path) -> AbstractAsyncContextManager[ShmArena]:
    return opened(ShmArena, arena, directory=directory)


@pytest.fixture
def writer() -> AbstractAsyncContextManager[ShmWriter]:
    """One without a pool."""
    return opened(ShmWriter, (), WriterOptions(copy_threads=1), ignore_end)


@pytest.fixture
def gpu() -> FakeGpu | None:
    """That a pair's writer copies with: none, but where a test module has another."""


@pytest.fixture
def unmapped(arena: ArenaMemory, directory: Path, gpu: FakeGpu | None) -> AbstractAsyncContextManager[Pair]:
    return opened(Pair, arena, directory, gpu=gpu)


@pytest.fixture
@asynccontextmanager
async def both(unmapped: AbstractAsyncContextManager[Pair]) -> AsyncIterator[Pair]:
    """A pair whose writer has mapped the arena."""
    async with unmapped as made:
        await made.map()
        yield made
