"""What each layer of a model keeps of a token, and the components that hold it."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, Literal

import torch
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from ....adapters.kit.facts import dtype_name
from ....errors import ConfigError, LocalProtocolError
from ....layout.layout import Component, Layout, Plane, Span
from ....layout.layout_builders import host_layout
from ...engine_api import EngineConfig, EngineDescription

KV, WINDOW, INDEX = "kv", "window", "index"  # components
LATENT = "latent"  # a kind of row, as all adapters name it
_ALIGNMENT = 4_096
_SERVED = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer's rows. `kinds` maps a kind to (heads, numbers of a head); of a latent row, `split` is its first part's
    numbers."""

    layer: int
    dtype: torch.dtype
    kinds: tuple[tuple[str, int, int], ...]
    window: int = 0  # tokens that it attends to; 0: all
    first_head: int = 0  # of a rank, among those of the whole layer
    shared: bool = True  # whether all tensor-parallel ranks keep the same
    index: int = 0  # numbers of an index row; 0: it has none
    picks: bool = False  # whether it attends to the picks of an index: its own, or that of a layer before
    split: int = 0

    @property
    def component(self) -> str:
        """The component of its keys."""
        return WINDOW if self.window else KV


def shapes_of(cache: Any, *, latent: bool) -> tuple[LayerShape, ...]:
    """By a cache of transformers that holds one token. Raises ConfigError, naming the layer, for one that keeps
    something else than rows of tokens."""
    shapes: list[LayerShape] = []
    for number, layer in enumerate(cache.layers):
        if type(layer) not in _SERVED:
            raise ConfigError(f"layer {number}: {type(layer).__name__}: it keeps more than keys of tokens")
        if layer.keys is None:
            raise ConfigError(f"layer {number}: it keeps no keys of its own")
        (_, heads, _, key), (_, value_heads, _, value) = layer.keys.shape, layer.values.shape
        kinds = (("k", heads, key), ("v", value_heads, value))
        if latent and heads == value_heads == 1:
            kinds = ((LATENT, 1, key + value),)
        index = getattr(layer, "indexer_keys", None)
        shapes.append(
            LayerShape(
                layer=number, dtype=layer.keys.dtype, kinds=kinds, window=getattr(layer, "sliding_window", 0),
                index=0 if index is None else index.shape[-1], split=key if len(kinds) == 1 else 0,
                picks=isinstance(layer, DynamicIndexedLayer),
            )
        )  # fmt: skip
    windows = {shape.window for shape in shapes} - {0}
    if len(windows) > 1:
        raise ConfigError(f"sliding_window: windows of {sorted(windows)} tokens; all must be equal")
    return tuple(shapes)


def pick_groups(shapes: Sequence[LayerShape]) -> list[range]:
    """The layers that share an index's picks, where every layer attends over latents to such picks; else none."""
    if not shapes[0].index or not all(shape.picks and shape.split for shape in shapes):
        return []
    first = [shape.layer for shape in shapes if shape.index]
    return [range(*pair) for pair in pairwise([*first, shapes[-1].layer + 1])]


def hot_component(config: EngineConfig, shapes: Sequence[LayerShape], *, slots: int) -> Component:
    """KV of this many tokens in the memory of a device, where any token may be hot."""
    rows = [(shape.layer, _parts(shape), shape.dtype) for shape in shapes]
    near = replace(config, host_layout="layer_first", page_size=1)
    return Component(KV, "hbm", 1, Span(), Layout(tuple(_planes(near, rows, slots=slots, base=0)), 1, slots))


