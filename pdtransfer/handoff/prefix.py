"""The prefix cache: blocks of prompts in the arena, shared and read-only, until their slots are needed.

A block's key is a digest of all the prompt's tokens up to the block's end. So equal keys mean equal prefixes of one
model, its weights and a salt. A claim on a block includes all blocks before it. Idle blocks are kept in the order of
last use, the deepest first, so that the oldest is always a leaf.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import lcm

import numpy as np

from ..layout.layout import Component
from ..limits import TOKENS_MAX, Limits
from .component_variants import leased
from .prefix_keys import RunningKeys, block_keys, root_key
from .slot_allocator import Block, Extents, Holding, SlotAllocator, cut


def block_tokens_of(components: Sequence[Component], least: int) -> int:
    """Tokens of a block: the fewest, at least `least`, that fill whole pages of every component with a row for each
    token. 0 without such a component, or if a block would be longer than any prompt."""
    pages = [c.layout.page_size * c.tokens_per_row for c in components if c.span.kind == "all"]
    page = lcm(*pages)
    block_tokens = -(-least // page) * page
    return block_tokens if pages and block_tokens <= TOKENS_MAX else 0


def prefix_rows(component: Component, prefix: int) -> int:
    """Rows that decode already has: whole rows of components that every token owns; the others are sent again."""
    return prefix // component.tokens_per_row if component.span.kind == "all" else 0


def piece_rows(component: Component, *, tokens: int, prefix: int, stop: int) -> tuple[int, int]:
    """The rows [first, end) of tokens [prefix, stop) of a room: those whose last token is among them, and windows and
    states with the room's last token. So the pieces of a room have each row once, wherever it is cut."""
    if stop >= tokens:
        return prefix_rows(component, prefix), component.rows(tokens)
    return prefix_rows(component, prefix), prefix_rows(component, stop)


