"""The states of layers that keep no KV, in parts that tensor parallel ranks share out as they share heads of KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...layout.layout import Plane


@dataclass(frozen=True, slots=True)
class StatePart:
    """Shares of equal bytes, one behind the other, each some heads or channels."""

    kind: str
    shares: int  # of this rank, the same number in all parts of a component
    share_bytes: int
    crosses: bool = True  # False of room that nothing is in when a prompt has been computed


def state_planes(
    parts: Sequence[StatePart], *, layer: int, name: str, base: int, stride: int, rank: int
) -> list[Plane]:
    """One for each part of a layer's state that crosses, with its kind in the place of {} in `name`. Parts lie one
    behind the other from `base` on; the shares of the rank of this number are heads."""
    planes: list[Plane] = []
    for part in parts:
        row_bytes = part.shares * part.share_bytes
        if part.crosses:
            plane = Plane(
                layer=layer, kind=name.format(part.kind), dtype="uint8", head_start=rank * part.shares,
                head_count=part.shares, base=base, page_stride=stride, row_stride=stride, row_bytes=row_bytes,
            )  # fmt: skip
            planes.append(plane)
        base += row_bytes
    return planes


def described(parts: Sequence[StatePart], tp_size: int) -> str:
    """A state as peers compare it: of all ranks together."""
    return " ".join(f"{part.kind}:{part.shares * tp_size}x{part.share_bytes}" for part in parts if part.crosses)
