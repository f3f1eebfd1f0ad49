"""The prefill side of every engine: prompts one after another, one chunk per step, into a paged pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ....handoff.events import Event
from ....kernels.stream import DeviceSpans, Download
from ....layout.engine_pools import GpuMemory, SharedMemory
from ....layout.geometry import Int64s
from ....layout.layout import Component
from ....memory.free_pages import FreePages
from ....wire import Ranks
from ...engine_api import Broken, Computed, EngineConfig, EngineDescription, Prefilled, Request, Token
from ...sampling import chain, pick
from .facts import NOT_FINITE, ModelFacts
from .first_token import FirstToken
from .token_rows import whole_rows

State = TypeVar("State")
Slots: TypeAlias = dict[str, Int64s]  # by component
Outcome: TypeAlias = Computed | Prefilled | Broken
Logits: TypeAlias = NDArray[np.float32] | Download
Report: TypeAlias = Callable[[tuple[int, int], Event | None], None]


@dataclass(slots=True, eq=False)
class Prompt(Generic[State]):
    """A prompt in progress: the pool has the rows of its first `done` tokens. `state` is the model's own."""

    request: Request
    pages: Slots
    skip: dict[str, int]  # slots of the pages before row 0
    slots: Slots  # of each row
    state: State
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.request.prompt) - self.done


@dataclass(frozen=True, slots=True, eq=False)
class LastRow:
    """What a whole prompt leads to: the logits of its last token, and the digest that decode compares its rows with."""

    logits: Logits
    rows_digest: bytes = b""


class PrefillModel(Protocol[State]):
    """What computes prompts."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def pool(self) -> memoryview | SharedMemory | GpuMemory: ...

    @property
    def spans(self) -> DeviceSpans: ...

    def computing(self) -> AbstractContextManager[object]:
        """Prepares the calling thread to compute."""
        ...

    def begin(self, request: Request, pool_slots: Slots, slots: Slots) -> State:
        """A request is admitted. `pool_slots` are those of all rows that the pool has of it; `slots` begin at row 0."""
        ...

    def compute(self, prompt: Prompt[State], end: int, computed: Report) -> LastRow | None:
        """Computes tokens [prompt.done, end), and calls `computed` for layers [first, end) once their rows are in the
        pool, after an event if one is given. Returns the last row of a whole prompt; None before, and on all stages of
        a pipeline but the last."""
        ...


@dataclass(frozen=True, slots=True)
class _Picking:
    """A prompt whose last row's logits may still be on their way to the CPU."""

    request: Request
    last: LastRow

    @property
    def ready(self) -> bool:
        return isinstance(self.last.logits, np.ndarray) or self.last.logits.ready