class PrefixCache:
    """Leases slots of an arena and keeps the prompts that rooms leave; without `enabled` it keeps none."""

    def __init__(
        self, arena: SlotAllocator, limits: Limits, *, model: str, weights: bytes, enabled: bool = True
    ) -> None:
        self.arena = arena
        shared = leased(arena.components, enable_hisparse=True)
        components = [component for component, is_shared in zip(arena.components, shared, strict=True) if is_shared]
        self.block_tokens = block_tokens_of(components, limits.prefix_block_tokens) if enabled else 0
        spans = [c.tokens_per_row if c.span.kind == "all" and c in components else 0 for c in arena.components]
        self._rows = tuple(self.block_tokens // tokens_per_row if tokens_per_row else 0 for tokens_per_row in spans)
        self._block_bytes = sum(c.bytes_of(rows) for c, rows in zip(arena.components, self._rows, strict=True))
        self._blocks_max = limits.prefix_blocks_max
        self._model, self._weights = model, weights
        self._blocks: dict[bytes, Block] = {}
        self._idle: OrderedDict[bytes, Block] = OrderedDict()  # without claims, the next to be evicted first
        self.queried_tokens = self.hit_tokens = self.evicted_blocks = 0
        self.changes = 0  # of the set of blocks and of their claims

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def claimed(self) -> int:
        """Blocks in use."""
        return len(self._blocks) - len(self._idle)

    def bytes_of(self, tokens: int) -> int:
        """The bytes that `tokens` cached tokens, in whole blocks, need not send."""
        return tokens // self.block_tokens * self._block_bytes if self.block_tokens else 0

    def keys(self, prompt: bytes, salt: bytes) -> tuple[bytes, ...]:
        """The keys of a prompt's full blocks; pure, so that any thread may call it."""
        if not self.block_tokens:
            return ()
        root = root_key(self._model, self._weights, salt)
        return block_keys(root, prompt, block_tokens=self.block_tokens, blocks_max=self._blocks_max)

    def running_keys(self, prompt: bytes, salt: bytes) -> RunningKeys:
        """The keys of a prompt's full blocks, to which those of its answer are added. Only where prompts are kept."""
        root = root_key(self._model, self._weights, salt)
        return RunningKeys(root, prompt, block_tokens=self.block_tokens, blocks_max=self._blocks_max)

    def longest(self, keys: Sequence[bytes]) -> list[Block]:
        """The cached blocks of these keys, up to the first that is missing."""
        blocks: list[Block] = []
        for key in keys:
            if (block := self._blocks.get(key)) is None:
                break
            blocks.append(block)
        return blocks

    def cached_tokens(self, keys: Sequence[bytes]) -> int:
        """The tokens of the blocks that `longest` would return, in as many look-ups as the number of keys has binary
        digits. No block is given up before those behind it."""
        first_missing = bisect_left(keys, True, key=lambda key: key not in self._blocks)
        return first_missing * self.block_tokens

    @property
    def free_slots(self) -> list[int]:
        """Slots of each component that may be leased: free ones, and those of blocks without claims."""
        return [
            free.free_slots + len(self._idle) * rows for free, rows in zip(self.arena.free, self._rows, strict=True)
        ]

    def scarcest(self, *, enable_hisparse: bool) -> tuple[int, int]:
        """The tokens that may be leased to rooms of this kind, and the tokens that all backed slots hold.

        The first is the second times the smallest free fraction of a component that such rooms use. Where no component
        has a row for each token, they are rooms.
        """
        used = leased(self.arena.components, enable_hisparse=enable_hisparse)
        parts = zip(self.arena.components, self.free_slots, self.arena.free, used, strict=True)
        counted = [(c, slots, free.ready) for c, slots, free, is_used in parts if is_used]
        total = min([ready * c.tokens_per_row for c, _, ready in counted if c.span.kind == "all"] or [counted[0][2]])
        return min([slots * total // max(1, ready) for _, slots, ready in counted]), total

    def tokens_of(self, byte_count: int) -> int:
        """`byte_count` bytes of slots as tokens of rooms without HiSparse, in proportion to all slots."""
        used = leased(self.arena.components, enable_hisparse=False)
        parts = zip(self.arena.components, self.arena.free, used, strict=True)
        total = sum([c.bytes_of(free.ready) for c, free, is_used in parts if is_used])
        return byte_count * self.scarcest(enable_hisparse=False)[1] // max(1, total)

    def allocate(self, rows: Sequence[int], blocks: list[Block], *, queried: int = 0) -> Holding | None:
        """Leases slots for `rows[i]` rows of component i; `blocks` hold the first of them. None, with nothing changed,
        if a component lacks slots. Blocks without claims are evicted if needed. `queried` is the number of keys looked
        up."""
        rest = rows
        if blocks:
            rest = [count - len(blocks) * rows_each for count, rows_each in zip(rows, self._rows, strict=True)]
        holding = self.arena.allocate(rest)
        if holding is None:
            needed = self._to_evict(rest, blocks)
            if needed is None:
                return None
            self._claim(blocks)
            self._evict(needed)
            holding = self.arena.allocate(rest)
            assert holding is not None
        else:
            self._claim(blocks)
        self.changes += 1
        if blocks:
            holding.blocks, holding.prefix = blocks, len(blocks) * self.block_tokens
            holding.extents = tuple(self._extents(blocks, index, extents) for index, extents in enumerate(holding.own))
        self.queried_tokens += queried * self.block_tokens
        self.hit_tokens += holding.prefix
        return holding

    def _to_evict(self, rest: Sequence[int], blocks: Sequence[Block]) -> int | None:
        """The number of idle blocks, none of `blocks`, to evict for `rest` rows of each component; None if all are too
        few."""
        idle = len(self._idle) - sum(not block.claims for block in blocks)
        needed = 0
        for slots, rows_each in zip(self.arena.lacking(rest), self._rows, strict=True):
            if slots > idle * rows_each:
                return None
            needed = max(needed, -(-slots // rows_each) if slots else 0)
        return needed

    def keep(self, holding: Holding, keys: Sequence[bytes]) -> None:
        """Shares the full blocks of a room's prompt, which has arrived and on which no lease is left. At the room's end
        those of its answer as well, by the keys of both.

        A block that is cached already stays the room's own. Keys of more blocks than the room has slots for are left
        out.
        """
        assert holding.claims == 1, "a writer may still hold a lease on it"
        self.changes += 1
        slots = [int(extents[:, 1].sum()) for extents in holding.extents]
        keys = keys[: min((count // rows for count, rows in zip(slots, self._rows, strict=True) if rows), default=0)]
        before, blocks = len(holding.blocks), self.longest(keys)
        shared = len(blocks)
        self._claim(blocks[before:])
        fresh = list(keys[shared:])
        self._evict(min(len(self._idle), max(0, len(self._blocks) + len(fresh) - self._blocks_max)))
        del fresh[max(0, self._blocks_max - len(self._blocks)) :]
        runs = [
            _pieces(extents, first=shared * rows, size=rows, count=len(fresh))
            for extents, rows in zip(holding.extents, self._rows, strict=True)
        ]
        for key, pieces in zip(fresh, zip(*runs, strict=True), strict=True):
            block = self._blocks[key] = Block(key, pieces)
            blocks.append(block)
        holding.blocks = blocks
        holding.own = tuple(
            _without(kept, extents, before=before * rows, shared=shared * rows, end=len(blocks) * rows)
            for kept, extents, rows in zip(holding.own, holding.extents, self._rows, strict=True)
        )

    def drop(self, holding: Holding) -> bool:
        """Ends one claim; returns whether it was the last, so that the holding's own slots are free and its blocks
        idle."""
        if not self.arena.drop(holding):
            return False
        self.changes += 1
        for block in reversed(holding.blocks):
            block.claims -= 1
            if not block.claims:
                self._idle[block.key] = block
        return True

    def clear(self) -> None:
        """Evicts all blocks without claims."""
        self._evict(len(self._idle))

    def _claim(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.claims:
                del self._idle[block.key]
            block.claims += 1

    def _evict(self, count: int) -> None:
        """Evicts the `count` blocks that have been idle for longest."""
        if not count:
            return
        self.changes += 1
        gone = [self._idle.popitem(last=False)[1] for _ in range(count)]
        for block in gone:
            del self._blocks[block.key]
        for index, free in enumerate(self.arena.free):
            free.free(_joined(sorted(run for block in gone for run in block.runs[index])))
        self.evicted_blocks += count

    @staticmethod
    def _extents(blocks: Sequence[Block], component: int, extents: Extents) -> Extents:
        """All rows of a component in order."""
        return np.concatenate([_joined(run for block in blocks for run in block.runs[component]), extents])


def _joined(runs: Iterable[tuple[int, int]]) -> Extents:
    """The same slots in the same order, with adjacent runs joined."""
    joined: list[list[int]] = []
    for start, count in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1][1] += count
        else:
            joined.append([start, count])
    return np.array(joined, dtype=np.int64).reshape(-1, 2)


def _without(kept: Extents, extents: Extents, *, before: int, shared: int, end: int) -> Extents:
    """The extents that stay a room's own. Of `extents`, all of its slots, [before, end) become blocks. [before, shared)
    are cached already and stay its own, as others did that stand first in `kept`. So do all from `end` on."""
    total = int(extents[:, 1].sum())
    rest, twice = cut(extents, first=end, count=total - end), int(kept[:, 1].sum()) - (total - before)
    if not twice and before == shared:
        return rest
    parts = [cut(kept, first=0, count=twice), cut(extents, first=before, count=shared - before), rest]
    return np.concatenate(parts)


def _pieces(extents: Extents, *, first: int, size: int, count: int) -> list[tuple[tuple[int, int], ...]]:
    """The runs of `count` pieces of `size` slots each, from the slot `first` of `extents` on."""
    if len(extents) == 1 and size:
        start = int(extents[0, 0]) + first
        return [((slot, size),) for slot in range(start, start + count * size, size)]
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    assigned = 0  # slots assigned so far
    for start, length in cut(extents, first=first, count=count * size).tolist():
        used = 0
        while used < length:
            taken = min(length - used, size - assigned % size)
            pieces[assigned // size].append((start + used, taken))
            used, assigned = used + taken, assigned + taken
    return [tuple(piece) for piece in pieces]
