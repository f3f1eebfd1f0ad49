"""SGLang's KV cache as components, by the buffers that it describes to its transfer backends.

The KV cache is a buffer for each layer and kind, of a row for each token. Pages need not be of one size on both sides,
and heads split. A head of a plane is one number of a model's head, so that peers may keep the numbers apart. A state
(SGLang's word for whatever else a layer keeps) is a component of its own. Its rows are tokens, where they are KV of a
sliding window; or SGLang's own items, one for a page or one for a request. Linear attention's divide (states.py).

DeepSeek V4's KV cache is compressed. A layer keeps a row for 4 tokens, with an index of such rows, or a row for 128.
Beside either it keeps the tokens that wait for their row. SGLang lists its buffers by these kinds. A page of them holds
values apart from scales, and is padded. So an item is a whole page. The last one is transferred whole, however few of
its tokens the request has. Decode's HiSparse has C4's rows in host memory, in pages of their own, and the rest on the
device: so they are two components.

MiniMax's sparse attention has an index of keys, and SGLang hands over the layers without one, with both their K and V,
as a second state. In NVFP4 a page of any of these buffers holds values apart from scales, and is an item as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from ...errors import ConfigError
from ...layout.layout import DTYPE_BYTES, Component, Plane
from ...limits import AUX_BYTES_MAX
from ..kit.cache_memory import Extent, Target
from ..kit.kinds import CacheKind, Heads, Locate, Memory, StatePart, state_planes
from .states import LINEAR, Sections, item_parts

Named = tuple[str, int]  # what a buffer has, and its layer

KV = "kv"  # the component of what every token has; with HiSparse it lands in host memory
DEVICE_KV = "kv_device"  # likewise, of what DeepSeek V4's HiSparse leaves on the device
DRAFT_KV = "kv_draft"  # likewise, of a drafter
OF_KV = KV, DEVICE_KV, DRAFT_KV

OPAQUE = "uint8"  # bytes that only SGLang understands
DRAFT_LAYER = 0x8000  # the first layer of a draft model, whose buffers follow the model's own
PAGE_SIZE_MAX = 256

WINDOW = "swa"  # the state of sliding windows
MINIMAX_INDEX = "minimax_index_k"  # the state of MiniMax's sparse layers
_TOKENS, _OWN_PAGES = CacheKind("token", "filled", "heads"), CacheKind("page", "whole", "own")
_SAME_PAGES = CacheKind("page", "whole", "every")
# By SGLang's names of states: what is not here cannot be transferred yet.
KINDS = {
    WINDOW: _TOKENS, "dsa": _SAME_PAGES, LINEAR: CacheKind("request", "whole", "shares"), MINIMAX_INDEX: _SAME_PAGES,
    "minimax_dense_kv": _OWN_PAGES, "qsa_pending": CacheKind("request", "whole", "own"), "qsa_compressed": _OWN_PAGES,
    "block_scale": _OWN_PAGES, "block_scale_swa": _OWN_PAGES,
}  # fmt: skip
KINDS_OF_V4 = {WINDOW: _SAME_PAGES, "c128_state": CacheKind("request", "whole", "every")}  # those of DeepSeek V4
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


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """What a model's configuration has about its KV: one latent a token, or heads, those of sliding windows too. And
    that of its drafter, whose layers may have others."""

    latent: bool
    heads: Heads
    window_heads: Heads
    dtype: str = OPAQUE  # of the KV cache, a key of DTYPE_BYTES
    conv_sections: Sections | None = None  # of its convolutions
    drafter: Heads | None = None  # None: as the model's
    latent_drafter: bool = False


@dataclass(frozen=True, slots=True)
class CachePart:
    """One component, and how SGLang's indices of it become rows."""

    component: Component
    kind: CacheKind

    @property
    def name(self) -> str:
        """The component's name."""
        return self.component.name


