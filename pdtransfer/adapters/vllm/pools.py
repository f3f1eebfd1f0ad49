"""vLLM's KV cache as components, whose rows are whole blocks: a plane for each layer, which splits at its heads.

vLLM shows each layer as [blocks, heads, tokens, width]. How a block holds its tokens is the attention backend's own
affair, so blocks cross as they are, and both engines need the same block size and backend. Heads lie apart, so that
engines of other tensor-parallel sizes take their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import ConfigError, LocalProtocolError
from ...layout.layout import DTYPE_BYTES, Component, Layout, Plane, Span
from ...layout.layout_builders import Axis, strided_layout
from ...limits import COMPONENTS_MAX
from ...wire import Ranks
from .orders import KVGroup


@dataclass(frozen=True, slots=True)
class Heads:
    """The KV heads of a model, and this rank's part of them."""

    total: int
    ranks: Ranks

    def first(self, count: int) -> int:
        """The number of this rank's first head, of `count` in a layer."""
        return (
            self.ranks.tp_rank * self.total // self.ranks.tp_size if self._replicas(count) > 1 else self._split(count)
        )

    def replica(self, count: int) -> tuple[int, int]:
        """This rank's number among those that hold the same heads, and how many there are."""
        replicas = self._replicas(count)
        return self.ranks.tp_rank % replicas, replicas

    def _split(self, count: int) -> int:
        return self.ranks.tp_rank * count

    def _replicas(self, count: int) -> int:
        """Ranks share the heads out; where there are fewer heads than ranks, several hold the same one."""
        size = self.ranks.tp_size
        return size // self.total if count == 1 and self.total < size and size % self.total == 0 else 1


@dataclass(frozen=True, slots=True)
class Pools:
    """The components of a KV cache, one a group, and after which layer's name each (group, model layer) is complete."""

    components: tuple[Component, ...]
    replicas: dict[str, tuple[int, int]]
    layers: tuple[tuple[int, ...], ...]  # of each group
    complete_after: dict[str, tuple[int, int]]  # (index in components, layer)


def pools(
    views: Mapping[str, Any],
    groups: Sequence[tuple[KVGroup, Sequence[str]]],
    *,
    blocks: int,
    base: int,
    heads: Heads,
    memory: Literal["dram", "hbm"] = "dram",
) -> Pools:
    """Components of `groups`, each with the names of its layers, whose planes begin at offsets from `base`.

    `views` are torch tensors, [blocks, heads, tokens, width]. Layers that share another one's cache are left out.
    Raises ConfigError, with the layer's name, for a cache that cannot cross.
    """
    if not 1 <= len(groups) <= COMPONENTS_MAX:
        raise ConfigError(f"KV cache groups: {len(groups)}, from 1 to {COMPONENTS_MAX} can cross")
    components: list[Component] = []
    replicas: dict[str, tuple[int, int]] = {}
    layers: list[tuple[int, ...]] = []
    complete_after: dict[str, tuple[int, int]] = {}
    for at, (group, names) in enumerate(groups):
        planes: list[Plane] = []
        own: dict[int, str] = {}  # by address
        kinds: Counter[int] = Counter()
        last: dict[int, str] = {}  # by layer
        for order, name in enumerate(names):
            if name not in views or own.setdefault(views[name].data_ptr(), name) != name:
                continue
            layer = layer_number(name, order)
            kind = f"kv{kinds[layer] or ''}"
            kinds[layer] += 1
            last[layer] = name
            planes += _planes(name, views[name], layer, kind, blocks=blocks, base=base, heads=heads)
            replicas[group.name] = heads.replica(views[name].shape[1])
        if not planes:
            raise ConfigError(f"{group.name}: none of its layers has a KV cache: {', '.join(names)}")
        try:
            layout = Layout(tuple(planes), 1, blocks)
        except ValueError as error:
            raise ConfigError(f"{group.name}: {error}") from None
        components.append(Component(group.name, memory, group.block_size, Span(), layout))
        layers.append(tuple(last))
        complete_after |= {name: (at, layer) for layer, name in last.items()}
    return Pools(tuple(components), replicas, tuple(layers), complete_after)


def range_of(views: Iterable[Any]) -> tuple[int, int]:
    """The addresses from the first byte of all views to one past the last."""
    ranges = [
        (view.data_ptr(), view.data_ptr() + view.element_size() * (1 + _last_element(view.shape, view.stride())))
        for view in views
    ]
    return min(first for first, _ in ranges), max(end for _, end in ranges)


def layer_number(name: str, order: int) -> int:
    """The model's number of a layer, which vLLM writes into its name; else its place among the names."""
    found = re.search(r"\.(\d+)(?:\.|$)", name)
    return int(found[1]) if found else order


def _last_element(shape: Sequence[int], strides: Sequence[int]) -> int:
    return sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))


def _planes(name: str, view: Any, layer: int, kind: str, *, blocks: int, base: int, heads: Heads) -> list[Plane]:
    """One for each head, and for each part of a block where the backend's own blocks are smaller than vLLM's."""
    if view.ndim != 4 or view.shape[0] % blocks:
        raise ConfigError(f"{name}: a KV cache of shape {tuple(view.shape)}, not [{blocks}, heads, tokens, width]")
    count = view.shape[1]
    first = heads.first(count)
    own = range(first, first + count)
    axes: Sequence[Axis] = ("page", "head")
    if count > 1 and view.stride(1) < view.stride(2):
        # A token's heads lie together: they cannot be told apart, so this rank's block is one thing.
        view, own = view.transpose(1, 2), range(heads.ranks.tp_rank, heads.ranks.tp_rank + 1)
        axes = ("page",)
    parts = view.shape[0] // blocks
    dtype = str(view.dtype).removeprefix("torch.")
    try:
        return [
            plane
            for part in range(parts)
            for plane in strided_layout(
                {(layer, f"{kind}.{part}" if part else kind): view[part::parts]}, axes=axes, heads=own, origin=base,
                dtype=dtype if dtype in DTYPE_BYTES else "uint8",
            ).planes
        ]  # fmt: skip
    except (LocalProtocolError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from None
