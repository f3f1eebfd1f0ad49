"""A producer that is late: rows of a pool that hold something else until the event that a cell waits for."""

from __future__ import annotations

import numpy as np

from tests.support.client_pair import Pair

STALE = 0xA5


def layer_bytes(pair: Pair, layer: int) -> np.ndarray:
    """Which bytes of the source pool are this layer's rows, bool."""
    own = np.zeros(len(pair.source.memory), bool)
    layout, slots = pair.source.layout, np.arange(pair.source.slots)
    for number, plane in enumerate(layout.planes):
        if plane.layer == layer:
            own[layout.address(number, slots)[:, None] + np.arange(plane.row_bytes)] = True
    return own


def landed(pair: Pair, slots: np.ndarray, layer: int) -> np.ndarray:
    """The bytes of these slots of the arena, one layer's."""
    layout = pair.target.layout
    rows = [
        pair.arena[layout.address(number, slots)[:, None] + np.arange(plane.row_bytes)]
        for number, plane in enumerate(layout.planes)
        if plane.layer == layer
    ]
    return np.concatenate(rows, axis=1)