class KVPools:
    """The components: first the KV cache, unless no layer of a pipeline stage has any, and that of a drafter; then the
    states in SGLang's order. They are added one after another, of planes that it makes."""

    def __init__(self, model: HeadCounts, locate: Locate, page_size: int) -> None:
        self._model, self._locate, self.page_size = model, locate, page_size
        self.parts: list[CachePart] = []
        self.replicas: dict[str, tuple[int, int]] = {}

    @property
    def components(self) -> tuple[Component, ...]:
        """Of all parts."""
        return tuple(part.component for part in self.parts)

    @property
    def kv(self) -> tuple[CachePart, ...]:
        """The KV cache."""
        return tuple(part for part in self.parts if part.name in OF_KV)

    @property
    def states(self) -> list[CachePart]:
        """All parts but the KV cache."""
        return self.parts[len(self.kv) :]

    def add(self, name: str, kind: CacheKind, planes: list[Plane], buffers: Buffers, slots: int = 0) -> None:
        """A component of these buffers, of this many slots where they are not all of one number."""
        kind = kind.of(self.page_size)
        memories: set[Memory] = {self._locate(address)[1] for address in buffers.addresses}
        if len(memories) > 1:
            raise ConfigError(f"{name}: some of its buffers are in host memory, and some are not")
        component = kind.component(name, memories.pop(), planes, slots or _slots(name, buffers, kind.of_page))
        self.replicas.setdefault(name, kind.replica(self._model.heads.ranks))
        self.parts.append(CachePart(component, kind))

    def add_kv(self, kv: Buffers, layers: Sequence[int], drafts: int) -> None:
        """The KV cache, whose last buffers are a drafter's: a component of its own, which may have other heads than the
        model's and, with HiSparse, other pages."""
        model, layer_count = self._model, len(kv.addresses) - drafts
        of_model, of_drafter = kv.part(0, layer_count), kv.part(layer_count, len(kv.addresses))
        self.add(KV, _TOKENS, self.planes_of(KV, of_model, layers, model.heads, latent=model.latent), of_model)
        if drafts:
            heads, latent = (model.drafter, model.latent_drafter) if model.drafter else (model.heads, model.latent)
            numbers = range(DRAFT_LAYER, DRAFT_LAYER + drafts)
            self.add(DRAFT_KV, _TOKENS, self.planes_of(DRAFT_KV, of_drafter, numbers, heads, latent=latent), of_drafter)

    def planes_of(
        self, name: str, buffers: Buffers, layers: Sequence[int], heads: Heads, *, latent: bool
    ) -> list[Plane]:
        """Those of layers with these heads, or of one latent."""
        kinds, dtype = ("latent",) if latent else ("k", "v"), self._model.dtype
        of_kind, rest = divmod(len(buffers.addresses), len(kinds))
        if rest or not of_kind:
            raise ConfigError(f"{name}: {len(buffers.addresses)} buffers are not {' and '.join(kinds)} of each layer")
        count = heads.count
        self.replicas[name] = heads.replica(count)
        if unfit := [item for item in buffers.item_bytes if not item or item % self.page_size]:
            raise ConfigError(f"{name}: an item of {unfit[0]} bytes is not a page of {self.page_size} rows")
        rows = [item // self.page_size for item in buffers.item_bytes]
        head_bytes = count * DTYPE_BYTES[dtype]
        # Keys and values may have unequal numbers: what a rank holds is one range of heads all the same.
        size = 1 if latent or dtype == OPAQUE else gcd(*(row // head_bytes for row in rows))
        if heads.size and dtype != OPAQUE and rows[0] != heads.size * head_bytes:
            raise ConfigError(
                f"{name}: a token's keys have {rows[0]} bytes at this rank, expected {heads.size * head_bytes} for "
                f"{count} heads of the drafter: SGLang shares its heads out among other ranks than the model's"
            )
        return [
            Plane(
                layer=layers[index % of_kind], kind=kinds[index // of_kind], dtype=dtype,
                head_start=heads.first(count) * size, head_count=count * size,
                base=address - self._locate(address)[0], page_stride=row, row_stride=row, row_bytes=row,
            )
            for index, (address, row) in enumerate(zip(buffers.addresses, rows, strict=True))
        ]  # fmt: skip

    def items(
        self, buffers: Buffers, kinds: Sequence[Named], rank: int, of_items: Sequence[Sequence[StatePart]] | None = None
    ) -> list[Plane]:
        """Those of whole items that only SGLang understands, one a buffer. Or one for each part of an item, with the
        shares of the rank of this number as heads."""
        planes: list[Plane] = []
        of_buffers = zip(buffers.addresses, buffers.item_bytes, kinds, strict=True)
        for index, (address, item, (kind, layer)) in enumerate(of_buffers):
            parts, name = [StatePart(kind, 1, item)], "{}"
            if of_items is not None:
                parts, name = of_items[index], f"{kind}.{{}}"
            base = address - self._locate(address)[0]
            planes += state_planes(parts, layer=layer, name=name, base=base, stride=item, rank=rank)
        return planes

    def add_compressed(self, ratios: Sequence[int], kv: Buffers, states: Iterable[tuple[str, Buffers]]) -> None:
        """DeepSeek V4's, of layers with these ratios: the same on all ranks."""

        def add(name: str, kind: CacheKind, buffers: Buffers, kinds: Sequence[Named]) -> None:
            if len(buffers.addresses) != len(kinds):
                counts = Counter(kind for kind, _ in kinds).items()
                wanted = " and ".join(f"{count} of {kind}" for kind, count in counts)
                raise ConfigError(
                    f"{name}: {len(buffers.addresses)} buffers are not {wanted}, as DeepSeek V4's layers have"
                )
            if not kinds:
                return
            # SGLang rounds each kind up by itself: all of them have the pages that its allocator hands out.
            slots = min(count // item for count, item in zip(buffers.byte_counts, buffers.item_bytes, strict=True))
            self.add(name, kind, self.items(buffers, kinds, 0), buffers, slots)

        fours = ratios.count(4)
        add(KV, _SAME_PAGES, kv.part(0, fours), _kinds_of(ratios, ("c4", 4)))
        of_device = kv.part(fours, len(kv.addresses))
        add(DEVICE_KV, _SAME_PAGES, of_device, _kinds_of(ratios, ("c4_index", 4), ("c128", 128)))
        for name, buffers in states:
            count, kind = len(buffers.addresses), KINDS_OF_V4[name]
            if name != WINDOW:
                add(name, kind, buffers, _kinds_of(ratios, ("c128_state", 128)))
            elif name in self.replicas:
                # A draft model has windows alone.
                add(f"{name}_draft", kind, buffers, [("window", DRAFT_LAYER + layer) for layer in range(count)])
            else:
                # A page of the window has the ring of the tokens that wait for their row of 4 there.
                waiting = _kinds_of(ratios, ("c4_state", 4), ("c4_index_state", 4))
                windows = [("window", layer) for layer in range(min(len(ratios), count - len(waiting)))]
                add(name, kind, buffers, windows + waiting)


def kv_buffers(args: Any) -> Buffers:
    """Where the KV cache of SGLang's KVArgs is."""
    return Buffers(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)


def state_buffers(args: Any) -> list[Buffers]:
    """Where the states of SGLang's KVArgs are."""
    states = zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    return [Buffers(*state) for state in states]


def extent_of(buffers: Sequence[Buffers], device: int | None) -> Extent:
    """The range that holds all buffers, on a GPU or in this process's memory."""
    ranges = [extent for pool in buffers for extent in zip(pool.addresses, pool.byte_counts, strict=True)]
    return Extent(min(first for first, _ in ranges), max(first + count for first, count in ranges), device)


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

    `args` are SGLang's KVArgs. Raises ConfigError, with the reason, for a cache that cannot be transferred.
    """
    _check(args)
    ranks = model.heads.ranks
    described = KVPools(model, locate, int(args.page_size))
    if ratios := _ratios(args):
        described.add_compressed(ratios, kv, zip(_kinds(args), states, strict=True))
        return described
    drafts = args.num_draft_entries
    first_layer = int(getattr(args, "prefill_start_layer", 0) or 0)
    named = getattr(args, "kv_layer_ids", None)
    layers = list(named or range(first_layer, first_layer + len(kv.addresses) - drafts))
    if has_rows_of_pages(args):
        described.add(KV, _OWN_PAGES, described.items(kv, _numbered(layers), ranks.tp_rank), kv)
    elif kv.addresses or not states:
        described.add_kv(kv, layers, drafts)

    for index, (name, buffers) in enumerate(zip(_kinds(args), states, strict=True)):
        named = args.state_layer_ids[index] if index < len(args.state_layer_ids) else None
        numbers, kind = list(named or range(len(buffers.addresses))), KINDS[name]
        if kind.holder == "heads":
            planes = described.planes_of(name, buffers, numbers, model.window_heads, latent=model.latent)
        else:
            parts = item_parts(args, index, ranks.tp_size, model.conv_sections) if kind.holder == "shares" else None
            planes = described.items(buffers, _numbered(numbers), kind.share(ranks), parts)
        described.add(name, kind, planes, buffers)
    return described


def _kinds_of(ratios: Sequence[int], *kinds: tuple[str, int]) -> list[Named]:
    """Kind by kind, each with its ratio, a buffer for each layer that has this ratio: the order of SGLang's lists."""
    return [(kind, layer) for kind, ratio in kinds for layer, layer_ratio in enumerate(ratios) if layer_ratio == ratio]


def _check(args: Any) -> None:
    if (aux_bytes := sum(args.aux_item_lens)) > AUX_BYTES_MAX:
        raise ConfigError(f"metadata of a request: {aux_bytes} bytes, must be at most {AUX_BYTES_MAX}")
    compressed = bool(_ratios(args))
    supported, kinds = KINDS_OF_V4 if compressed else KINDS, _kinds(args)
    for kind in kinds:
        # SGLang lists the windows of a draft model of DeepSeek V4's as a second state.
        if kind not in supported or kinds.count(kind) > (2 if compressed and kind == WINDOW else 1):
            raise ConfigError(f"state {kind}: is not supported; must be one each of {', '.join(sorted(supported))}")
        if kind == WINDOW and not compressed and args.swa_kv_cache_layout != "nhd":
            raise ConfigError(f"state swa: its layout is {args.swa_kv_cache_layout}, must be nhd")


def has_rows_of_pages(args: Any) -> bool:
    """True if a row of the KV cache is a whole page: DeepSeek V4's, and MiniMax's in NVFP4. Of these SGLang lists one
    buffer a layer, not K and V."""
    layers = list(getattr(args, "kv_layer_ids", None) or ())[: len(args.kv_data_ptrs) - args.num_draft_entries]
    has_one_each = 0 < len(layers) == len(set(layers))
    return bool(_ratios(args)) or (has_one_each and MINIMAX_INDEX in _kinds(args))


def _ratios(args: Any) -> list[int]:
    """The tokens of a row, for each layer of DeepSeek V4; empty for other models."""
    ratios = [int(ratio) for ratio in getattr(args, "mla_compression_ratios", None) or ()]
    if unknown := sorted(set(ratios) - _RATIOS):
        raise ConfigError(f"KV cache: compression by {_listed(unknown)} is not supported; must be {_listed(_RATIOS)}")
    return ratios


def _kinds(args: Any) -> list[str]:
    return [str(getattr(kind, "value", kind)) for kind in args.state_types]


def _numbered(layers: Sequence[int]) -> list[Named]:
    """Items of these layers; several of one layer are of several kinds."""
    counts: Counter[int] = Counter()
    kinds: list[Named] = []
    for layer in layers:
        kinds.append((f"item{counts[layer] or ''}", layer))
        counts[layer] += 1
    return kinds


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _slots(name: str, buffers: Buffers, page_size: int) -> int:
    counts = {
        count // item * page_size for count, item in zip(buffers.byte_counts, buffers.item_bytes, strict=True) if item
    }
    if len(counts) != 1:
        raise ConfigError(f"{name}: its buffers hold {_listed(counts)} rows, not all the same number")
    return counts.pop()
