"""The prefill side of the reference model: chunks of prompts into a paged pool, cell by cell.

Prefill attends to every key, even if decode will pick: with `top_k` it also computes the index's keys.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from pdtransfer.kernels.stream import DeviceSpans, Download, upload, wait_event
from pdtransfer.layout.layout import expand_pages
from pdtransfer.memory.free_pages import FreePages
from pdtransfer.memory.shared_pool import shared_memory
from pdtransfer.serve.engine_api import (
    Broken,
    CardMemory,
    Computed,
    EngineConfig,
    EngineDescription,
    Event,
    Prefilled,
    Request,
    SharedMemory,
)
from pdtransfer.serve.sampling import chain, pick
from pdtransfer.wire import Ranks

from .architecture import EngineOptions, Shard
from .attention import KEY_BLOCK, EveryKey, Keys, RowBatch, Tiles, causal_bias
from .cache import Cache
from .description import COMPONENT, INDEX, check_request, describe
from .indexer import IndexCache
from .model import Transformer
from .numerics import BLOCK_ROWS, block_up, first_product
from .projection import Layer
from .sampling import Handoff

AHEAD_MAX = 8  # cells that are queued on a GPU: a full launch queue would block other threads' launches


@dataclass(slots=True, eq=False)
class _PromptRoom:
    """A prompt in progress. The pool has rows [0, done) in all layers of this stage, and [done, end) below `layer`.

    The chunk [done, end) takes the same number of `turns` on every stage, so that all stages compute in one order. The
    first stage divides its layers among the turns; the others compute in the last turn.
    """

    request: Request
    pages: dict[str, NDArray[np.int64]]
    index: Tensor  # (key blocks, KEY_BLOCK) int64 cache rows
    indexed: Tensor | None  # rows of the index cache, (2, tokens)
    done: int = 0
    end: int = 0
    turns: int = 0
    layer: int = 0
    batch: RowBatch | None = None
    hidden: Tensor | None = None

    @property
    def left(self) -> int:
        return len(self.request.prompt) - self.done


@dataclass(slots=True)
class _Pick:
    """A prompt whose last row's logits are being copied to the CPU."""

    request: Request
    logits: Download


class _IndexedKeys:
    """Every key, and the index's key of each row, which decode steps read."""

    def __init__(
        self, every: EveryKey, model: Transformer, cache: IndexCache, targets: Tensor, positions: Tensor, own: slice
    ) -> None:
        assert model.indexer is not None
        self._indexer, self._cache, self._targets = model.indexer, cache, targets
        self._positions, self._own = positions, own
        self.readings, self.write = every.readings, every.write

    def enter(self, layer: int, weights: Layer, hidden: Tensor) -> None:
        if layer in self._cache.layers:
            keys = self._indexer.keys(weights, hidden, self._positions)
            self._cache.write(layer, self._targets, keys[self._own])


