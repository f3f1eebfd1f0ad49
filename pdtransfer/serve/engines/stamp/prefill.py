"""The prefill side: fills the pages of a paged pool with the rows of prompts, a chunk of one room at a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ....kernels.stream import DeviceSpans
from ....layout.geometry import Int64s
from ....layout.layout import Component
from ....memory.free_pages import FreePages
from ....memory.shared_pool import shared_memory
from ....wire import Ranks
from ...engine_api import Broken, Computed, EngineConfig, EngineDescription, Prefilled, Request, SharedMemory
from ...sampling import chain, pick
from .digests import total
from .handoff import StampHandoff
from .options import KV, StampOptions, StampShard, check_config, check_request, components_of, describe
from .positions import last_tokens, numbers, whole_rows
from .rows import RowWords, StampRows
from .stamps import Stamper, Words
from .tokens import logits_of
from .units import Units, picked

Pages = dict[str, Int64s]


@dataclass(slots=True, eq=False)
class _StampPrompt:
    """A prompt in progress: the pool has the rows of its first `done` tokens."""

    request: Request
    slots: Pages  # by component, the slot of each row
    pages: Pages
    skip: dict[str, int]  # slots of the first page before row 0
    stamps: Words  # of all tokens; those of the first `done` are known
    totals: dict[str, Words]  # by component, the digest of the rows of the first `done` tokens, in all layers
    stamper: Stamper = field(default_factory=Stamper)
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.request.prompt) - self.done


class StampPrefill:
    """A PrefillEngine. The oldest room and the room with the fewest remaining tokens take turns, as in the reference
    engine: a short prompt waits for one chunk of a long one, and a long one gets at least half of the time."""

    def __init__(self, config: EngineConfig, options: StampOptions) -> None:
        check_config(config)
        self._config, self._options = config, options
        self.card: EngineDescription = describe(config, options)
        self.pool: SharedMemory = shared_memory(self.card.memory_bytes, self)
        self._rows = {
            each.name: StampRows(self.pool.view, each.layout, each.name, options.seed) for each in self.card.components
        }
        self._free = {
            each.name: FreePages(count=each.layout.slots // each.layout.page_size, page_size=each.layout.page_size)
            for each in self.card.components
        }
        ranks = config.group.ranks
        self._last = ranks.pp_rank == ranks.pp_size - 1
        # The components with the layers of all stages: the last stage picks by the digest of every row.
        whole = components_of(config, options, StampShard.of(options, Ranks(ranks.tp_rank, ranks.tp_size)))
        self._model = {each.name: (each, RowWords(each.layout, each.name, options.seed)) for each in whole}
        self._units = Units(options, self._model, config.group)
        self._held: dict[int, Pages] = {}
        self._rooms: dict[int, _StampPrompt] = {}
        self._spans, self._turn = DeviceSpans(config.spans, None), 0

    @property
    def idle(self) -> bool:
        return not self._rooms

    def admit(self, request: Request) -> bool:
        return self.admit_with_growth(request, 0) is not None

    def admit_with_growth(self, request: Request, growth: int) -> Pages | None:
        """As `admit`, with pages for `growth` more tokens for decode from this pool. Returns slots by component."""
        check_request(request, self._options)
        if request.room in self._held:
            raise ValueError(f"room {request.room:016x} exists already")
        prompt, tokens = len(request.prompt), len(request.prompt) + growth
        if tokens > self._config.slots:
            raise ValueError(f"{tokens} tokens, the pool has {self._config.slots} slots")
        pages, skip = Pages(), {each.name: _skip(each, prompt) for each in self.card.components}
        for each in self.card.components:
            if (taken := self._free[each.name].take(skip[each.name] + each.rows(tokens))) is not None:
                pages[each.name] = taken
        if pages.keys() != self._free.keys():
            self._give(pages)
            return None
        self._held[request.room] = pages
        slots = {
            each.name: _slots(pages[each.name], each, skip[each.name])[: each.rows(tokens)]
            for each in self.card.components
        }
        self._rooms[request.room] = _StampPrompt(
            request, slots, pages, skip, np.empty(prompt, np.uint64),
            {name: np.zeros(words.heads, np.uint64) for name, (_, words) in self._model.items()},
        )  # fmt: skip
        return slots

    def step(self) -> list[Computed | Prefilled | Broken]:
        if not self._rooms:
            return []
        self._turn += 1
        oldest = next(iter(self._rooms.values()))
        room = oldest if self._turn % 2 else min(self._rooms.values(), key=lambda room: room.left)
        first, end = room.done, min(room.done + self._config.chunk_tokens, len(room.request.prompt))
        events: list[Computed | Prefilled | Broken] = []
        with self._spans.span("compute", f"rows {first}-{end}", room=room.request.room):
            room.stamps[first:end], room.done = self._stamps(room, first, end), end
            for component in self.card.components:
                events += self._fill(room, component, first)
            if self._last:
                self._digest(room, first)
        self._spans.report()
        if not room.left:
            del self._rooms[room.request.room]
            events.append(self._prefilled(room))
        return events

    def cancel(self, room: int) -> None:
        self._rooms.pop(room, None)

    def free(self, room: int) -> None:
        self.cancel(room)
        self._give(self._held.pop(room, {}))

    def _give(self, pages: Pages) -> None:
        for name, own in pages.items():
            self._free[name].give(own)

    def _stamps(self, room: _StampPrompt, first: int, end: int) -> Words:
        """The stamps of tokens [first, end). In a pipeline they go from stage to stage, as a model's hidden rows do."""
        group = self._config.group
        if group.ranks.pp_rank:
            hidden = np.empty((end - first, 2), np.float32)
            group.take_over(hidden)
            stamps = hidden.view(np.uint64)[:, 0]
        else:
            stamps = room.stamper.extend(room.request.prompt[first:end])
        if group.ranks.pp_rank < group.ranks.pp_size - 1:
            group.hand_on(np.ascontiguousarray(stamps).view(np.float32).reshape(-1, 2))
        return stamps

    def _fill(self, room: _StampPrompt, component: Component, first: int) -> list[Computed]:
        """Writes the rows that tokens [first, done) complete. Returns their cells."""
        tokens, name = len(room.request.prompt), component.name
        rows = whole_rows(component, first, room.done, tokens)
        if rows is None:
            return []
        self._rows[name].write(room.slots[name][slice(*rows)], room.stamps[last_tokens(component, tokens, rows)])
        start, stop = component.layout.layer_range
        step = self._options.layers_per_cell or stop - start
        held = sorted({plane.layer for plane in component.layout.planes})
        cells = [(at, min(at + step, stop)) for at in range(start, stop, step)]
        size = component.layout.page_size
        pages = room.pages[name][: -(-(room.skip[name] + rows[1]) // size)]
        return [
            Computed(
                room=room.request.room, component=name, rows=rows, layers=layers, pages=pages, skip=room.skip[name]
            )
            for layers in cells
            if any(layers[0] <= layer < layers[1] for layer in held)
        ]

    def _digest(self, room: _StampPrompt, first: int) -> None:
        """Adds the rows that tokens [first, done) complete to the digests. They follow from the stamps: prefill does
        not read what it wrote."""
        tokens = len(room.request.prompt)
        for name, (component, words) in self._model.items():
            if (rows := whole_rows(component, first, room.done, tokens)) is not None:
                sums = words.sums(room.stamps[last_tokens(component, tokens, rows)])
                room.totals[name] += total(sums, numbers(component, tokens, rows))

    def _prefilled(self, room: _StampPrompt) -> Prefilled:
        """Picks the first token as decode would pick it at this position."""
        request = room.request
        if not self._last:
            return Prefilled(room=request.room, aux=b"")
        (digest,) = self._units.together(np.concatenate(list(room.totals.values()))[np.newaxis])
        logits = logits_of(digest + self._picks(room, digest))
        first = pick(logits, request.sampling, prompt=request.prompt, ids=(), eos=(self._options.eos,))
        handoff = StampHandoff.of(
            prompt_tokens=len(request.prompt), first=first, logits_digest=chain(b"", logits), kv_digest=digest
        )
        return Prefilled(room=request.room, aux=handoff.pack())

    def _picks(self, room: _StampPrompt, digest: bytes) -> bytes:
        """The digest of the rows that are picked by `digest`, in every group of layers."""
        options, position = self._options, len(room.request.prompt) - 1
        if not options.top_k or options.pools:
            return b""
        words = self._model[KV][1]
        totals = np.zeros((1, words.heads), np.uint64)
        for number, layers in enumerate(options.groups()):
            totals += total(words.sums(room.stamps[picked(digest, number, position, options.top_k)], layers))
        (found,) = self._units.together(totals, kv_alone=True)
        return found


def _skip(component: Component, prompt: int) -> int:
    """A window may begin inside a page, as far as the pages that each request has of it leave room."""
    if component.span.kind != "last":
        return 0
    size = component.layout.page_size
    return min(max(0, prompt - component.span.tokens) % size, -component.span.tokens % size)


def _slots(pages: Int64s, component: Component, skip: int) -> Int64s:
    size = component.layout.page_size
    return (pages[:, None] * size + np.arange(size)).reshape(-1)[skip:]
