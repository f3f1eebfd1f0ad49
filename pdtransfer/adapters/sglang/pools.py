"""SGLang's KV cache as components, by the buffers that it describes to its transfer backends.

The KV cache is a buffer for each layer and kind, of a row for each token: pages need not be of one size on both sides,
and heads split. A head of a plane is one number of a model's head, so that peers may keep the numbers apart. A state
(SGLang's word for whatever else a layer keeps) is a component of its own. Its rows are tokens, where they are KV of a
sliding window; or SGLang's own items, one for a page or one for a request. Linear attention's divide (states.py).

DeepSeek V4's KV cache is compressed: a layer keeps a row for 4 tokens, with an index of such rows, or a row for 128,
and beside either the tokens that wait for their row. SGLang lists its buffers by these kinds. A page of them holds
values apart from scales, and is padded. So an item is a whole page, and the last one crosses whole, however few of its
tokens the request has.

MiniMax's sparse attention has an index of keys, and SGLang hands over the layers without one, with both their K and V,
as a second state. In NVFP4 a page of any of these buffers holds values apart from scales, and is an item as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...layout.layout import DTYPE_BYTES, Component, Layout, Plane, Span
from ...limits import AUX_BYTES_MAX, COMPONENTS_MAX
from ...wire import Ranks
from ..kit.cache_memory import Extent, Target
from ..kit.heads import Heads
from ..kit.state_parts import StatePart, state_planes
from .states import LINEAR, Sections, item_parts

Memory = Literal["dram", "hbm"]
Rows = Literal["tokens", "pages", "once"]
Kind = tuple[str, int]  # of a buffer, and its layer
Locate = Callable[[int], tuple[int, Memory]]
"""What a buffer at an address counts its base from, and the memory that it is in."""

KV = "kv"  # the component of what every token has

OPAQUE = "uint8"  # bytes that only SGLang understands
DRAFT_LAYER = 0x8000  # the first layer of a draft model, whose buffers follow the model's own
PAGE_SIZE_MAX = 256

WINDOW = "swa"  # the state of sliding windows
MINIMAX_INDEX = "minimax_index_k"  # the state of MiniMax's sparse layers
_ROWS: dict[str, Rows] = {
    WINDOW: "tokens", "dsa": "pages", LINEAR: "once", "qsa_pending": "once", "qsa_compressed": "pages",
    "block_scale": "pages", "block_scale_swa": "pages", MINIMAX_INDEX: "pages", "minimax_dense_kv": "pages",
}  # fmt: skip
_REPLICATED = {"dsa", MINIMAX_INDEX}  # the same on all ranks; of the others each rank has its own part
_COMPRESSED_ROWS: dict[str, Rows] = {WINDOW: "pages", "c128_state": "once"}  # DeepSeek V4's, the same on all ranks
_RATIOS = {0, 4, 128}  # tokens of a row, in DeepSeek V4's layers; 0 for a window alone


@dataclass(frozen=True, slots=True)
class Buffers:
    """Some of SGLang's buffers: the address, the bytes, and the bytes of one item of each."""

    addresses: Sequence[int]
    byte_counts: Sequence[int]
    item_bytes: Sequence[int]

    def part(self, first: int, end: int) -> Buffers:
        """Buffers [first, end)."""
        return Buffers(self.addresses[first:end], self.byte_counts[first:end], self.item_bytes[first:end])

    @property
    def ends(self) -> list[int]:
        """One past the last byte of each."""
        return [first + count for first, count in zip(self.addresses, self.byte_counts, strict=True)]


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """What a model's configuration has about its KV: one latent a token, or heads, those of sliding windows too."""

    latent: bool
    heads: Heads
    head_count: int  # of this rank
    window_heads: Heads
    window_head_count: int
    dtype: str = OPAQUE  # of the KV cache, a key of DTYPE_BYTES
    conv_sections: Sections | None = None  # of its convolutions


