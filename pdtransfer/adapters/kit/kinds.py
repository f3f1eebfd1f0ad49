"""How the ranks of an engine share what a layer keeps: heads of KV, of which a drafter may have other ones than its
model, and states in parts that they share out as heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...layout.layout import Plane
from ...wire import Ranks


@dataclass(frozen=True, slots=True)
class Heads:
    """The KV heads of a layer, all ranks together, and this rank's part of them."""

    total: int
    ranks: Ranks
    size: int = 0  # numbers of a head; 0 if not known

    @property
    def count(self) -> int:
        """How many of them this rank has."""
        return max(1, self.total // self.ranks.tp_size)

    def of_layer(self, count: int, size: int = 0) -> Heads:
        """Those of a layer that has `count` heads of this `size` on this rank. The number that a configuration has
        decides alone where each rank has one head: several may have the same."""
        return Heads(count * self.ranks.tp_size // self._replicas(count), self.ranks, size)

    def first(self, count: int) -> int:
        """The number of this rank's first head, of `count` in a layer."""
        return (
            self.ranks.tp_rank * self.total // self.ranks.tp_size if self._replicas(count) > 1 else self._split(count)
        )

    def replica(self, count: int, dcp_size: int = 1) -> tuple[int, int]:
        """This rank's number among those that hold the same heads of the same tokens, and how many there are. Of ranks
        with the same heads, every `dcp_size`-th has the same tokens."""
        replicas = self._replicas(count)
        return self.ranks.tp_rank % replicas // dcp_size, replicas // dcp_size

    def _split(self, count: int) -> int:
        return self.ranks.tp_rank * count

    def _replicas(self, count: int) -> int:
        """Ranks share the heads out; where there are fewer heads than ranks, several hold the same one."""
        size = self.ranks.tp_size
        return size // self.total if count == 1 and self.total < size and size % self.total == 0 else 1


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
