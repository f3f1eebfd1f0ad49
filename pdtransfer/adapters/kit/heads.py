"""How the ranks of an engine share the KV heads of a layer: a drafter may have other heads than its model."""

from __future__ import annotations

from dataclasses import dataclass

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
