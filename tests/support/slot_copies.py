"""Pools with known rows, any copy between two of them, and what it has to leave, by the tensors' own indexing."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pdtransfer.kernels.pools import PageSlots, Pool
from tests.support.layout_tensors import Model, models, pools
from tests.support.layout_tensors import Pool as Tensors


def pool_of(tensors: Tensors, **how: Any) -> Pool:
    """Its memory in this process."""
    return Pool(layout=tensors.layout, address=tensors.memory.ctypes.data, **how)


def filled(name: str, model: Model, page_size: int, pages: int, *, content: bool) -> Tensors:
    tensors = Tensors(name=name, model=model, page_size=page_size, slots=pages * page_size)
    if content:
        tensors.fill(np.arange(tensors.slots) + 1_000)
    return tensors


def wanted(source: Tensors, target: Tensors, source_slots: Any, target_slots: Any) -> Any:
    """The target's whole memory after the copy, by the tensors' indexing."""
    after = replace(target)
    after.memory[:] = target.memory
    of, at = (np.asarray(slots, np.int64) for slots in (source_slots, target_slots))
    for kind, *_ in target.model.parts:
        rows = source.rows_of(kind)[:, :, of // source.page_size, of % source.page_size]
        after.rows_of(kind)[:, :, at // target.page_size, at % target.page_size] = rows
    return after.memory


@st.composite
def copies(draw: Any) -> tuple[Tensors, Tensors, Any, Any, int]:
    """Two pools of one model, slots or pages on either side, and how many rows."""
    model = draw(models())
    source, target = draw(pools(model)), draw(pools(model))
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    sides = []
    for side in (source, target):
        pages = draw(st.booleans())
        granule = side.page_size if pages else 1
        entries = np.array(rng.sample(range(side.slots // granule), side.slots // granule))
        entries = entries.astype(draw(st.sampled_from([np.int32, np.int64])))
        if draw(st.integers(0, 4)) == 0:
            sides.append((range(len(entries)), granule))  # the whole pool, in order
        else:
            sides.append((entries, granule))
    rows = rng.randint(1, min(len(entries) * granule for entries, granule in sides))
    return source, target, *(PageSlots(e) if granule > 1 else e for e, granule in sides), rows


def slots_of(slots: Any, tensors: Tensors, rows: int) -> Any:
    if not isinstance(slots, PageSlots):
        return np.asarray(slots)[:rows]
    return (np.asarray(slots.entries)[:, None] * tensors.page_size + np.arange(tensors.page_size)).reshape(-1)[:rows]