def describe(
    config: EngineConfig,
    shapes: Sequence[LayerShape],
    *,
    name: str,
    digest: bytes,
    window_slots: int,
    hbm: bool,
    context_tokens: int = 0,
) -> EngineDescription:
    """Components one behind the other; with HiSparse, the index and the KV of dense requests in the device's memory.
    Raises ConfigError if slots, page size and layout do not make a pool."""
    components: list[Component] = []
    ends = {"dram": 0, "hbm": 0}
    hisparse, ranks = config.hisparse if config.role == "decode" else None, config.group.ranks
    near = replace(config, host_layout="layer_first", page_size=1)
    for component in (KV, WINDOW, INDEX):
        if component == INDEX:
            rows = [(shape.layer, ((INDEX, range(1), shape.index),), shape.dtype) for shape in shapes if shape.index]
        else:
            rows = [(shape.layer, _parts(shape), shape.dtype) for shape in shapes if shape.component == component]
        if not rows:
            continue
        span, slots = Span(), config.slots
        if component == WINDOW:
            window = max(shape.window for shape in shapes)
            span = Span("last", window)
            if config.role == "decode":
                most = window_slots or 2 * config.batch_max * window
                slots = min(slots, -(-most // config.page_size) * config.page_size)
        if len({heads for _, kinds, _ in rows for _, heads, _ in kinds}) > 1 and not _shared(shapes, component):
            raise ConfigError(f"tp_size = {ranks.tp_size}: layers of {component} with unequal heads are not split")
        wanted: list[tuple[EngineConfig, Literal["dram", "hbm"], int]] = [(config, "hbm" if hbm else "dram", slots)]
        if hisparse is not None and component == INDEX:
            wanted = [(near, "hbm", slots + hisparse.dense_slots)]
        elif hisparse is not None:
            wanted.append((near, "hbm", hisparse.dense_slots))
        for how, memory, count in wanted:
            try:
                layout = Layout(tuple(_planes(how, rows, slots=count, base=ends[memory])), how.page_size, count)
            except (LocalProtocolError, ValueError) as error:
                raise ConfigError(f"no pool of {count} slots, page_size {how.page_size}: {error}") from None
            components.append(Component(component, memory, 1, span, layout))
            ends[memory] = -(-layout.end // _ALIGNMENT) * _ALIGNMENT
    sizes = {
        memory: max((component.layout.end for component in components if component.memory == memory), default=0)
        for memory in ends
    }
    return EngineDescription(
        model=name, weights=digest, components=tuple(components), memory_bytes=sizes["dram"], hbm_bytes=sizes["hbm"],
        full_sampling=True, context_tokens=config.context_tokens(context_tokens),
        replicas={
            part.name: (ranks.tp_rank, ranks.tp_size) for part in components if _shared(shapes, part.name)
        },
    )  # fmt: skip


def _parts(shape: LayerShape) -> list[tuple[str, range, int]]:
    """Its kinds, with the heads as those of the whole layer."""
    return [(kind, range(shape.first_head, shape.first_head + heads), size) for kind, heads, size in shape.kinds]


def _shared(shapes: Sequence[LayerShape], component: str) -> bool:
    """True if all tensor-parallel ranks keep the same rows of a component."""
    return component == INDEX or all(shape.shared for shape in shapes if shape.component == component)


def _planes(config: EngineConfig, rows: Sequence[Any], *, slots: int, base: int) -> list[Plane]:
    """Layers of equal rows are one tensor, whose kinds are side by side in it where they are of equal size."""
    planes: list[Plane] = []
    parts = [(heads, size, dtype, kind, layer) for layer, kinds, dtype in rows for kind, heads, size in kinds]
    order = {kind: index for index, kind in enumerate(dict.fromkeys(kind for *_, kind, _ in parts))}
    parts.sort(key=lambda part: (part[0].start, len(part[0]), part[1], str(part[2]), order[part[3]], part[4]))
    for (heads, size, dtype), alike in groupby(parts, key=lambda part: part[:3]):
        kinds: dict[str, list[int]] = {}
        for *_, kind, layer in alike:
            kinds.setdefault(kind, []).append(layer)
        for layers, same in groupby(kinds, key=lambda kind: kinds[kind]):
            layout = host_layout(
                config.host_layout, kinds=list(same), layers=layers, heads=heads, head_bytes=size * dtype.itemsize,
                dtype=dtype_name(dtype), slots=slots, page_size=config.page_size, base=base,
            )  # fmt: skip
            planes += layout.planes
            base = -(-layout.end // _ALIGNMENT) * _ALIGNMENT
    return planes
