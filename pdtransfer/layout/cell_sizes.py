"""When a chunk's layers that are computed are enough for a write.

Each write has a fixed cost on the loop and on the GPU. Decode waits for whatever leaves last when prefill ends. So
cells are as large as is cheap, and get smaller towards the end of a chunk.
"""

from __future__ import annotations

from .layout import Layout

WHOLE_BYTES_MAX = 16 << 20  # a chunk of at most this size leaves in one cell
# Smallest cell of a larger chunk while as much is still to come: from this size on the copy engine is used.
CELL_BYTES_MIN = 8 << 20


def is_full(layout: Layout, layers: tuple[int, int], rows: int, *, cell_bytes_min: int = CELL_BYTES_MIN) -> bool:
    """True if layers [first, end) of this many rows make a cell of sufficient size, or all that their chunk has left.
    The chunk's layers are computed in order."""
    left = rows * layout.row_bytes_of(layers[1], layout.layer_range[1])
    if not left or rows * layout.row_bytes <= WHOLE_BYTES_MAX:
        return not left
    return rows * layout.row_bytes_of(*layers) >= min(cell_bytes_min, left)
