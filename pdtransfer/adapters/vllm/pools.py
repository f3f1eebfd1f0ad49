"""vLLM's KV cache as components: a plane for each layer and head, whose rows are whole blocks.

vLLM shows each layer as [blocks, heads, tokens, width]. How a block holds its tokens is the attention backend's own
affair, so blocks cross as they are, and both engines need the same block size and backend. Heads lie apart, so that
engines of other tensor-parallel sizes take their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import ConfigError
from ...layout.layout import DTYPE_BYTES, Component, Layout, Plane, Span
from ...limits import COMPONENTS_MAX
from ...wire import Ranks
from .orders import Group


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer of a KV cache: the address of its first byte, and its [blocks, heads, tokens, width] with strides in
    bytes."""

    address: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: Any) -> LayerView:
        """That of a torch tensor. Raises ConfigError for one of another shape."""
        if tensor.ndim != 4:
            raise ConfigError(f"{name}: a KV cache of shape {tuple(tensor.shape)}, not [blocks, heads, tokens, width]")
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
            raise ConfigError(f"{name}: the numbers of a row are {tensor.stride(3)} apart: its blocks are not dense")
        size: int = tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        strides: tuple[int, int, int, int] = tuple(stride * size for stride in tensor.stride())
        known = dtype if DTYPE_BYTES.get(dtype) == size else "uint8"
        return cls(tensor.data_ptr(), tuple(tensor.shape), strides, known)

    @property
    def end(self) -> int:
        """One past its last byte."""
        last = sum((count - 1) * stride for count, stride in zip(self.shape, self.strides, strict=True))
        return self.address + last + self.strides[3]


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
    views: Mapping[str, LayerView],
    groups: Sequence[tuple[Group, Sequence[str]]],
    *,
    blocks: int,
    base: int,
    heads: Heads,
    memory: Literal["dram", "hbm"] = "dram",
) -> Pools:
    """Components of `groups`, each with the names of its layers, whose planes begin at offsets from `base`.

    Layers that share another one's cache are left out. Raises ConfigError, with the layer's name, for a cache that
    cannot cross.
    """
    if not 1 <= len(groups) <= COMPONENTS_MAX:
        raise ConfigError(f"KV cache groups: {len(groups)}, from 1 to {COMPONENTS_MAX} can cross")
    components: list[Component] = []
    replicas: dict[str, tuple[int, int]] = {}
    layers: list[tuple[int, ...]] = []
    complete_after: dict[str, tuple[int, int]] = {}
    for at, (group, names) in enumerate(groups):
        planes: list[Plane] = []
        seen: set[int] = set()
        kinds: dict[int, int] = {}
        here: dict[int, str] = {}
        for order, name in enumerate(names):
            view = views.get(name)
            if view is None or view.address in seen:
                continue
            seen.add(view.address)
            layer = layer_number(name, order)
            kind = kinds[layer] = kinds.get(layer, -1) + 1
            here[layer] = name
            planes += _planes(name, view, layer, "kv" if not kind else f"kv{kind}", blocks, base, heads)
            replicas[group.name] = heads.replica(view.shape[1])
        if not planes:
            raise ConfigError(f"{group.name}: none of its layers has a KV cache: {', '.join(names)}")
        try:
            layout = Layout(tuple(planes), 1, blocks)
        except ValueError as error:
            raise ConfigError(f"{group.name}: {error}") from None
        components.append(Component(group.name, memory, group.block_size, Span(), layout))
        layers.append(tuple(here))
        complete_after |= {name: (at, layer) for layer, name in here.items()}
    return Pools(tuple(components), replicas, tuple(layers), complete_after)


def layer_number(name: str, order: int) -> int:
    """The model's number of a layer, which vLLM writes into its name; else its place among the names."""
    found = re.search(r"\.(\d+)(?:\.|$)", name)
    return int(found[1]) if found else order


def _planes(name: str, view: LayerView, layer: int, kind: str, blocks: int, base: int, heads: Heads) -> list[Plane]:
    """One for each head, and for each part of a block where the backend's own blocks are smaller than vLLM's."""
    count, held, tokens, width = view.shape
    block, head, token, element = view.strides
    if count % blocks:
        raise ConfigError(f"{name}: {count} blocks, vLLM has {blocks}")
    parts = count // blocks
    row = width * element
    if token == row and element * width * tokens <= max(head, row * tokens):
        run, runs = row * tokens, held
    elif head == row and token == row * held:
        # A token's heads lie together: they cannot be told apart, so this rank's block is one thing.
        run, runs = row * held * tokens, 1
    else:
        raise ConfigError(f"{name}: blocks of {view.shape} with strides {view.strides} are not dense")
    if parts > 1 and runs == 1 and block == run:
        run, parts = run * parts, 1
        block = run
    first = heads.first(held) if runs == held else heads.ranks.tp_rank
    return [
        Plane(
            layer=layer, kind=kind if part == 0 else f"{kind}.{part}", dtype=view.dtype, head_start=first + at,
            head_count=1, base=view.address - base + part * block + at * head, page_stride=block * parts,
            row_stride=block * parts, row_bytes=run,
        )
        for part in range(parts)
        for at in range(runs)
    ]  # fmt: skip
