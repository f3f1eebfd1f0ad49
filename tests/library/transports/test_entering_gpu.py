"""Rows that land in an arena of which a GPU has registered parts, in no order, and parts that it lets go of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdtransfer.kernels import driver
from pdtransfer.kernels.gpu import gpu_at
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.gpu_launcher import WriterGpu
from tests.support.entered_ahead import Ahead
from tests.support.shm_pair import LAYERS, SLOTS, Pair, Pool, layer_first, page_first
from tests.support.waiting import until

if driver.count() == 0:
    pytest.skip("no GPU here, or no driver and bindings for it", allow_module_level=True)
pytestmark = pytest.mark.gpu

PIECE_BYTES = 64 << 10


@pytest.mark.parametrize("target", [page_first(), layer_first()], ids=["page_first", "layer_first"])
async def test_rows_land_in_parts_that_were_registered_one_by_one(
    arena: ArenaMemory, directory: Path, monkeypatch: pytest.MonkeyPatch, target: object
) -> None:
    ahead, here, content = Ahead(monkeypatch, PIECE_BYTES), gpu_at(0), Pool().bytes
    borders = len(here.borders)
    arena.prefault()
    address = here.allocate(len(content))
    here.upload(address, content, here.side_stream)
    here.synchronise(here.side_stream)
    both = Pair(arena, directory, gpu=WriterGpu(0), address=address)
    both.target = target  # type: ignore[assignment]
    assert await both.map() == arena.byte_count
    assert len(here.borders) == borders + 1
    order = np.random.default_rng(0).permutation(SLOTS)
    # Rows one by one go by a kernel; long runs by the copy engine as well, across the borders of many registrations.
    for grant, slots in enumerate((order[:300], np.arange(4_096, 8_192), np.arange(0, 2_048)), 1):
        source = np.arange(len(slots))
        both.want(both.write(source, slots, grant=grant))
        both.want(both.write(source, slots, grant=grant, layers=(1, LAYERS)))
        await until(lambda: len(both.ended) == both.writes)
    assert {outcome.value for _, outcome, _ in both.ended} == {"landed"}
    assert both.right
    assert len(here.borders) > borders + 50
    ahead.finish(monkeypatch)
    both.want(both.write(np.arange(SLOTS), order, grant=9))
    await until(lambda: len(both.ended) == both.writes)
    assert both.right
    await both.close()
    assert len(here.borders) == borders, "every part was let go"
    here.free(address)
