"""vLLM's KV cache as components, whose rows are whole blocks: a plane for each layer, which splits at its heads.

vLLM shows each layer as [blocks, heads, tokens, width]. The attention backend decides how a block holds its tokens, so
blocks cross as they are, and both engines need the same block size and backend. Heads lie apart, so that engines of
other tensor-parallel sizes take their own.

Where it is known how blocks hold their tokens, rows may be tokens: then block sizes, backends and engines may differ.
A cache may be described by both. Its tokens then stand in for its blocks, with peers whose blocks are others.

The states of linear attention and of convolutions are one row a request (states.py).

With decode context parallelism a group's blocks are shared out among several components, its stripes: component i of n
has blocks i, i + n, i + 2 n and so on. Its rows are n blocks apart, and have the tokens of one block. All engines of a
fleet have equally many stripes, as many as the largest of them has such ranks. Each rank has those of its own blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, LocalProtocolError
from ...layout.layout import DTYPE_BYTES, Component, Layout, Plane, Span
from ...layout.layout_builders import Axis, strided_layout
from ...limits import COMPONENTS_MAX
from ..kit.heads import Heads
from .orders import KVGroup
from .states import StatePart

KV, LATENT = "kv", "latent"  # a component, and a kind in it, as all adapters name them where rows are tokens


@dataclass(frozen=True, slots=True)
class BlockRows:
    """How vLLM's blocks of a group become rows of its component."""

    group: int  # its index in the list of groups
    component: Component
    block_size: int  # tokens; 1 of a state, which is one row
    parts: int = 1  # pages of a block, where rows are tokens
    stripe: int = 0
    stripes: int = 1

    @property
    def of_block(self) -> int:
        """Rows of a block."""
        return self.block_size * self.stripes // self.component.tokens_per_row

    def rows_of(self, first: int, end: int) -> tuple[int, int]:
        """The rows of blocks [first, end) of a request; of a stripe possibly none."""
        first, end = (-(-(block - self.stripe) // self.stripes) for block in (first, end))
        return first * self.of_block, end * self.of_block

    def pages(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """The pages of these blocks of a request, int64."""
        striped = np.array(blocks[self.stripe :: self.stripes], np.int64)
        return (striped[:, None] * self.parts + np.arange(self.parts)).reshape(-1)

    def slots(self, blocks: Sequence[int], tokens: int) -> NDArray[np.int64]:
        """The slots of a prompt in these blocks, int64, one a row; -1 for each row of a block -1, and for the last row
        of a stripe that has one block less than others."""
        striped, rows = np.array(blocks[self.stripe :: self.stripes], np.int64), self.component.rows(tokens)
        slots = striped[:, None] * self.of_block + np.arange(self.of_block)
        slots = np.where(slots < 0, -1, slots).reshape(-1)[:rows]
        return np.append(slots, -1) if len(slots) == rows - 1 and self.stripes > 1 else slots


@dataclass(frozen=True, slots=True)
class Pools:
    """The components of a KV cache, and after which layer's name each (group, model layer) is complete. A group has one
    component, or its stripes.

    Components that are `stand_ins` for one of the others, by name, follow those.
    """

    rows: tuple[BlockRows, ...]
    replicas: dict[str, tuple[int, int]]
    layers: tuple[tuple[int, ...], ...]  # of each group
    complete_after: dict[str, tuple[int, int]]  # (index of the group, layer)
    stand_ins: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def components(self) -> tuple[Component, ...]:
        """Of all groups."""
        return tuple(block_rows.component for block_rows in self.rows)

    def or_tokens(self, tokens: Pools, fact: str) -> Pools:
        """The same blocks, which cross to peers with this `fact` of their blocks, and `tokens` of the same cache, which
        cross to others."""
        [blocks], [by_token] = self.rows, tokens.rows
        name = f"{blocks.component.name}-{fact}"
        named = replace(blocks, component=msgspec.structs.replace(blocks.component, name=name))
        replicas = {name: self.replicas[blocks.component.name]} | tokens.replicas
        return replace(self, rows=(named, by_token), replicas=replicas, stand_ins={by_token.component.name: name})


def pools(
    views: Mapping[str, Any],
    groups: Sequence[tuple[KVGroup, Sequence[str]]],
    *,
    blocks: int,
    base: int,
    heads: Heads,
    memory: Literal["dram", "hbm"] = "dram",
    kinds: Mapping[str, Mapping[str, Any]] | None = None,
    states: Mapping[str, Sequence[StatePart]] | None = None,
) -> Pools:
    """Components of `groups`, each with the names of its layers, whose planes begin at offsets from `base`.

    `views` are torch tensors, [blocks, heads, tokens, width], and of layers with `states` pages, [blocks, 1, 1, bytes].
    Layers that share another one's cache are left out. With `kinds`, which has token_rows.Kinds by the layers' names,
    rows are tokens. Raises ConfigError, with the layer's name, for a cache that cannot cross.
    """
    count = sum(group.stripes // group.dcp_size for group, _ in groups)  # of components
    if not 1 <= count <= COMPONENTS_MAX:
        raise ConfigError(f"KV cache groups: {count}, must be 1 to {COMPONENTS_MAX}")
    rows: list[BlockRows] = []
    replicas: dict[str, tuple[int, int]] = {}
    layers: list[tuple[int, ...]] = []
    complete_after: dict[str, tuple[int, int]] = {}
    for index, (group, names) in enumerate(groups):
        planes: list[Plane] = []
        page_sizes: set[int] = set()
        name_at: dict[int, str] = {}  # by address
        seen: Counter[int] = Counter()
        last: dict[int, str] = {}  # by layer
        replica = (0, 1)
        for order, name in enumerate(names):
            if name not in views or name_at.setdefault(views[name].data_ptr(), name) != name:
                continue
            layer = layer_number(name, order)
            number = str(seen[layer] or "")
            seen[layer] += 1
            last[layer] = name
            page_sizes.add(views[name].shape[2])
            if group.state:
                rank = 0 if group.replicated else heads.ranks.tp_rank
                planes += _state_planes(name, views[name], (states or {})[name], layer, number, blocks, base, rank)
                replica = (heads.ranks.tp_rank, heads.ranks.tp_size) if group.replicated else (0, 1)
                continue
            if kinds is None:
                planes += _planes(name, views[name], layer, f"kv{number}", blocks=blocks, base=base, heads=heads)
            else:
                planes += _token_planes(name, kinds[name], layer, number, base=base, heads=heads)
            replica = _replica(name, views[name], group, blocks, heads)
        if not planes:
            raise ConfigError(f"{group.name}: none of its layers has a KV cache: {', '.join(names)}")
        component = group.name if kinds is None or len(groups) > 1 else KV
        page_size, block_size, tokens_per_row, parts = 1, group.block_size, group.block_size, 1
        if group.state:
            block_size = tokens_per_row = 1
        elif kinds is not None:
            page_size, tokens_per_row = min(page_sizes), 1
            parts = group.block_size // page_size
            if group.window or group.chunk or page_sizes != {page_size} or parts * page_size != group.block_size:
                raise ConfigError(
                    f"{group.name}: windows, and blocks of {group.block_size} tokens in pages of {sorted(page_sizes)}, "
                    f'cannot cross by tokens: set rows to "blocks", or --disable-hybrid-kv-cache-manager'
                )  # fmt: skip
        try:
            layout = Layout(tuple(planes), page_size, blocks * parts * page_size)
            span = Span("once" if group.state else "all")
            whole = Component(component, memory, tokens_per_row, span, layout)
            stripes = _stripes(BlockRows(index, whole, block_size, parts), group, heads)
        except ValueError as error:
            raise ConfigError(f"{group.name}: {error}") from None
        rows += stripes
        replicas |= {stripe.component.name: replica for stripe in stripes}
        layers.append(tuple(last))
        complete_after |= {name: (index, layer) for layer, name in last.items()}
    return Pools(tuple(rows), replicas, tuple(layers), complete_after)


def _replica(name: str, view: Any, group: KVGroup, blocks: int, heads: Heads) -> tuple[int, int]:
    """This rank's number among those that have the same of a layer's KV, and how many there are."""
    _, replicas = heads.replica(view.shape[1])
    if group.stripes > 1 and (view.shape[0] != blocks or replicas % group.dcp_size):
        raise ConfigError(
            f"{name}: cannot cross with decode context parallelism: {view.shape[0]} blocks of the attention backend "
            f"for {blocks} of vLLM's, and {replicas} ranks with the same KV heads"
        )
    return heads.replica(view.shape[1], group.dcp_size)


def _stripes(whole: BlockRows, group: KVGroup, heads: Heads) -> list[BlockRows]:
    """The stripes of a group that this rank has."""
    component = whole.component
    if group.stripes == 1:
        return [whole]
    striped = msgspec.structs.replace(component, tokens_per_row=component.tokens_per_row * group.stripes)
    return [
        replace(
            whole, component=msgspec.structs.replace(striped, name=f"{component.name}.{stripe}"), stripe=stripe,
            stripes=group.stripes,
        )
        for stripe in range(heads.ranks.tp_rank % group.dcp_size, group.stripes, group.dcp_size)
    ]  # fmt: skip


def with_heads(views: Mapping[str, Any]) -> dict[str, Any]:
    """Caches as [blocks, heads, tokens, width]: older versions have no axis for the one head of a latent."""
    return {name: view.unsqueeze(1) if view.ndim == 3 else view for name, view in views.items()}


def range_of(views: Iterable[Any]) -> tuple[int, int]:
    """The addresses from the first byte of all views to one past the last."""
    ranges = [
        (view.data_ptr(), view.data_ptr() + view.element_size() * (1 + _last_element(view.shape, view.stride())))
        for view in views
    ]
    return min(first for first, _ in ranges), max(end for _, end in ranges)


def layer_number(name: str, order: int) -> int:
    """The model's number of a layer, which vLLM writes into its name; else its place among the names."""
    match = re.search(r"\.(\d+)(?:\.|$)", name)
    return int(match[1]) if match else order


def _last_element(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))


def _planes(name: str, view: Any, layer: int, kind: str, *, blocks: int, base: int, heads: Heads) -> list[Plane]:
    """One for each head, and for each part of a block where the backend's own blocks are smaller than vLLM's."""
    if view.ndim != 4 or view.shape[0] % blocks:
        raise ConfigError(f"{name}: a KV cache of shape {tuple(view.shape)}, not [{blocks}, heads, tokens, width]")
    count = view.shape[1]
    first = heads.first(count)
    head_range = range(first, first + count)
    axes: Sequence[Axis] = ("page", "head")
    if count > 1 and view.stride(1) < view.stride(2):
        # A token's heads lie together: they cannot be separated, so this rank's block is one thing.
        view, head_range = view.transpose(1, 2), range(heads.ranks.tp_rank, heads.ranks.tp_rank + 1)
        axes = ("page",)
    parts = view.shape[0] // blocks
    dtype = str(view.dtype).removeprefix("torch.")
    try:
        return [
            plane
            for part in range(parts)
            for plane in strided_layout(
                {(layer, f"{kind}.{part}" if part else kind): view[part::parts]}, axes=axes, heads=head_range,
                origin=base, dtype=dtype if dtype in DTYPE_BYTES else "uint8",
            ).planes
        ]  # fmt: skip
    except (LocalProtocolError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from None


def _state_planes(
    name: str, view: Any, parts: Sequence[StatePart], layer: int, number: str, blocks: int, base: int, rank: int
) -> list[Plane]:
    """One for each part of a page, with the shares of the rank of this number as heads."""
    byte_count = sum(part.shares * part.share_bytes for part in parts)
    if view.shape[0] != blocks or view[0].nbytes != byte_count or not view[0].is_contiguous():
        raise ConfigError(f"{name}: states of shape {tuple(view.shape)}, not {blocks} pages of {byte_count} bytes")
    planes: list[Plane] = []
    offset, stride = view.data_ptr() - base, view.stride(0) * view.element_size()
    for part in parts:
        plane = Plane(
            layer=layer, kind=part.kind + number, dtype="uint8", head_start=rank * part.shares, head_count=part.shares,
            base=offset, page_stride=stride, row_stride=stride, row_bytes=part.shares * part.share_bytes,
        )  # fmt: skip
        planes.append(plane)
        offset += plane.row_bytes
    return planes


def _token_planes(
    name: str, kinds: Mapping[str, Any], layer: int, number: str, *, base: int, heads: Heads
) -> list[Plane]:
    """One for each kind and head, or number of a head where these lie apart; a latent has one head."""
    planes: list[Plane] = []
    try:
        for kind, view in kinds.items():
            *_, count, size = view.shape
            if kind == LATENT:
                planes += strided_layout(
                    {(layer, kind + number): view[:, :, 0]}, axes=("page", "row"), origin=base
                ).planes
                continue
            first = heads.first(count) * size
            for head in range(count):
                head_range = range(first + head * size, first + (head + 1) * size)
                view_of_head = {(layer, kind + number): view[:, :, head]}
                planes += strided_layout(
                    view_of_head, axes=("page", "row", "head"), heads=head_range, origin=base
                ).planes
    except (LocalProtocolError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from None
    return planes
