"""What the scheduler's side of an engine has the workers do in a step, and how block tables become rows.

Orders count in blocks of a KV cache group. A row of a room is a whole block: its component has as many tokens a row as
the group a block. Where engines of other kinds or block sizes are peers, it is a token.

Layers of linear attention and of convolutions (Mamba, gated delta nets) keep a state of the tokens so far, which each
step overwrites. vLLM has it in a block as well. The only one of the request, or with prefix caching the one at the last
computed token's place in the table. A room has one row of such a group, that block, once its tokens are computed.

With decode context parallelism the blocks of a prompt go to the ranks in turn. Block number i is rank i % size's, where
it is the block of the table's entry i // size. Orders number the blocks of all ranks, and name each by that entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..kit.kinds import CacheKind

NULL_BLOCK = 0  # stands in a window's block table for blocks that are gone


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV cache group: layers that share a block table."""

    index: int  # in vLLM's list of groups, and in every block table
    kind: CacheKind  # a page is a block
    dcp_size: int = 1  # ranks that have its blocks in turn
    stripes: int = 1  # components that have its blocks in turn: a multiple of dcp_size
    host: bool = False  # whether it lies in HiSparse's host pool, which has blocks of its own

    @property
    def name(self) -> str:
        """Its component's name."""
        return f"group{self.index}"

    @property
    def state(self) -> bool:
        """True if its layers keep a state of a request in place of KV."""
        return self.kind.row == "request"

    def blocks(self, table: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Of a request's block table, the block of each row of a prompt of this many tokens."""
        end = -(-tokens // self.kind.page_size)
        blocks = table if self.dcp_size == 1 else [block for block in table for _ in range(self.dcp_size)]
        return tuple(blocks[end - self.kind.rows(tokens) : end])


@dataclass(frozen=True, slots=True)
class Open:
    """Prefill: begin the room of a request."""

    request_id: str
    label: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [first, end) of one group, in `blocks`: one block a row, from the room's row 0 on."""

    group: int
    first: int
    end: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill: this step computes these rows of a request; after the `last` one its room is finished."""

    request_id: str
    rows: tuple[Rows, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Receive:
    """Decode: a room lands in the blocks of a request, one slot a block and group; -1 where a block is not transferred.

    A request that needs nothing is not `awaited`: its room lands without a byte, so that prefill need not wait for it.
    """

    request_id: str
    room: int
    sources: tuple[str, ...]
    tokens: int
    prefix: int  # tokens that the engine has
    slots: tuple[tuple[int, ...], ...]
    awaited: bool = True


@dataclass(frozen=True, slots=True)
class Withdraw:
    """A room that this engine will not have (any more). Decode: the ranks at `sources` fail it. Without `sources`,
    prefill: it fails here, and decode's Grants of it do. The request may be known to the worker, or may not."""

    request_id: str
    room: int
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """Decode: the request's parameters are wrong, and its load fails; these blocks were meant for it."""

    request_id: str
    blocks: tuple[int, ...] = ()


@dataclass
class RankRuns:
    """What a rank that runs announces to the scheduler."""

    endpoint: str  # prefill: where it listens, [KEY@]tcp://host:port; else empty
    identity: dict[str, Any]  # what peers compare, as `shown` makes it
    block_bytes: tuple[int, ...]  # of each group, of a block in all of its components at this rank


@dataclass(slots=True)
class Orders:
    """All that is to be done in one step, in this order."""

    quiesce: list[str] = field(default_factory=list[str])  # requests of prefill whose blocks are about to be reused
    opens: list[Open] = field(default_factory=list[Open])
    receives: list[Receive] = field(default_factory=list[Receive])
    refusals: list[Refuse] = field(default_factory=list[Refuse])
    aborts: list[str] = field(default_factory=list[str])
    withdrawals: list[Withdraw] = field(default_factory=list[Withdraw])
    chunks: list[Chunk] = field(default_factory=list[Chunk])


def slots_of(group: KVGroup, table: Sequence[int], tokens: int, prefix: int) -> tuple[int, ...]:
    """A block table as a room's slots: -1 for blocks of the prefix, which are there, and for a window's null blocks.
    Blocks behind the prompt are left out."""
    first = group.kind.whole_rows(prefix)
    return tuple(
        -1 if row < first or block == NULL_BLOCK else block for row, block in enumerate(group.blocks(table, tokens))
    )
