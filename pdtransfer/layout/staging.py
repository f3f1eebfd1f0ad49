"""The staging buffer: where rows of HBM components land in host memory whose writer does not reach the GPU.

Each such component gets a layout there like its own, page by page, with fewer slots. How many is decided here: as many
tokens of each component as the buffer holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from ..errors import LocalProtocolError
from ..limits import TOKENS_MAX
from .layout import Buffer, Component, Layout

_ALIGNMENT = 256  # of a buffer's first page: the widest access of any copy
_ROOMS = (4, 2)  # whose windows and states the buffer holds at once, if those of all take half of it at most


def packed(layout: Layout, *, slots: int, base: int) -> tuple[Layout, int]:
    """The same pages, fewer of them, with its buffers one behind the other from byte `base` on; and their end."""
    pages, few = layout.slots // layout.page_size, slots // layout.page_size
    buffers = layout.contiguous_buffers()
    starts, moves = [buffer.start for buffer in buffers], list[int]()
    for buffer in buffers:
        base = -(-base // _ALIGNMENT) * _ALIGNMENT
        moves.append(base - buffer.start)
        base += buffer.byte_count - (pages - few) * buffer.item_bytes
    planes = tuple(
        msgspec.structs.replace(plane, base=plane.base + moves[bisect_right(starts, plane.base) - 1])
        for plane in layout.planes
    )
    return Layout(planes, layout.page_size, slots), base


def staged(components: Sequence[Component], *, base: int, byte_count: int) -> tuple[Component, ...]:
    """The components of a node as writers that do not reach its GPU see them. Those in HBM are in the bytes [base, base
    + byte_count) of the arena.

    Raises LocalProtocolError, with the bytes that are needed, for a buffer that does not hold a page of each, and the
    windows and states of one room.
    """
    in_hbm = [component for component in components if component.memory == "hbm"]
    if not in_hbm:
        return tuple(components)
    buffers = [component.layout.contiguous_buffers() for component in in_hbm]
    sized = [*zip(in_hbm, buffers, strict=True)]
    if (least := _end(sized, 1, 1, base) - base) > byte_count:
        names = ", ".join(component.name for component in in_hbm)
        text = f"staging buffer (host_buffer_gib): {byte_count} bytes, rows of {names} take {least} at least"
        raise LocalProtocolError(text)
    rooms = next((count for count in _ROOMS if _end(sized, 1, count, base) - base <= byte_count // 2), 1)
    low, high = 1, TOKENS_MAX
    while low < high:  # the most tokens that fit
        middle = -(-(low + high) // 2)
        low, high = (middle, high) if _end(sized, middle, rooms, base) <= base + byte_count else (low, middle - 1)
    staged_components: list[Component] = []
    for component in components:
        if component.memory == "hbm":
            layout, base = packed(component.layout, slots=_slots(component, low, rooms), base=base)
            component = msgspec.structs.replace(component, layout=layout)  # noqa: PLW2901
        staged_components.append(component)
    return tuple(staged_components)


def _slots(component: Component, tokens: int, rooms: int) -> int:
    """The slots of a component in a buffer of this many tokens."""
    rows = rooms * component.rows(TOKENS_MAX)
    if component.span.kind == "all":
        rows = max(rooms, component.rows(tokens))
    page_size = component.layout.page_size
    return min(-(-rows // page_size) * page_size, component.layout.slots)


def _end(components: Sequence[tuple[Component, tuple[Buffer, ...]]], tokens: int, rooms: int, base: int) -> int:
    """One past the last byte of such a buffer."""
    for component, buffers in components:
        missing = (component.layout.slots - _slots(component, tokens, rooms)) // component.layout.page_size
        for buffer in buffers:
            base = -(-base // _ALIGNMENT) * _ALIGNMENT + buffer.byte_count - missing * buffer.item_bytes
    return base
