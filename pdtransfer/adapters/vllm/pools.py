"""vLLM's KV cache as components, whose rows are whole blocks: a plane for each layer, which splits at its heads.

vLLM shows each layer as [blocks, heads, tokens, width]. The attention backend decides how a block holds its tokens. So
blocks are transferred as they are, and both engines need the same block size and backend. Heads lie apart, so that
engines of other tensor-parallel sizes take their own.

Where it is known how blocks hold their tokens, rows may be tokens: then block sizes, backends and engines may differ.
A cache may be described by both. Its tokens then stand in for its blocks, with peers whose blocks are others.

The states of linear attention and of convolutions are one row a request (kinds.py).

With decode context parallelism a group's blocks are shared out among several components, its stripes. Component i of n
has blocks i, i + n, i + 2 n and so on. Its rows are n blocks apart, and have the tokens of one block. All engines of a
fleet have equally many stripes, as many as the largest of them has such ranks. Each rank has those of its own blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, LocalProtocolError
from ...layout.layout import DTYPE_BYTES, Component, Plane
from ...layout.layout_builders import Axis, strided_layout
from ...limits import COMPONENTS_MAX
from ..kit.kinds import CacheKind, Heads, Locate, Memory, StatePart, state_planes
from .orders import KVGroup

INDEX = "index"  # a component: what a sparse index keeps of each token
KV, LATENT = "kv", "latent"  # a component, and a kind in it, as all adapters name them where rows are tokens


@dataclass(frozen=True, slots=True)
class BlockRows:
    """How vLLM's blocks of a group become rows of its component."""

    group: int  # its index in the list of groups
    component: Component
    kind: CacheKind  # of the component: a page is a block, or the blocks from one of a stripe to the next
    layer_names: frozenset[str]
    parts: int = 1  # pages of a block, where rows are tokens
    stripe: int = 0
    stripes: int = 1

    def rows_of(self, first: int, end: int) -> tuple[int, int]:
        """The rows of blocks [first, end) of a request; of a stripe possibly none."""
        first, end = (-(-(block - self.stripe) // self.stripes) for block in (first, end))
        return first * self.kind.of_page, end * self.kind.of_page

    def pages(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """The pages of these blocks of a request, int64."""
        striped = np.array(blocks[self.stripe :: self.stripes], np.int64)
        return (striped[:, None] * self.parts + np.arange(self.parts)).reshape(-1)

    def slots(self, blocks: Sequence[int], tokens: int) -> NDArray[np.int64]:
        """The slots of a prompt in these blocks, as the kind has them."""
        return self.kind.slots(blocks[self.stripe :: self.stripes], tokens)


@dataclass(frozen=True, slots=True)
class Pools:
    """The components of a KV cache, and after which layer's name each (group, model layer) is complete. A group has one
    component for layers with equally many heads, or its stripes.

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

    @property
    def open_ended(self) -> frozenset[str]:
        """The components of which another rank may have the last block of a prompt: the stripes."""
        return frozenset(block_rows.component.name for block_rows in self.rows if block_rows.stripes > 1)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Of each group, the bytes of a block in all of its components here; a block is in one of its stripes alone."""
        sizes = [0] * len(self.layers)
        for block_rows in self.rows:
            if block_rows.component.name not in self.stand_ins:
                sizes[block_rows.group] += block_rows.component.bytes_of(block_rows.kind.of_page)
        return tuple(sizes)

    def or_tokens(self, tokens: Pools, fact: str) -> Pools:
        """The same blocks, for peers with this `fact` of their blocks, and `tokens` of the same cache, for others."""
        named = [
            replace(rows, component=msgspec.structs.replace(rows.component, name=f"{rows.component.name}-{fact}"))
            for rows in self.rows
        ]
        replicas = {f"{name}-{fact}": replica for name, replica in self.replicas.items()} | tokens.replicas
        stand_ins = {
            of_tokens.component.name: of_blocks.component.name
            for of_tokens in tokens.rows
            for of_blocks in named
            if of_tokens.layer_names <= of_blocks.layer_names
        }
        return replace(self, rows=(*named, *tokens.rows), replicas=replicas, stand_ins=stand_ins)


def pools(
    views: Mapping[str, Any],
    groups: Sequence[tuple[KVGroup, Sequence[str]]],
    *,
    blocks: int,
    locate: Locate,
    heads: Heads,
    totals: Mapping[str, int] | None = None,
    host_blocks: int = 0,
    kinds: Mapping[str, Mapping[str, Any]] | None = None,
    states: Mapping[str, Sequence[StatePart]] | None = None,
    indices: Collection[str] = (),
    late: Collection[str] = (),
) -> Pools:
    """Components of `groups`, each with the names of its layers. `locate` has what the planes of a cache at an address
    begin at offsets from, and its memory. The groups have `blocks`, or `host_blocks` in HiSparse's host pool.
    `heads` are the model's, and `totals` the numbers of heads of its layers and the drafter's, by name. Layers with
    other heads are components of their own: what a rank holds of one is one range of heads. So are the layers in
    `indices`: with HiSparse a sparse index is on the GPU, and what it chooses from is not.
    The layers in `late` are complete with their step alone: a drafter writes behind the prompt, in its last block, for
    each token that it drafts.

    `views` are torch tensors, [blocks, heads, tokens, width], and of layers with `states` pages, [blocks, 1, 1, bytes].
    Layers that share another one's cache are left out. With `kinds`, which has token_rows.Kinds by the layers' names,
    rows are tokens. Raises ConfigError, with the layer's name, for a cache that cannot be transferred.
    """

    def heads_of(name: str) -> Heads:
        keys = kinds[name].get("k") if kinds and heads.size else None
        of_config = replace(heads, total=(totals or {}).get(name, heads.total))
        return of_config.of_layer(views[name].shape[1], heads.size if keys is None else keys.shape[3])

    parts = [
        part
        for index, (group, names) in enumerate(groups)
        for part in _parts_of(index, group, names, views, indices, heads, heads_of)
    ]
    component_count = sum(part.group.stripes // part.group.dcp_size for part in parts)
    if not 1 <= component_count <= COMPONENTS_MAX:
        raise ConfigError(f"KV cache groups: {component_count}, must be 1 to {COMPONENTS_MAX}")
    if len({part.name for part in parts}) < len(parts):
        raise ConfigError(f"{INDEX}: sparse index layers must be in one KV cache group")
    rows: list[BlockRows] = []
    replicas: dict[str, tuple[int, int]] = {}
    for part in parts:
        count = host_blocks if part.group.host else blocks
        base, memory = _place(part, locate)
        planes = _planes(part, kinds, states or {}, blocks=count, base=base)
        replica = _replica(part, count)
        component = part.name if kinds is None or len(groups) > 1 else part.name.replace(part.group.name, KV)
        of_part = _rows_of(part, component, memory, planes, count, by_token=kinds is not None)
        rows += of_part
        replicas |= {block_rows.component.name: replica for block_rows in of_part}
    last = [_last_of_layers(part for part in parts if part.index == index) for index in range(len(groups))]
    complete_after = {
        name: (index, layer) for index, names in enumerate(last) for layer, name in names.items() if name not in late
    }
    return Pools(tuple(rows), replicas, tuple(tuple(names) for names in last), complete_after)


def with_heads(views: Mapping[str, Any]) -> dict[str, Any]:
    """Caches as [blocks, heads, tokens, width]: older versions have no axis for the one head of a latent."""
    return {name: view.unsqueeze(1) if view.ndim == 3 else view for name, view in views.items()}


def range_of(views: Iterable[Any]) -> tuple[int, int]:
    """The addresses from the first byte of all views to one past the last."""
    ranges: list[tuple[int, int]] = []
    for view in views:
        last = sum((count - 1) * stride for count, stride in zip(view.shape, view.stride(), strict=True))
        ranges.append((view.data_ptr(), view.data_ptr() + view.element_size() * (1 + last)))
    return min(first for first, _ in ranges), max(end for _, end in ranges)


def layer_number(name: str, order: int) -> int:
    """The model's number of a layer, which vLLM writes into its name; else its place among the names."""
    match = re.search(r"\.(\d+)(?:\.|$)", name)
    return int(match[1]) if match else order


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer that has a cache of its own."""

    name: str
    number: int  # the model's
    suffix: str  # of the kinds of its planes: a count behind the first layer of a number, else empty
    view: Any


@dataclass(frozen=True, slots=True)
class _Part:
    """What becomes one component, or its stripes: layers of a group."""

    index: int  # of the group in the list of groups
    group: KVGroup
    name: str
    names: Sequence[str]
    layers: Sequence[_Layer]  # of these names
    heads: Heads  # of each layer


def _parts_of(
    index: int, group: KVGroup, names: Sequence[str], views: Mapping[str, Any], indices: Collection[str], model: Heads,
    heads_of: Callable[[str], Heads],
) -> list[_Part]:  # fmt: skip
    """A group as a whole, or what its sparse index chooses from and that index. Layers whose heads are not the model's
    are apart from these, by a name that is the same on all ranks, whatever their number."""
    named: dict[tuple[str, Heads], list[str]] = {}
    for name in sorted(names, key=lambda name: name in indices):
        base = INDEX if name in indices else group.name
        heads = heads_of(name) if name in views and not group.state else model
        if heads != model:
            base += f"-{heads.total}" + (f"x{heads.size}" if heads.size else "")
        named.setdefault((base, heads), []).append(name)
    parts = named.items() or [((group.name, model), list[str]())]
    return [
        _Part(index, group, name, of_part, list(_layers_of(views, of_part)), heads) for (name, heads), of_part in parts
    ]


def _layers_of(views: Mapping[str, Any], names: Sequence[str]) -> Iterator[_Layer]:
    """The layers that have a cache of their own."""
    addresses: set[int] = set()
    seen: Counter[int] = Counter()
    for order, name in enumerate(names):
        if name in views and (address := views[name].data_ptr()) not in addresses:
            addresses.add(address)
            number = layer_number(name, order)
            yield _Layer(name, number, str(seen[number] or ""), views[name])
            seen[number] += 1


def _last_of_layers(parts: Iterable[_Part]) -> dict[int, str]:
    """The name after which each layer of a group is complete, by the layer's number."""
    last: dict[int, str] = {}
    for part in parts:
        for layer in part.layers:
            if part.name == INDEX:
                last.setdefault(layer.number, layer.name)  # it is computed before what it chooses from is used
            else:
                last[layer.number] = layer.name
    return last


def _place(part: _Part, locate: Locate) -> tuple[int, Memory]:
    """What the planes of all layers begin at offsets from, and their memory."""
    places = {locate(layer.view.data_ptr()) for layer in part.layers}
    if len(places) != 1:
        names = ", ".join(part.names)
        raise ConfigError(f"{part.name}: its layers have no KV cache, or in several memories: {names}")
    return places.pop()


def _planes(
    part: _Part,
    kinds: Mapping[str, Mapping[str, Any]] | None,
    states: Mapping[str, Sequence[StatePart]],
    *,
    blocks: int,
    base: int,
) -> list[Plane]:
    """One component's, whose layers have this many `blocks`: of states by their parts, else by block, or by token with
    `kinds`."""
    planes: list[Plane] = []
    for layer in part.layers:
        try:
            if part.group.state:
                rank = part.group.kind.share(part.heads.ranks)
                planes += _state_planes(layer, states[layer.name], blocks=blocks, base=base, rank=rank)
            elif kinds is None:
                planes += _block_planes(layer, blocks=blocks, base=base, heads=part.heads)
            else:
                planes += _token_planes(layer, kinds[layer.name], base=base, heads=part.heads)
        except (LocalProtocolError, ValueError) as error:
            raise ConfigError(f"{layer.name}: {error}") from None
    return planes


def _block_planes(layer: _Layer, *, blocks: int, base: int, heads: Heads) -> list[Plane]:
    """One for each head, and for each part of a block where the backend's own blocks are smaller than vLLM's."""
    view, kind = layer.view, f"kv{layer.suffix}"
    if view.ndim != 4 or view.shape[0] % blocks:
        shape = f"{list(view.shape)}, not [{blocks}, heads, tokens, width]"
        raise ConfigError(f"a KV cache of shape {shape}")
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
    return [
        plane
        for part in range(parts)
        for plane in strided_layout(
            {(layer.number, f"{kind}.{part}" if part else kind): view[part::parts]}, axes=axes, heads=head_range,
            origin=base, dtype=dtype if dtype in DTYPE_BYTES else "uint8",
        ).planes
    ]  # fmt: skip


def _state_planes(layer: _Layer, parts: Sequence[StatePart], *, blocks: int, base: int, rank: int) -> list[Plane]:
    """One for each part of a page, with the shares of the rank of this number as heads."""
    view, byte_count = layer.view, sum(part.shares * part.share_bytes for part in parts)
    if view.shape[0] != blocks or view[0].nbytes != byte_count or not view[0].is_contiguous():
        shape = f"{list(view.shape)}, not {blocks} pages of {byte_count} bytes"
        raise ConfigError(f"states of shape {shape}")
    offset, stride = view.data_ptr() - base, view.stride(0) * view.element_size()
    return state_planes(parts, layer=layer.number, name=f"{{}}{layer.suffix}", base=offset, stride=stride, rank=rank)


def _token_planes(layer: _Layer, kinds: Mapping[str, Any], *, base: int, heads: Heads) -> list[Plane]:
    """One for each kind and head, or number of a head where these lie apart; a latent has one head."""
    planes: list[Plane] = []
    for kind, view in kinds.items():
        name = layer.number, kind + layer.suffix
        *_, count, size = view.shape
        if kind == LATENT:
            planes += strided_layout({name: view[:, :, 0]}, axes=("page", "row"), origin=base).planes
            continue
        axes: Sequence[Axis] = ("page", "row", "head")
        first = heads.first(count) * size
        for head in range(count):
            head_range = range(first + head * size, first + (head + 1) * size)
            planes += strided_layout({name: view[:, :, head]}, axes=axes, heads=head_range, origin=base).planes
    return planes


def _replica(part: _Part, blocks: int) -> tuple[int, int]:
    """This rank's number among those that have the same of these layers' KV, and how many there are."""
    group, heads = part.group, part.heads
    if group.state:
        return group.kind.replica(heads.ranks)
    for layer in part.layers:
        _, replicas = heads.replica(layer.view.shape[1])
        if group.stripes > 1 and (layer.view.shape[0] != blocks or replicas % group.dcp_size):
            raise ConfigError(
                f"{layer.name}: not supported with decode context parallelism: {layer.view.shape[0]} blocks of the "
                f"attention backend for {blocks} of vLLM's, and {replicas} ranks with the same KV heads"
            )
    return heads.replica(part.layers[-1].view.shape[1], group.dcp_size)


def _rows_of(
    part: _Part, component: str, memory: Memory, planes: Sequence[Plane], blocks: int, *, by_token: bool
) -> list[BlockRows]:
    """A part's rows, or those of the stripes that this rank has."""
    kind, page_size, pages, stripes = part.group.kind, 1, 1, part.group.stripes
    if by_token and kind.row == "page":
        page_size = _page_size(part)
        kind, pages = replace(kind, row="token", tail="exact"), kind.page_size // page_size
    if stripes > 1:
        kind = kind.of(kind.page_size * stripes, tail="open")
    of_stripes: list[BlockRows] = []
    for stripe in range(part.heads.ranks.tp_rank % part.group.dcp_size, stripes, part.group.dcp_size):
        name = f"{component}.{stripe}" if stripes > 1 else component
        described = kind.component(name, memory, planes, blocks * pages * page_size, page_size)
        of_stripes.append(BlockRows(part.index, described, kind, frozenset(part.names), pages, stripe, stripes))
    return of_stripes


def _page_size(part: _Part) -> int:
    """The tokens of a page where rows are tokens."""
    group, page_sizes = part.group, {layer.view.shape[2] for layer in part.layers}
    page_size = min(page_sizes)
    if group.kind.window or group.kind.chunk:
        raise ConfigError(
            f"{group.name}: attention windows cannot be transferred token by token: set rows = "
            '"blocks", or --disable-hybrid-kv-cache-manager'
        )
    if page_sizes != {page_size} or group.kind.page_size % page_size:
        sizes = ", ".join(map(str, sorted(page_sizes)))
        raise ConfigError(
            f"{group.name}: blocks of {group.kind.page_size} tokens in pages of {sizes} cannot be transferred token by "
            'token: set rows = "blocks"'
        )
    return page_size