class ReferencePrefill:
    """A PrefillEngine. The oldest room and the room with the fewest remaining tokens take turns.

    So a short prompt waits for one chunk of a long prompt, and a long prompt gets at least half of the time.
    """

    def __init__(self, config: EngineConfig, options: EngineOptions, model: Transformer) -> None:
        self._config, self._options, self._model = config, options, model
        self._description = describe(config, model, options)
        ranks = config.group.ranks
        self._first, self._last = ranks.pp_rank == 0, ranks.pp_rank == ranks.pp_size - 1
        opening = Shard.of(model.architecture, replace(ranks, pp_rank=0)).layers
        self._turns = -(-len(opening) // options.layers_per_cell) if options.layers_per_cell else 1
        elements = self._description.memory_bytes // 4
        if model.device.type == "cuda":
            self._flat = torch.zeros(elements, dtype=torch.float32, device=model.device)
            torch.cuda.current_stream(model.device).synchronize()  # other streams read it
        else:  # torch.zeros would touch every page of the pool
            self._shared = shared_memory(self._description.memory_bytes, self)
            self._flat = torch.frombuffer(self._shared.view, dtype=torch.float32, count=elements)
        layouts = {component.name: component.layout for component in self._description.components}
        self._cache = Cache(self._flat, layouts[COMPONENT], model.architecture, model.shard.kv_heads)
        self._index = IndexCache(self._flat, layouts[INDEX]) if INDEX in layouts else None
        self._pages = {
            name: FreePages(count=layout.slots // layout.page_size, page_size=layout.page_size)
            for name, layout in layouts.items()
        }
        self._spans = DeviceSpans(config.spans, model.device)
        self._ahead: deque[Event] = deque()  # of cells that the GPU may still compute
        self._picks: deque[_Pick] = deque()  # of prompts that are computed or queued
        self._held: dict[int, dict[str, NDArray[np.int64]]] = {}
        self._rooms: dict[int, _PromptRoom] = {}
        self._turn = 0

    @property
    def card(self) -> EngineDescription:
        return self._description

    @property
    def flat(self) -> Tensor:
        """The pool, for a decode engine in this process."""
        return self._flat

    @property
    def pool(self) -> SharedMemory | CardMemory:
        if self._flat.is_cuda:
            number, byte_count = self._flat.get_device(), self._description.memory_bytes
            return CardMemory(card=number, address=self._flat.data_ptr(), byte_count=byte_count)
        return self._shared

    def warm_up(self) -> None:
        self._model.enter()
        first_product(self._model.device)

    @property
    def idle(self) -> bool:
        return not self._rooms and not self._picks and (bool(self._held) or not self.telling)

    @property
    def telling(self) -> bool:
        """Whether spans must still be reported. They are reported once no room has pages: the writer first sends its
        last rows, which reporting would delay."""
        return self._spans.pending

    def admit(self, request: Request) -> bool:
        return self.admit_with_growth(request, 0) is not None

    def admit_with_growth(self, request: Request, growth: int) -> dict[str, NDArray[np.int64]] | None:
        """As `admit`, with pages for `growth` more tokens for decode from this pool. Returns slots by component."""
        check_request(request, self._model.architecture)
        if request.room in self._held:
            raise ValueError(f"room {request.room:016x} exists already")
        tokens = len(request.prompt) + growth
        if tokens > self._config.slots:
            raise ValueError(f"{tokens} tokens, the pool has {self._config.slots} slots")
        pages = {name: taken for name, free in self._pages.items() if (taken := free.take(tokens)) is not None}
        if pages.keys() != self._pages.keys():
            self._give(pages)
            return None
        if self.idle:
            self._spans.anchor()
        self._held[request.room] = pages
        slots = {name: expand_pages(own, self._pages[name].page_size, tokens) for name, own in pages.items()}
        index = self._cache.index(slots[COMPONENT][: len(request.prompt)], KEY_BLOCK).view(-1, KEY_BLOCK)
        indexed = self._index.index(slots[INDEX][: len(request.prompt)], 1) if self._index else None
        self._rooms[request.room] = _PromptRoom(request=request, pages=pages, index=index, indexed=indexed)
        return slots

    @torch.inference_mode()
    def step(self) -> list[Computed | Prefilled | Broken]:
        self._model.enter()
        events = self._advance() if self._rooms else []
        # Waits for the GPU only if there is nothing else to compute or to report.
        while self._picks and (self._picks[0].logits.ready or not (self._rooms or events)):
            events.append(self._first_token(self._picks.popleft()))
        if not self._held:
            self._spans.report()
        return events

    def _advance(self) -> list[Computed | Prefilled | Broken]:
        """Computes the next cells of the room whose turn it is."""
        self._turn += 1
        oldest = next(iter(self._rooms.values()))
        room = oldest if self._turn % 2 else min(self._rooms.values(), key=lambda room: room.left)
        if room.batch is None:
            room.end = min(room.done + self._config.chunk_tokens, len(room.request.prompt))
            room.batch = self._batch(room)
            room.layer = self._model.shard.layers.start
        room.turns += 1
        ends = room.turns == self._turns
        if not (self._first or ends):
            return []
        if room.hidden is None:
            room.hidden = self._model.embed(room.batch) if self._first else self._from_previous_stage(room.batch)
        events: list[Computed | Prefilled | Broken] = [*self._compute(room)]
        while ends and room.layer < self._model.shard.layers.stop:
            events += self._compute(room)
        if ends:
            hidden, room.hidden, room.batch, room.turns, room.done = room.hidden, None, None, 0, room.end
            if not self._last:
                self._config.group.hand_on(Download(hidden).get().numpy())
            if room.left == 0:
                events += self._finish(room, hidden)
        return events

    def cancel(self, room: int) -> None:
        self._rooms.pop(room, None)
        self._picks = deque(pick for pick in self._picks if pick.request.room != room)

    def free(self, room: int) -> None:
        self.cancel(room)
        self._give(self._held.pop(room, {}))

    def _give(self, pages: dict[str, NDArray[np.int64]]) -> None:
        for name, own in pages.items():
            self._pages[name].give(own)

    def _compute(self, room: _PromptRoom) -> list[Computed]:
        """Computes the room's chunk through the next layers. Returns one cell for each component."""
        assert room.batch is not None
        assert room.hidden is not None
        first, end = room.layer, self._model.shard.layers.stop
        room.layer = min(end, first + self._options.layers_per_cell) if self._options.layers_per_cell else end
        with self._spans.span("compute", f"rows {room.done}-{room.end}", room=room.request.room, layer=first):
            room.hidden = self._model.layers(room.hidden, room.batch, first, room.layer)
        after = self._event()
        cells = [(COMPONENT, (first, room.layer))]
        if leading := self._model.architecture.index_layers(range(first, room.layer)):
            cells.append((INDEX, (leading[0], leading[-1] + 1)))
        return [
            Computed(
                room=room.request.room,
                component=name,
                rows=(room.done, room.end),
                layers=layers,
                pages=room.pages[name][: self._pages[name].needed(room.end)],
                after=after,
            )
            for name, layers in cells
        ]

    def _event(self) -> Event | None:
        """Fires when everything computed so far is in the pool."""
        if not self._flat.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        self._ahead.append(event)
        if len(self._ahead) > AHEAD_MAX:
            wait_event(self._ahead.popleft())
        return event

    def _from_previous_stage(self, batch: RowBatch) -> Tensor:
        """The previous stage's hidden rows of the chunk."""
        hidden = np.empty((len(batch.ids), self._model.architecture.width), np.float32)
        self._config.group.take_over(hidden)
        return upload(torch.as_tensor(hidden), self._model.device)

    def _batch(self, room: _PromptRoom) -> RowBatch:
        """Rows [done, end), in tiles that begin at multiples of BLOCK_ROWS of the prompt."""
        first = room.done // BLOCK_ROWS * BLOCK_ROWS
        rows = block_up(room.end - first)
        own = slice(room.done - first, room.end - first)
        ids = torch.zeros(rows, dtype=torch.int64)
        ids[own] = torch.tensor(room.request.prompt[room.done : room.end])
        positions = torch.arange(first, first + rows, device=self._model.device)
        bias = causal_bias(positions.view(-1, BLOCK_ROWS))
        depths = [position // KEY_BLOCK for position in range(first, first + rows, BLOCK_ROWS)]
        together = self._model.tiles_together
        tiles = [
            Tiles(
                first=at,
                depths=depths[at : at + together],
                bias=bias[at : at + together],
                sources=[room.index[block] for block in range(depths[min(at + together, len(depths)) - 1] + 1)],
                ends=[room.end],
            )
            for at in range(0, len(depths), together)
        ]
        keys: Keys = EveryKey(self._cache, room.index.view(-1)[room.done : room.end], tiles)
        if self._index is not None and room.indexed is not None:
            keys = _IndexedKeys(keys, self._model, self._index, room.indexed[:, room.done : room.end], positions, own)
        return RowBatch(
            ids=upload(ids, self._model.device),
            positions=positions,
            own=own,
            tile_rows=BLOCK_ROWS,
            tile_count=len(depths),
            keys=keys,
        )

    def _finish(self, room: _PromptRoom, hidden: Tensor) -> list[Computed | Prefilled | Broken]:
        """Ends a prompt that is computed or queued. On a GPU the first token follows in a later step, so that the last
        cells need not wait for it; the ranks of a group end the prompt at once, since they must take equal turns."""
        request = room.request
        del self._rooms[request.room]
        if not self._last:
            return [Prefilled(room=request.room, aux=b"")]
        row = (len(request.prompt) - 1) % BLOCK_ROWS
        with self._spans.span("pick", "", room=request.room):
            picking = _Pick(request, Download(self._model.logits(hidden[-BLOCK_ROWS:])[row]))
        if hidden.is_cuda and self._config.group.ranks == Ranks():
            self._picks.append(picking)
            return []
        return [self._first_token(picking)]

    def _first_token(self, picking: _Pick) -> Prefilled | Broken:
        """Picks the first token by the logits of the prompt's last row."""
        request, logits = picking.request, picking.logits.get().numpy()
        if not np.isfinite(logits).all():
            return Broken(room=request.room, detail="the logits are not finite")
        handoff = Handoff.of(
            prompt_tokens=len(request.prompt),
            first=pick(logits, request.sampling, prompt=request.prompt, ids=(), eos=(self._options.eos,)),
            logits_digest=chain(b"", logits),
        )
        return Prefilled(room=request.room, aux=handoff.pack())
