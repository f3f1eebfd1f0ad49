"""What a Grant says: which rows of a room its writer has to write, and where they go."""

from __future__ import annotations

from collections.abc import Sequence

from ...layout.layout import Component
from ...limits import PART_EXTENTS_MAX
from ...wire import Part, pack_extents
from ..admission import Demand
from ..component_variants import leased, shares_prefixes
from ..slot_allocator import Extents, cut

_GRANT_BYTES = 256  # of a Grant's frame without its parts, and more than it has
_PART_BYTES = 32  # of a part without its extents, and more than it has


def demand_of(
    components: Sequence[Component], *, tokens: int, growth: int, prefix: int, keys: tuple[bytes, ...], sparse: bool
) -> Demand:
    """What a room of `tokens` tokens needs that may grow by `growth`, and the first `prefix` of which decode already
    holds. Of `keys`, those of its prompt's blocks, none where rooms of its kind share no prompts."""
    own = leased(components, enable_hisparse=sparse)
    rows, byte_count = list[int](), 0
    for component, whole in zip(components, own, strict=True):
        rows.append(component.rows(tokens + growth) if whole else 0)
        if whole:
            byte_count += component.bytes_of(component.rows(tokens) - prefix_rows(component, prefix))
    return Demand(tuple(rows), byte_count, keys if shares_prefixes(components, enable_hisparse=sparse) else ())


def parts_of(
    components: Sequence[Component], extents: Sequence[Extents], *, tokens: int, prefix: int
) -> tuple[Part, ...]:
    """One part for each of a session's components that has rows to send; growth is in none. A component of which the
    room has no slots is none of its own."""
    parts: list[Part] = []
    for index, (component, own) in enumerate(zip(components, extents, strict=True)):
        first = prefix_rows(component, prefix)
        rows = component.rows(tokens) - first
        if rows > 0 and len(own):
            parts.append(Part(index, first, rows, pack_extents(cut(own, first=first, count=rows))))
    return tuple(parts)


def fits_a_grant(extents: Sequence[Extents], frame_bytes_max: int) -> bool:
    """Whether one Grant can name so many extents: the protocol bounds those of a part, the peer a frame's bytes."""
    frame_bytes = _GRANT_BYTES
    for each in extents:
        if len(each) > PART_EXTENTS_MAX:
            return False
        frame_bytes += _PART_BYTES + 8 * len(each)
    return frame_bytes <= frame_bytes_max


def prefix_rows(component: Component, prefix: int) -> int:
    """Rows that decode already holds: whole rows of components that every token owns; the others cross anew."""
    return prefix // component.tokens_per_row if component.span.kind == "all" else 0
