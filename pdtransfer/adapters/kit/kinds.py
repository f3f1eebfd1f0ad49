"""What the layers of an engine keep of a request, and how its ranks share it: heads of KV, of which a drafter may have
others. States are in parts that they share out as heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import ConfigError
from ...layout.layout import Component, Layout, Plane, Span
from ...wire import Ranks

Memory = Literal["dram", "hbm"]
Locate = Callable[[int], tuple[int, Memory]]
"""What a buffer at an address counts its base from, and the memory that it is in."""


@dataclass(frozen=True, slots=True)
class CacheKind:
    """What a component of a cache keeps of a request: a row for each token, for each page, or one in all.

    `tail` is the row in which a prompt ends: `exact`, it ends with the prompt; `whole`, it has what lies behind the
    prompt as well. `filled`: decode asks for all tokens of its last page, and prefill repeats its own last row for
    them. `open`, of a stripe of the pages: another rank may have it. `holder`: the ranks have `heads` or `shares` of
    it, or `every` rank has all. Or a rank has its `own`, which is of no use to a rank of another number.
    """

    row: Literal["token", "page", "request"]
    tail: Literal["exact", "whole", "filled", "open"]
    holder: Literal["heads", "shares", "every", "own"]
    page_size: int = 1  # tokens
    window: int = 0  # tokens that attention looks back at, itself included; 0: all
    chunk: int = 0  # tokens of a chunk of chunked local attention; 0: none

    def of(self, page_size: int, **changed: Any) -> Self:
        """The same with pages of this size, and with other changes."""
        return replace(self, page_size=page_size, **changed)

    @property
    def of_page(self) -> int:
        """Rows of a page."""
        return self.page_size if self.row == "token" else 1

    @property
    def tokens_per_row(self) -> int:
        """Tokens of a row, as its component has them."""
        return self.page_size if self.row == "page" else 1

    def rows(self, tokens: int) -> int:
        """Rows of a prompt of this many tokens."""
        return min(tokens, 1) if self.row == "request" else -(-tokens // self.tokens_per_row)

    def whole_rows(self, tokens: int) -> int:
        """Rows that are complete once the first `tokens` of a longer prompt are computed: a state changes until its
        end."""
        return 0 if self.row == "request" else tokens // self.tokens_per_row

    def needed_from(self, tokens: int) -> int:
        """The first row that is still needed once this many tokens are computed: engines free the pages before it."""
        if self.window:
            return max(0, tokens - self.window + 1) // self.tokens_per_row
        return tokens // self.chunk * self.chunk // self.tokens_per_row if self.chunk else 0

    def expand(self, pages: ArrayLike) -> NDArray[np.int64]:
        """The slots of all rows of these pages, int64; -1 for those of a page -1."""
        pages = np.asarray(pages, np.int64).reshape(-1, 1)
        return np.where(pages < 0, -1, pages * self.of_page + np.arange(self.of_page)).reshape(-1)

    def slots(self, pages: ArrayLike, tokens: int) -> NDArray[np.int64]:
        """A slot for each row of a prompt in these pages, int64; too few where pages are missing. It is -1 in a page
        -1, and for the last row where another rank has it."""
        slots, rows = self.expand(pages), self.rows(tokens)
        if self.tail == "open" and len(slots) == rows - 1:
            return np.append(slots, -1)
        return slots[:rows] if self.tail == "exact" else slots

    def component(
        self, name: str, memory: Memory, planes: Sequence[Plane], slots: int, page_size: int = 1
    ) -> Component:
        """Such a component, in pages of `page_size` rows. Raises ConfigError for planes that cannot be one."""
        span = Span("once" if self.row == "request" else "all")
        try:
            return Component(name, memory, self.tokens_per_row, span, Layout(tuple(planes), page_size, slots))
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None

    def replica(self, ranks: Ranks) -> tuple[int, int]:
        """A rank's number among those that hold the same of what is no heads, and how many there are."""
        return (ranks.tp_rank, ranks.tp_size) if self.holder == "every" else (0, 1)

    def share(self, ranks: Ranks) -> int:
        """The number of a rank's share of what is no heads: `every` rank has the first one."""
        return 0 if self.holder == "every" else ranks.tp_rank


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
        rank, size = self.ranks.tp_rank, self.ranks.tp_size
        return rank * self.total // size if self._replicas(count) > 1 else rank * count

    def replica(self, count: int, dcp_size: int = 1) -> tuple[int, int]:
        """This rank's number among those that hold the same heads of the same tokens, and how many there are. Of ranks
        with the same heads, every `dcp_size`-th has the same tokens."""
        replicas = self._replicas(count)
        return self.ranks.tp_rank % replicas // dcp_size, replicas // dcp_size

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
    transferred: bool = True  # False of room that is empty once a prompt has been computed


def state_planes(
    parts: Sequence[StatePart], *, layer: int, name: str, base: int, stride: int, rank: int
) -> list[Plane]:
    """One for each part of a layer's state that is transferred, with its kind in the place of {} in `name`. Parts lie
    one behind the other from `base` on; the shares of the rank of this number are heads."""
    planes: list[Plane] = []
    for part in parts:
        row_bytes = part.shares * part.share_bytes
        if part.transferred:
            plane = Plane(
                layer=layer, kind=name.format(part.kind), dtype="uint8", head_start=rank * part.shares,
                head_count=part.shares, base=base, page_stride=stride, row_stride=stride, row_bytes=row_bytes,
            )  # fmt: skip
            planes.append(plane)
        base += row_bytes
    return planes


def described(parts: Sequence[StatePart], tp_size: int) -> str:
    """A state as peers compare it: of all ranks together."""
    return " ".join(f"{part.kind}:{part.shares * tp_size}x{part.share_bytes}" for part in parts if part.transferred)
