"""A prefill and a decode client in one process, whose decode side has HBM apart from its arena: two memories of equal
layout, each compared whole with what it should hold. Its writer has no GPU: rows for HBM land in a staging buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pdtransfer.client.clients import DecodeClient, PrefillClient
from pdtransfer.layout.layout import Component
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.hbm import Hbm
from pdtransfer.serve.engine_api import HBM_ALIGNMENT
from pdtransfer.transports.options import WriterOptions
from tests.support.client_pair import Expected, Pair, component, settings
from tests.support.layout_tensors import CANARY, Pool, mla

SLOTS = 256


@dataclass
class HbmPair(Pair):
    """`target` is the arena's DRAM, `hbm` the other memory."""

    hbm: np.ndarray = None  # type: ignore[assignment]
    arena_of: ArenaMemory = None  # type: ignore[assignment]


def in_hbm(one: Component, base: int, name: str | None = None) -> Component:
    """The same as an HBM component behind it, as it is announced to peers."""
    return msgspec.structs.replace(one, name=name or one.name, memory="hbm", layout=one.layout.rebase(base))


@contextmanager
def hbm_pair(
    *, twin: bool = True, staging_rows: int = SLOTS, source: tuple[str, int, int] = ("layer_first", 16, 512),
    target: tuple[str, int, int] = ("page_first", 1, SLOTS), **options: Any,
) -> Iterator[HbmPair]:  # fmt: skip
    """With `twin` a kv in each memory, else only the one in HBM."""
    model = mla(layers=range(2))
    pools = [Pool(name=name, model=model, page_size=page, slots=slots) for name, page, slots in (source, target)]
    pools[0].fill(np.arange(pools[0].slots))
    size = len(pools[1].memory)
    base = -(-size // HBM_ALIGNMENT) * HBM_ALIGNMENT
    buffer_bytes = staging_rows * pools[1].layout.row_bytes + 256
    arena = ArenaMemory.create(base, huge_pages="never", staging_bytes=buffer_bytes)
    arena.need_all()
    arena.prefault()
    arena.mapping.array[:] = CANARY
    arena.hbm = Hbm.of_process(base=base, byte_count=size)
    hbm = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(arena.hbm.address))
    hbm[:] = CANARY
    pools[1].__dict__["memory"] = arena.mapping.array[:size]
    pools[1].__dict__.pop("tensor", None)
    kv = component(pools[1])
    own = [kv, in_hbm(kv, base)] if twin else [in_hbm(kv, base)]
    prefill = PrefillClient(
        settings("p"), [component(pools[0])], writer=WriterOptions(pool_address=pools[0].memory.ctypes.data)
    )
    decode = DecodeClient(settings("d"), own, arena, **{"enable_hisparse": True} | options)
    try:
        with prefill, decode:
            pair = HbmPair(prefill, decode, *pools)
            pair.hbm, pair.arena_of = hbm, arena
            yield pair
            del pair
    finally:
        for name in ("memory", "tensor"):
            pools[1].__dict__.pop(name, None)
        with suppress(BufferError):  # a failed test's frames still look at it
            arena.close()


def expected(pair: HbmPair) -> Expected:
    """Canaries everywhere, in a memory of the target's layout."""
    like = Pool(
        name=pair.target.name, model=pair.target.model, page_size=pair.target.page_size, slots=pair.target.slots
    )
    return Expected(like)
