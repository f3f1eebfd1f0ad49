"""The prefill side: fills the pages of a paged pool with the rows of prompts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from ....kernels.stream import DeviceSpans
from ....layout.layout import Component
from ....memory.shared_pool import shared_memory
from ....wire import Ranks
from ...engine_api import EngineConfig, Request, SharedMemory
from ..shell.prefill import LastRow, Prompt, Report, Slots, layer_groups, layers_of
from ..shell.token_rows import last_tokens, numbers, whole_rows
from .digests import total
from .options import KV, StampOptions, StampShard, components_of, facts_of
from .rows import RowWords, StampRows
from .stamps import Stamper, Words
from .tokens import logits_of
from .units import Units, picked


@dataclass(slots=True, eq=False)
class PromptStamps:
    """What is known of the tokens of a prompt that were computed."""

    stamps: Words  # of all tokens; those of the first ones are known
    totals: dict[str, Words]  # by component, the digest of their rows in all layers
    stamper: Stamper = field(default_factory=Stamper)


class StampPrefill:
    """A PrefillModel."""

    def __init__(self, config: EngineConfig, options: StampOptions) -> None:
        self._group, self._options = config.group, options
        self.facts = facts_of(config, options)
        self._components = self.facts.description.components
        self.pool: SharedMemory = shared_memory(self.facts.description.memory_bytes, self)
        self.spans = DeviceSpans(config.spans, None)
        self._rows = {
            component.name: StampRows(self.pool.view, component.layout, component.name, options.seed)
            for component in self._components
        }
        self._cells = layer_groups(layers_of(self._components), options.layers_per_cell)
        ranks = config.group.ranks
        self._last = ranks.pp_rank == ranks.pp_size - 1
        # The components with the layers of all stages: the last stage picks by the digest of every row.
        whole = components_of(config, options, StampShard.of(options, Ranks(ranks.tp_rank, ranks.tp_size)))
        self._words = {
            component.name: (component, RowWords(component.layout, component.name, options.seed)) for component in whole
        }
        self._units = Units(options, self._words, config.group)

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self, request: Request, pool_slots: Slots, slots: Slots) -> PromptStamps:  # noqa: ARG002
        totals = {name: np.zeros(words.heads, np.uint64) for name, (_, words) in self._words.items()}
        return PromptStamps(np.empty(len(request.prompt), np.uint64), totals)

    def compute(self, prompt: Prompt[PromptStamps], end: int, computed: Report) -> LastRow | None:
        with self.spans.span("compute", f"rows {prompt.done}-{end}", room=prompt.request.room):
            prompt.state.stamps[prompt.done : end] = self._stamps(prompt, end)
            for component in self._components:
                self._fill(prompt, component, end)
            if self._last:
                self._digest(prompt, end)
        for layers in self._cells:
            computed(layers, None)
        return self._last_row(prompt) if self._last and end == len(prompt.request.prompt) else None

    def _stamps(self, prompt: Prompt[PromptStamps], end: int) -> Words:
        """The stamps of tokens [done, end). In a pipeline they go from stage to stage, as a model's hidden rows do."""
        first, group = prompt.done, self._group
        if group.ranks.pp_rank:
            hidden = np.empty((end - first, 2), np.float32)
            group.take_over(hidden)
            stamps = hidden.view(np.uint64)[:, 0]
        else:
            stamps = prompt.state.stamper.extend(prompt.request.prompt[first:end])
        if not self._last:
            group.hand_on(np.ascontiguousarray(stamps).view(np.float32).reshape(-1, 2))
        return stamps

    def _fill(self, prompt: Prompt[PromptStamps], component: Component, end: int) -> None:
        """Writes the rows that tokens [done, end) complete."""
        tokens, name = len(prompt.request.prompt), component.name
        if (rows := whole_rows(component, prompt.done, end, tokens)) is not None:
            stamps = prompt.state.stamps[last_tokens(component, tokens, rows)]
            self._rows[name].write(prompt.slots[name][slice(*rows)], stamps)

    def _digest(self, prompt: Prompt[PromptStamps], end: int) -> None:
        """Adds the rows that tokens [done, end) complete to the digests. They follow from the stamps: prefill does not
        read what it wrote."""
        tokens, state = len(prompt.request.prompt), prompt.state
        for name, (component, words) in self._words.items():
            if (rows := whole_rows(component, prompt.done, end, tokens)) is not None:
                sums = words.sums(state.stamps[last_tokens(component, tokens, rows)])
                state.totals[name] += total(sums, numbers(component, tokens, rows))

    def _last_row(self, prompt: Prompt[PromptStamps]) -> LastRow:
        """The logits as decode would have them at this position."""
        (digest,) = self._units.together(np.concatenate(list(prompt.state.totals.values()))[np.newaxis])
        return LastRow(logits_of(digest + self._picks(prompt, digest)), digest)

    def _picks(self, prompt: Prompt[PromptStamps], digest: bytes) -> bytes:
        """The digest of the rows that are picked by `digest`, in every group of layers."""
        options, position = self._options, len(prompt.request.prompt) - 1
        if not options.top_k or options.pools:
            return b""
        words = self._words[KV][1]
        totals = np.zeros((1, words.heads), np.uint64)
        for number, layers in enumerate(options.groups()):
            stamps = prompt.state.stamps[picked(digest, number, position, options.top_k)]
            totals += total(words.sums(stamps, layers))
        (of_picks,) = self._units.together(totals, kv_alone=True)
        return of_picks
