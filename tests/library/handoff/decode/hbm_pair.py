"""A prefill and a decode client in one process, whose decode side has HBM apart from its arena: two memories of equal
layout, each compared whole with what it should hold. Its writer has no GPU: rows for HBM land in a staging buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from pdtransfer.layout.layout import Component
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.hbm import Hbm
from pdtransfer.serve.engine_api import HBM_ALIGNMENT
from tests.support.client_pair import Pair, client_pair
from tests.support.layout_tensors import CANARY, Pool


def in_hbm(one: Component, base: int) -> Component:
    """The same as an HBM component behind it, as it is announced to peers."""
    return msgspec.structs.replace(one, memory="hbm", layout=one.layout.rebase(base))


def memory_of(hbm: Hbm) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * hbm.byte_count).from_address(hbm.address))


@contextmanager
def hbm_pair(*, twin: bool = True, staging_rows: int = 256, **options: Any) -> Iterator[tuple[Pair, np.ndarray]]:
    """The pair, whose `target` is the arena's DRAM, and HBM's bytes. With `twin` a kv in each memory, else in HBM."""
    made: list[Hbm] = []

    def arena_of(target: Pool) -> ArenaMemory:
        size, buffer_bytes = len(target.memory), staging_rows * target.layout.row_bytes + 256
        base = -(-size // HBM_ALIGNMENT) * HBM_ALIGNMENT
        arena = ArenaMemory.create(base, huge_pages="never", staging_bytes=buffer_bytes)
        arena.need_all()
        arena.prefault()
        arena.hbm = Hbm.of_process(base=base, byte_count=size)
        memory_of(arena.hbm)[:] = CANARY
        made.append(arena.hbm)
        return arena

    def components(kv: Component) -> list[Component]:
        return [kv] * twin + [in_hbm(kv, made[0].base)]

    given = {"enable_hisparse": True} | options
    with client_pair(arena_of=arena_of, components=components, decode_options=given) as pair:
        yield pair, memory_of(made[0])