class PrefillShell(Generic[State]):
    """A PrefillEngine that ReportsEarly. The oldest room and the room with the fewest remaining tokens take turns.

    So a short prompt waits for one chunk of a long prompt, and a long prompt gets at least half of the time.
    """

    def __init__(
        self, config: EngineConfig, model: PrefillModel[State], *, warm_up: Callable[[], None] = lambda: None
    ) -> None:
        self.model, self._config, self._facts, self._warm_up = model, config, model.facts, warm_up
        self.description: EngineDescription = model.facts.description
        self._free = {
            component.name: FreePages(
                count=component.layout.slots // component.layout.page_size, page_size=component.layout.page_size
            )
            for component in self.description.components
        }
        self._layers = {component.name: layers_of([component]) for component in self.description.components}
        self._held: dict[int, Slots] = {}
        self._prompts: dict[int, Prompt[State]] = {}
        self._picking: deque[_Picking] = deque()
        self._turn = 0
        # Takes the events of a step that has not returned yet.
        self.report: Callable[[list[Outcome]], None] | None = None

    @property
    def pool(self) -> memoryview | SharedMemory | GpuMemory:
        """The pool's memory."""
        return self.model.pool

    @property
    def idle(self) -> bool:
        """True if step() would do nothing."""
        return not self._prompts and not self._picking and (bool(self._held) or not self.model.spans.pending)

    def warm_up(self) -> None:
        """One-time work, before the first request."""
        with self.model.computing():
            self._warm_up()

    def admit(self, request: Request) -> bool:
        """Takes the request if pages for its whole prompt are free."""
        return self.admit_with_growth(request, 0) is not None

    def admit_with_growth(self, request: Request, growth: int) -> Slots | None:
        """As `admit`, with pages for `growth` more tokens for decode from this pool. Returns slots by component."""
        self._facts.check(request)
        if request.room in self._held:
            raise ValueError(f"room {request.room:016x} exists already")
        tokens = len(request.prompt) + growth
        if tokens > self._config.slots:
            raise ValueError(f"{tokens} tokens, the pool has {self._config.slots} slots")
        pages, skip = (
            Slots(),
            {component.name: self._skip(component, len(request.prompt)) for component in self.description.components},
        )
        for component in self.description.components:
            if (taken := self._free[component.name].take(skip[component.name] + component.rows(tokens))) is not None:
                pages[component.name] = taken
        if pages.keys() != self._free.keys():
            self._give(pages)
            return None
        if self.idle:
            self.model.spans.anchor()
        pool_slots = {
            component.name: _expanded(pages[component.name], component.layout.page_size)[
                : skip[component.name] + component.rows(tokens)
            ]
            for component in self.description.components
        }
        slots = {name: taken[skip[name] :] for name, taken in pool_slots.items()}
        with self.model.computing():
            state = self.model.begin(request, pool_slots, slots)
        self._held[request.room] = pages
        self._prompts[request.room] = Prompt(request, pages, skip, slots, state)
        return slots

    def step(self) -> list[Outcome]:
        """Computes one chunk."""
        events: list[Outcome] = []
        with self.model.computing():
            if self._prompts:
                self._turn += 1
                oldest = next(iter(self._prompts.values()))
                shortest = min(self._prompts.values(), key=lambda prompt: prompt.left)
                self._compute(oldest if self._turn % 2 else shortest, events)
            events += self._first_tokens()
            while self._picking and not (self._prompts or events):  # there is nothing to do but to wait for the GPU
                events.append(self._first_token(self._picking.popleft()))
        # The writer first sends its last rows, which reporting spans would delay.
        if not self._held:
            self.model.spans.report()
        return events

    def cancel(self, room: int) -> None:
        """Stops computing the room; its pages stay taken until `free`."""
        self._prompts.pop(room, None)
        self._picking = deque(picking for picking in self._picking if picking.request.room != room)

    def free(self, room: int) -> None:
        """The room's pages may be reused."""
        self.cancel(room)
        self._give(self._held.pop(room, {}))

    def _give(self, pages: Slots) -> None:
        for name, taken in pages.items():
            self._free[name].give(taken)

    def _compute(self, prompt: Prompt[State], events: list[Outcome]) -> None:
        """Computes the prompt's next tokens. Adds what was not reported meanwhile to `events`."""
        request, first = prompt.request, prompt.done
        end = min(first + self._config.chunk_tokens, len(request.prompt))

        def computed(layers: tuple[int, int], after: Event | None) -> None:
            outcomes: list[Outcome] = [*self._cells(prompt, (first, end), layers, after), *self._first_tokens()]
            if self.report is None:
                events.extend(outcomes)
            else:
                self.report(outcomes)

        last = self.model.compute(prompt, end, computed)
        prompt.done = end
        if prompt.left:
            return
        del self._prompts[request.room]
        if last is None:
            events.append(Prefilled(room=request.room, aux=b""))
            return
        self._picking.append(_Picking(request, last))
        # On a GPU the first token follows in a later step, so that the last cells need not wait for it; the ranks of a
        # group end the prompt at once, since they must take equal turns.
        if self._config.group.ranks != Ranks():
            events.append(self._first_token(self._picking.popleft()))

    def _cells(
        self, prompt: Prompt[State], tokens: tuple[int, int], layers: tuple[int, int], after: Event | None
    ) -> list[Computed]:
        """A cell of each component that has some of these layers, and rows that these tokens complete."""
        cells: list[Computed] = []
        for component in self.description.components:
            name, page_size = component.name, component.layout.page_size
            own_layers = [layer for layer in self._layers[name] if layers[0] <= layer < layers[1]]
            rows = self._rows(component, tokens, len(prompt.request.prompt))
            if not own_layers or rows is None:
                continue
            before, skip = divmod(prompt.skip[name], page_size)
            end = before - (-(skip + rows[1]) // page_size)
            cells.append(Computed(
                room=prompt.request.room, component=name, rows=rows, layers=(own_layers[0], own_layers[-1] + 1),
                pages=prompt.pages[name][before:end], after=after, skip=skip,
            ))  # fmt: skip
        return cells

    def _rows(self, component: Component, tokens: tuple[int, int], prompt_tokens: int) -> tuple[int, int] | None:
        """The rows that these tokens of a prompt complete."""
        if component.span.kind != "last" or not self._facts.every_token:
            return whole_rows(component, *tokens, prompt_tokens)
        before = prompt_tokens - component.rows(prompt_tokens)
        first, end = max(0, tokens[0] - before), tokens[1] - before
        return (first, end) if first < end else None

    def _skip(self, component: Component, prompt_tokens: int) -> int:
        """The slots before row 0: of tokens before a window, or of as many as a window may begin inside a page. Fewer
        where the pages that each request has of it leave no room."""
        if component.span.kind != "last":
            return 0
        if self._facts.every_token:
            return prompt_tokens - component.rows(prompt_tokens)
        size = component.layout.page_size
        return min(max(0, prompt_tokens - component.span.tokens) % size, -component.span.tokens % size)

    def _first_tokens(self) -> list[Outcome]:
        """Of prompts whose last logits have arrived."""
        outcomes: list[Outcome] = []
        while self._picking and self._picking[0].ready:
            outcomes.append(self._first_token(self._picking.popleft()))
        return outcomes

    def _first_token(self, picking: _Picking) -> Prefilled | Broken:
        """Picks the first token by the logits of the prompt's last row."""
        request, logits = picking.request, picking.last.logits
        if not isinstance(logits, np.ndarray):
            logits = logits.get().numpy()
        if not np.isfinite(logits).all():
            return Broken(room=request.room, detail=NOT_FINITE)
        facts = self._facts
        first = pick(logits, request.sampling, prompt=request.prompt, ids=(), eos=facts.eos)
        aux = FirstToken(
            facts.aux_format, len(request.prompt), first.id, chain(b"", logits) if facts.digests else b"",
            first.pack_logprobs(), picking.last.rows_digest,
        )  # fmt: skip
        token = Token(room=request.room, index=0, id=first.id, logprobs=first.logprobs)
        return Prefilled(room=request.room, aux=aux.pack(), first=token)


def layers_of(components: Sequence[Component]) -> list[int]:
    """The layers that these components have rows of, ascending."""
    return sorted({plane.layer for component in components for plane in component.layout.planes})


def layer_groups(layers: Sequence[int], size: int) -> list[tuple[int, int]]:
    """These layers in groups [first, end) of `size` layers, or 0 for one group of all."""
    step = size or len(layers)
    parts = [layers[first : first + step] for first in range(0, len(layers), step)]
    return [(part[0], part[-1] + 1) for part in parts]


def _expanded(pages: Int64s, page_size: int) -> Int64s:
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
