"""A cache of transformers whose keys and values are rows of our pool or arena, and the model's forward pass over it."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ....kernels.plane_views import steps_of, view_of
from ....layout.layout import Component, Layout, Plane
from .checkpoint import Checkpoint, with_cache
from .layers import INDEX, KV, LATENT, WINDOW, LayerShape, pick_groups

Steps: TypeAlias = tuple[int, int]  # rows of a view between two pages, and between two slots of a page


def _ignored(layer: int) -> None:
    pass


@dataclass(slots=True, kw_only=True, eq=False)
class Pass:
    """One forward pass of B requests with Q new tokens each, as the cache's layers see it.

    `writes` has the slots of the new tokens, (B * Q,), and `reads` those of the T tokens that they attend to, (B, T),
    by component. With `fresh`, the new tokens attend to one another alone, and nothing is read. With `picked`,
    attention itself reads what a sparse index has picked.
    """

    writes: Mapping[str, Tensor]
    reads: Mapping[str, Tensor]
    fresh: bool = False
    picked: bool = False
    on_layer: Callable[[int], None] = _ignored  # called before a layer's rows are written


class KindRows:
    """All rows of one kind in one layer. Planes of parts of the heads are one."""

    def __init__(self, storage: Tensor, planes: Sequence[Plane], heads: int) -> None:
        first = planes[0].head_start
        strides = {steps_of(plane) for plane in planes}
        assert len(strides) == 1, strides
        (self.steps,) = strides
        self._heads = heads
        self._parts = [
            (slice(plane.head_start - first, plane.head_start - first + plane.head_count), view_of(storage, plane))
            for plane in planes
        ]

    def read(self, rows: Tensor) -> Tensor:
        """PagedRows (n,) -> a new tensor (n, heads, size)."""
        if len(self._parts) == 1:
            return torch.index_select(self._parts[0][1], 0, rows).view(len(rows), self._heads, -1)
        parts = [torch.index_select(view, 0, rows).view(len(rows), -1) for _, view in self._parts]
        return torch.stack(parts, 1) if len(parts) == self._heads else torch.cat(parts, 1)

    def write(self, rows: Tensor, given: Tensor) -> None:
        """Writes (n, heads, size) to rows (n,)."""
        for heads, view in self._parts:
            view.index_copy_(0, rows, given[:, heads].reshape(len(rows), -1))


class PagedRows:
    """A pool or an arena as the rows of every layer and kind, and the pass that uses it now."""

    def __init__(self, memory: Tensor, components: Sequence[Component], shapes: Sequence[LayerShape]) -> None:
        self._layouts: dict[str, Layout] = {component.name: component.layout for component in components}
        self._kinds: dict[tuple[int, str], KindRows] = {}
        for shape in shapes:
            kinds = [(*kind, shape.component) for kind in shape.kinds]
            kinds += [(INDEX, 1, shape.index, INDEX)] if shape.index and INDEX in self._layouts else []
            storage = memory.view(shape.dtype)
            for kind, heads, _, component in kinds:
                planes = self._layouts[component].planes
                layer_planes = [plane for plane in planes if (plane.layer, plane.kind) == (shape.layer, kind)]
                layer_planes.sort(key=lambda plane: plane.head_start)
                self._kinds[shape.layer, kind] = KindRows(storage, layer_planes, heads)
        self._pass = Pass(writes={}, reads={})
        self._places: dict[tuple[str, Steps, bool], Tensor] = {}

    def enter(self, now: Pass) -> None:
        """The pass that begins."""
        self._pass = now
        self._places.clear()

    @property
    def now(self) -> Pass:
        """The pass under way."""
        return self._pass

    def exchange(self, layer: int, kind: str, component: str, given: Tensor) -> Tensor:
        """Writes the new tokens' rows (B, heads, Q, size); returns those of all that they attend to, (B, heads, T,
        size)."""
        self.write(layer, kind, component, given)
        rows = self._kinds[layer, kind]
        batch, heads, _, size = given.shape
        if self._pass.fresh:
            return given
        read = rows.read(self._place(component, rows.steps, written=False))
        return read.view(batch, -1, heads, size).transpose(1, 2)

    def write(self, layer: int, kind: str, component: str, given: Tensor) -> None:
        """Writes the new tokens' rows (B, heads, Q, size)."""
        rows = self._kinds[layer, kind]
        _, heads, _, size = given.shape
        rows.write(self._place(component, rows.steps, written=True), given.transpose(1, 2).reshape(-1, heads, size))

    def read(self, layer: int, kind: str, component: str, slots: Tensor) -> Tensor:
        """PagedRows of slots (n,) -> (n, heads, size)."""
        rows = self._kinds[layer, kind]
        return rows.read(self._rows_of(component, rows.steps, slots))

    def _place(self, component: str, steps: Steps, *, written: bool) -> Tensor:
        rows = self._places.get((component, steps, written))
        if rows is None:
            slots = (self._pass.writes if written else self._pass.reads)[component].reshape(-1)
            rows = self._places[component, steps, written] = self._rows_of(component, steps, slots)
        return rows

    def _rows_of(self, component: str, steps: Steps, slots: Tensor) -> Tensor:
        page_size = self._layouts[component].page_size
        return slots // page_size * steps[0] + slots % page_size * steps[1] if page_size > 1 else slots * steps[0]


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where a step finds the rows of its B requests: `newest` has the slots of their new tokens, (B,). `place` returns
    those of the positions that the index of a group of layers has picked, (B, k) with -1 for none."""

    newest: Tensor
    place: Callable[[int, Tensor], Tensor]


class PickedRows:
    """The rows that a step reads of each layer: those that its index has picked, and the new tokens'."""

    def __init__(self, rows: PagedRows, shapes: Sequence[LayerShape], places: Places, positions: Tensor) -> None:
        """`positions` (B,) are the new tokens'."""
        self._rows, self._places, self._positions = rows, places, positions[:, None]
        self._splits = {shape.layer: shape.split for shape in shapes}
        self._groups = {group.start: index for index, group in enumerate(pick_groups(shapes))}
        self._slots = self._seen = torch.empty(0)

    def read(self, layer: int, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As latent.PickReader."""
        if layer in self._groups:
            self._find(self._groups[layer], indices[:, 0].to(torch.int64))
        latent = self._rows.read(layer, LATENT, KV, self._slots.view(-1)).transpose(0, 1)
        latent = latent.view(len(self._positions), 1, self._slots.shape[1], -1)
        split = self._splits[layer]
        return latent[..., :split], latent[..., split:], self._seen

    def _find(self, group: int, picks: Tensor) -> None:
        # The index ranks the new token among the others. The place of its row is known, and a request shorter than the
        # picks has some of tokens that are not there.
        earlier = picks < self._positions
        newest = self._places.newest.to(torch.int64)[:, None]
        slots = self._places.place(group, torch.where(earlier, picks, -1)).clamp(min=0)
        self._slots = torch.cat((torch.where(earlier, slots, newest), newest), 1)
        self._seen = torch.cat((earlier, (picks == self._positions).any(1, keepdim=True)), 1)[:, None, None]


class PagedLayer(CacheLayerMixin):
    """One layer of the cache. It holds nothing itself."""

    def __init__(self, rows: PagedRows, index: PagedRows, shape: LayerShape) -> None:
        super().__init__()
        self._rows, self._index, self._shape = rows, index, shape
        self.is_sliding = bool(shape.window)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the rows are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Takes the new tokens' keys and values; returns those of all tokens that they attend to."""
        shape, rows = self._shape, self._rows
        rows.now.on_layer(shape.layer)
        if shape.split:
            both = torch.cat((key_states, value_states), -1)
            if rows.now.picked:  # attention reads the others when it knows which
                rows.write(shape.layer, LATENT, shape.component, both)
                return key_states, value_states
            latent = rows.exchange(shape.layer, LATENT, shape.component, both)
            return latent[..., : shape.split], latent[..., shape.split :]
        return (
            rows.exchange(shape.layer, "k", shape.component, key_states),
            rows.exchange(shape.layer, "v", shape.component, value_states),
        )

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The same of the index's keys, (B, Q, size) -> (B, T, size)."""
        return self._index.exchange(self._shape.layer, INDEX, INDEX, indexer_key_states.unsqueeze(1)).squeeze(1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of a fresh pass, for which transformers makes the mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Tokens before the pass, for which transformers makes the mask."""
        return 0

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1


class PagedModel:
    """A model over one pool or arena."""

    def __init__(
        self, checkpoint: Checkpoint, memory: Tensor, components: Sequence[Component], *, index: PagedRows | None = None
    ) -> None:
        """`index` has the rows of the index, where they are in other memory."""
        shapes = self._shapes = checkpoint.shapes
        self.rows = PagedRows(memory, components, shapes)
        self._index = self.rows if index is None else index
        self._checkpoint = checkpoint
        self._dtype = shapes[0].dtype
        self._cache = Cache(layers=[PagedLayer(self.rows, self._index, shape) for shape in shapes])
        self.window = max(shape.window for shape in shapes)
        self._whole = any(not shape.window for shape in shapes)
        self._picks = bool(pick_groups(shapes))

    def chunk(
        self, ids: Tensor, slots: Mapping[str, Tensor], *, done: int, on_layer: Callable[[int], None] = _ignored
    ) -> Tensor:
        """Computes the tokens `ids` (Q,) behind `done` others of a prompt. `slots` has those of the whole prompt, by
        component. Returns the logits of the last one, (vocabulary,), in float32."""
        end, device = done + len(ids), ids.device
        positions = torch.arange(done, end, device=device)
        first = max(0, done - self.window + 1)
        reads = {name: indices[None, first if name == WINDOW else 0 : end] for name, indices in slots.items()}
        masks: dict[str, Tensor] = {}
        if done:
            keys = torch.arange(end, device=device)
            seen = keys <= positions[:, None]
            masks[KV] = self._additive(seen)[None, None]
            if self.window:
                near = (seen & (keys > positions[:, None] - self.window))[:, first:]
                masks[WINDOW] = self._additive(near)[None, None]
        now = Pass(
            writes={name: indices[done:end] for name, indices in slots.items()},
            reads=reads,
            fresh=not done,
            on_layer=on_layer,
        )
        return self._forward(now, ids[None], positions[None], masks)[0]

    def step(
        self, ids: Tensor, slots: Mapping[str, Tensor], positions: Tensor, *, last: int, begins: Tensor, ring: Tensor,
        places: Places | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes one token of each request, `ids` (B,) at `positions` (B,), all below `last`. `slots` has each one's,
        (B, n), by component. Those of a window are a ring of `ring` (B,) slots, in which the token at `begins` (B,) is
        the first. With `places`, the slots of `kv` are found there. Returns logits (B, vocabulary) in float32."""
        columns = positions[:, None]
        writes: dict[str, Tensor] = {} if places is None else {KV: places.newest.to(torch.int64)}
        reads: dict[str, Tensor] = {}
        masks: dict[str, Tensor] = {}
        if self._whole:
            seen = torch.arange(last, device=ids.device) <= columns
            masks[KV] = self._additive(seen)[:, None, None]
        for name, indices in slots.items():
            if name == WINDOW:
                keys = columns + torch.arange(1 - min(last, self.window), 1, device=ids.device)
                clamped = (keys - begins[:, None]).clamp_(min=0) % ring[:, None]
                reads[name] = indices.gather(1, clamped)
                writes[name] = indices.gather(1, (columns - begins[:, None]) % ring[:, None]).view(-1)
                masks[name] = self._additive(keys >= 0)[:, None, None]
                continue
            writes[name] = indices.gather(1, columns).view(-1)
            if name == KV and self._picks:
                places = Places(writes[name], lambda _, picks, table=indices: table.gather(1, picks.clamp(min=0)))
            else:
                # Rows that are not written yet may hold anything: a mask does not make a NaN finite.
                reads[name] = torch.where(seen, indices[:, :last], indices[:, :1])
        picked = None if places is None else PickedRows(self.rows, self._shapes, places, positions)
        now = Pass(writes=writes, reads=reads, picked=picked is not None)
        return self._forward(now, ids[:, None], columns, masks, picked)

    def _forward(
        self, now: Pass, ids: Tensor, positions: Tensor, masks: Mapping[str, Tensor], picked: PickedRows | None = None
    ) -> Tensor:
        self.rows.enter(now)
        self._index.enter(now)
        mask: Any = masks.get(KV if self._whole else WINDOW)
        if masks and self._checkpoint.by_layer_type:
            mask = {
                "full_attention": masks.get(KV), "indexed_attention": masks.get(KV),
                "sliding_attention": masks.get(WINDOW),
            }  # fmt: skip
        result = self._checkpoint.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, logits_to_keep=1,
            **with_cache(self._checkpoint.model, self._cache), **({} if picked is None else {"picked": picked}),
        )  # fmt: skip
        return result.logits[:, -1].float()

    def _additive(self, seen: Tensor) -> Tensor:
        """0 where a key is seen, and the lowest number elsewhere."""
        lowest = torch.finfo(self._dtype).min
        return torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, lowest)