@dataclass(frozen=True, slots=True)
class CachePart:
    """One component, and how SGLang's indices of it become rows."""

    component: Component
    rows: Rows
    page_size: int

    @property
    def name(self) -> str:
        """The component's name."""
        return self.component.name

    def slots(self, indices: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The slots of SGLang's indices, int64: of pages the slots of their tokens, else the indices themselves."""
        slots = np.asarray(indices, np.int64).reshape(-1)
        if self.rows != "tokens":
            return slots
        return (slots[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)


@dataclass(frozen=True, slots=True)
class KVPools:
    """The components: first the KV cache, unless no layer of a pipeline stage has any, then the states in SGLang's
    order."""

    parts: tuple[CachePart, ...]
    replicas: dict[str, tuple[int, int]]
    page_size: int

    @property
    def components(self) -> tuple[Component, ...]:
        """Of all parts."""
        return tuple(part.component for part in self.parts)

    @property
    def kv(self) -> CachePart | None:
        """The KV cache."""
        return self.parts[0] if self.parts[0].name == KV else None

    @property
    def states(self) -> tuple[CachePart, ...]:
        """All parts but the KV cache."""
        return self.parts if self.kv is None else self.parts[1:]


def kv_buffers(args: Any) -> Buffers:
    """Where the KV cache of SGLang's KVArgs is."""
    return Buffers(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)


def state_buffers(args: Any) -> list[Buffers]:
    """Where the states of SGLang's KVArgs are."""
    states = zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    return [Buffers(*state) for state in states]


def extent_of(buffers: Sequence[Buffers], device: int | None) -> Extent:
    """The range that holds all buffers, on a GPU or in this process's memory."""
    first, end = min(chain(*[pool.addresses for pool in buffers])), max(chain(*[pool.ends for pool in buffers]))
    return Extent(first, end, device)


def host_buffers(args: Any, target: Target) -> Buffers:
    """Where the host pool of SGLang's KVArgs is. Raises ConfigError unless it is the only one, and lies in the memory
    that the plugin has set aside for it."""
    option = "disaggregation_decode_host_receive_threshold"
    if getattr(args, "host_state_data_ptrs", None):
        kinds = ", ".join(_kinds(args))
        raise ConfigError(f"{option}: requests can land in one host pool, and SGLang has another of {kinds}")
    host = Buffers(args.host_kv_data_ptrs, args.host_kv_data_lens, args.host_kv_item_lens)
    pool, first = extent_of([host], None), target.arena.mapping.address
    written = Extent(first, first + target.arena.byte_count)
    if not written.holds(pool):
        raise ConfigError(
            f"{option}: SGLang's host pool lies at {pool.first:#x} to {pool.end:#x}, and peers can write "
            f"{written.first:#x} to {written.end:#x} alone. SGLang has allocated it in a way of its own, as for some "
            "values of hicache_storage_backend: leave out that option, or this one"
        )
    return host


def pools(args: Any, model: HeadCounts, locate: Locate, *, kv: Buffers, states: Sequence[Buffers]) -> KVPools:
    """Components of the KV cache in `kv`, and of `states`, whose planes are offsets as `locate` has them.

    `args` are SGLang's KVArgs. Raises ConfigError, with the reason, for a cache that cannot cross.
    """
    _check(args, states)
    page_size = int(args.page_size)
    ranks = model.heads.ranks
    if ratios := _ratios(args):
        return _compressed_pools(args, ratios, ranks, locate, kv=kv, states=states)
    parts: list[CachePart] = []
    replicas: dict[str, tuple[int, int]] = {}

    def add(name: str, rows: Rows, planes: list[Plane], slots: int, buffers: Buffers) -> None:
        parts.append(_part(name, rows, planes, slots, {locate(address)[1] for address in buffers.addresses}, page_size))

    def of_heads(name: str, buffers: Buffers, layers: Sequence[int], heads: Heads, count: int) -> list[Plane]:
        kinds = ("latent",) if model.latent else ("k", "v")
        count = 1 if model.latent else count
        of_kind, rest = divmod(len(buffers.addresses), len(kinds))
        if rest or not of_kind:
            raise ConfigError(f"{name}: {len(buffers.addresses)} buffers are not {' and '.join(kinds)} of each layer")
        replicas.setdefault(name, heads.replica(count))
        number = DTYPE_BYTES[model.dtype]
        return [
            Plane(
                layer=layers[index % of_kind], kind=kinds[index // of_kind], dtype=model.dtype,
                head_start=heads.first(count) * size, head_count=count * size, base=address - locate(address)[0],
                page_stride=row, row_stride=row, row_bytes=row,
            )
            for index, (address, item) in enumerate(zip(buffers.addresses, buffers.item_bytes, strict=True))
            for row in [_whole(name, item, page_size)]
            for size in [1 if model.latent or model.dtype == OPAQUE else row // count // number]
        ]  # fmt: skip

    drafts = _draft_count(args)
    layer_count = len(kv.addresses) - drafts
    first_layer = int(getattr(args, "prefill_start_layer", 0) or 0)
    layers = list(getattr(args, "kv_layer_ids", None) or range(first_layer, first_layer + layer_count))
    if has_rows_of_pages(args):
        add(KV, "pages", _items(kv, _numbered(layers), ranks.tp_rank, locate), _slots(KV, kv, 1), kv)
    elif kv.addresses or not states:
        planes = of_heads(KV, kv.part(0, layer_count), layers, model.heads, model.head_count)
        if drafts:
            draft_layers, buffers = range(DRAFT_LAYER, DRAFT_LAYER + drafts), kv.part(layer_count, layer_count + drafts)
            planes += of_heads(KV, buffers, draft_layers, model.heads, model.head_count)
        add(KV, "tokens", planes, _slots(KV, kv, page_size), kv)

    for index, (kind, buffers) in enumerate(zip(_kinds(args), states, strict=True)):
        named = args.state_layer_ids[index] if index < len(args.state_layer_ids) else None
        rows = _ROWS[kind]
        numbers = list(named or range(len(buffers.addresses)))
        if rows == "tokens":
            planes = of_heads(kind, buffers, numbers, model.window_heads, model.window_head_count)
            add(kind, rows, planes, _slots(kind, buffers, page_size), buffers)
            continue
        replicated = kind in _REPLICATED
        replicas[kind] = (ranks.tp_rank, ranks.tp_size) if replicated else (0, 1)
        if kind == LINEAR:
            of_items = item_parts(args, index, ranks.tp_size, model.conv_sections)
            planes = _parts_of_items(buffers, _numbered(numbers), of_items, ranks.tp_rank, locate)
        else:
            planes = _items(buffers, _numbered(numbers), 0 if replicated else ranks.tp_rank, locate)
        add(kind, rows, planes, _slots(kind, buffers, 1), buffers)
    return KVPools(tuple(parts), replicas, page_size)


def _compressed_pools(
    args: Any, ratios: Sequence[int], ranks: Ranks, locate: Locate, *, kv: Buffers, states: Sequence[Buffers]
) -> KVPools:
    """DeepSeek V4's, of layers with these ratios: the same on all ranks."""
    page_size, parts = int(args.page_size), list[CachePart]()

    def add(name: str, rows: Rows, buffers: Buffers, kinds: Sequence[Kind]) -> None:
        if len(buffers.addresses) != len(kinds):
            wanted = " and ".join(f"{count} of {kind}" for kind, count in Counter(kind for kind, _ in kinds).items())
            raise ConfigError(
                f"{name}: {len(buffers.addresses)} buffers are not {wanted}, as DeepSeek V4's layers have"
            )
        # SGLang rounds each kind up by itself: all of them have the pages that its allocator hands out.
        slots = min(count // item for count, item in zip(buffers.byte_counts, buffers.item_bytes, strict=True))
        memories: set[Memory] = {locate(address)[1] for address in buffers.addresses}
        parts.append(_part(name, rows, _items(buffers, kinds, 0, locate), slots, memories, page_size))

    add(KV, "pages", kv, _kinds_of(ratios, ("c4", 4), ("c4_index", 4), ("c128", 128)))
    for kind, buffers in zip(_kinds(args), states, strict=True):
        count = len(buffers.addresses)
        if kind != WINDOW:
            add(kind, _COMPRESSED_ROWS[kind], buffers, _kinds_of(ratios, ("c128_state", 128)))
        elif any(part.name == kind for part in parts):
            # A draft model has windows alone.
            add(f"{kind}_draft", "pages", buffers, [("window", DRAFT_LAYER + layer) for layer in range(count)])
        else:
            # A page of the window has the ring of the tokens that wait for their row of 4 there.
            waiting = _kinds_of(ratios, ("c4_state", 4), ("c4_index_state", 4))
            windows = [("window", layer) for layer in range(min(len(ratios), count - len(waiting)))]
            add(kind, "pages", buffers, windows + waiting)
    return KVPools(tuple(parts), {part.name: (ranks.tp_rank, ranks.tp_size) for part in parts}, page_size)


def _kinds_of(ratios: Sequence[int], *kinds: tuple[str, int]) -> list[Kind]:
    """Kind by kind, each with its ratio, a buffer for each layer that has this ratio: the order of SGLang's lists."""
    return [(kind, layer) for kind, ratio in kinds for layer, layer_ratio in enumerate(ratios) if layer_ratio == ratio]


def _part(name: str, rows: Rows, planes: list[Plane], slots: int, memories: set[Memory], page_size: int) -> CachePart:
    try:
        layout = Layout(tuple(planes), 1, slots)
        if len(memories) > 1:
            raise ConfigError(f"{name}: some of its buffers are in host memory, and some are not")
        tokens_per_row = page_size if rows == "pages" else 1
        span = Span("once" if rows == "once" else "all")
        component = Component(name, memories.pop(), tokens_per_row, span, layout)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    return CachePart(component, rows, page_size)


def _check(args: Any, states: Sequence[Buffers]) -> None:
    if (aux_bytes := sum(args.aux_item_lens)) > AUX_BYTES_MAX:
        raise ConfigError(f"metadata of a request: {aux_bytes} bytes, at most {AUX_BYTES_MAX} can cross")
    if 1 + len(states) > COMPONENTS_MAX:
        raise ConfigError(f"KV cache: {len(states)} states, at most {COMPONENTS_MAX - 1} can cross")
    compressed = bool(_ratios(args))
    rows = _COMPRESSED_ROWS if compressed else _ROWS
    kinds = _kinds(args)
    for kind in kinds:
        # SGLang lists the windows of a draft model of DeepSeek V4's as a second state.
        if kind not in rows or kinds.count(kind) > (2 if compressed and kind == WINDOW else 1):
            raise ConfigError(f"state {kind}: cannot cross yet, one each of {', '.join(sorted(rows))} can")
        if kind == WINDOW and not compressed and getattr(args, "swa_kv_cache_layout", None) != "nhd":
            raise ConfigError(f"state swa: its layout is {args.swa_kv_cache_layout}, nhd can cross")


def has_rows_of_pages(args: Any) -> bool:
    """Whether a row of the KV cache is a whole page: DeepSeek V4's, and MiniMax's in NVFP4, of which SGLang lists one
    buffer a layer, not K and V."""
    layers = list(getattr(args, "kv_layer_ids", None) or ())[: len(args.kv_data_ptrs) - _draft_count(args)]
    has_one_each = 0 < len(layers) == len(set(layers))
    return bool(_ratios(args)) or (has_one_each and MINIMAX_INDEX in _kinds(args))


def _draft_count(args: Any) -> int:
    return int(getattr(args, "num_draft_entries", 0) or 0)


def _ratios(args: Any) -> list[int]:
    """The tokens of a row, for each layer of DeepSeek V4; empty for other models."""
    ratios = [int(ratio) for ratio in getattr(args, "mla_compression_ratios", None) or ()]
    if unknown := sorted(set(ratios) - _RATIOS):
        raise ConfigError(f"KV cache: compressed by {unknown}, which cannot cross yet; {sorted(_RATIOS)} can")
    return ratios


def _kinds(args: Any) -> list[str]:
    return [str(getattr(kind, "value", kind)) for kind in args.state_types]


def _numbered(layers: Sequence[int]) -> list[Kind]:
    """Items of these layers; several of one layer are of several kinds."""
    counts: Counter[int] = Counter()
    kinds: list[Kind] = []
    for layer in layers:
        kinds.append((f"item{counts[layer] or ''}", layer))
        counts[layer] += 1
    return kinds


def _items(buffers: Buffers, kinds: Sequence[Kind], head: int, locate: Locate) -> list[Plane]:
    """One plane a buffer, of whole items that only SGLang understands."""
    return [
        Plane(
            layer=layer, kind=kind, dtype=OPAQUE, head_start=head, head_count=1, base=address - locate(address)[0],
            page_stride=item, row_stride=item, row_bytes=item,
        )
        for address, item, (kind, layer) in zip(buffers.addresses, buffers.item_bytes, kinds, strict=True)
    ]  # fmt: skip


def _parts_of_items(
    buffers: Buffers, kinds: Sequence[Kind], of_items: Sequence[Sequence[StatePart]], rank: int, locate: Locate
) -> list[Plane]:
    """One plane for each part of a buffer's items."""
    return [
        plane
        for address, item, (kind, layer), parts in zip(
            buffers.addresses, buffers.item_bytes, kinds, of_items, strict=True
        )
        for plane in state_planes(
            parts, layer=layer, name=f"{kind}.{{}}", base=address - locate(address)[0], stride=item, rank=rank
        )
    ]


def _whole(name: str, item: int, page_size: int) -> int:
    row, rest = divmod(item, page_size)
    if rest or not row:
        raise ConfigError(f"{name}: an item of {item} bytes is not a page of {page_size} rows")
    return row


def _slots(name: str, buffers: Buffers, page_size: int) -> int:
    counts = {
        count // item * page_size for count, item in zip(buffers.byte_counts, buffers.item_bytes, strict=True) if item
    }
    if len(counts) != 1:
        raise ConfigError(f"{name}: its buffers hold {sorted(counts)} rows, not all the same number")
    return counts.pop()
