"""Prefill of a checkpoint: chunks of prompts into a paged pool, reported layer by layer on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.stream import DeviceSpans, Download, upload, wait_event
from ....layout.layout import expand_pages
from ....memory.free_pages import FreePages
from ....memory.shared_pool import shared_memory
from ...engine_api import (
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
from ...sampling import chain, pick
from .checkpoint import Checkpoint, ModelOptions
from .layers import describe
from .paged import PagedModel
from .requests import FirstToken, check_request

AHEAD_MAX = 8  # cells that are queued on a GPU: a full launch queue would block other threads' launches


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt in progress. The pool has rows [0, done)."""

    request: Request
    pages: dict[str, NDArray[np.int64]]
    slots: dict[str, Tensor]
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.request.prompt) - self.done


@dataclass(slots=True)
class _Picking:
    """A prompt whose last logits are being copied to the CPU."""

    request: Request
    logits: Download


class CheckpointPrefill:
    """A PrefillEngine. The oldest room and the room with the fewest remaining tokens take turns.

    The pool has a row of each token also in layers with a window: later tokens of the prompt attend to them.
    """

    def __init__(self, config: EngineConfig, options: ModelOptions, checkpoint: Checkpoint) -> None:
        self._config, self._options, self._checkpoint = config, options, checkpoint
        self._description = describe(
            config, checkpoint.shapes, name=checkpoint.name, digest=checkpoint.digest, window_slots=0, hbm=False,
            context_tokens=checkpoint.context_tokens,
        )  # fmt: skip
        byte_count = self._description.memory_bytes
        if checkpoint.device.type == "cuda":
            self.memory = torch.zeros(byte_count, dtype=torch.uint8, device=checkpoint.device)
            torch.cuda.current_stream(checkpoint.device).synchronize()  # other streams read it
        else:  # torch.zeros would touch every page of the pool
            self._shared = shared_memory(byte_count, self)
            self.memory = torch.frombuffer(self._shared.view, dtype=torch.uint8, count=byte_count)
        self._model = PagedModel(checkpoint, self.memory, self._description.components)
        self._pages = {
            each.name: FreePages(count=each.layout.slots // each.layout.page_size, page_size=each.layout.page_size)
            for each in self._description.components
        }
        self._layers = {
            each.name: sorted({plane.layer for plane in each.layout.planes}) for each in self._description.components
        }
        every = 1 if checkpoint.device.type == "cuda" else len(checkpoint.shapes)
        every = options.layers_per_cell or every
        numbers = [shape.layer for shape in checkpoint.shapes]
        self._groups = [
            (part[0], part[-1] + 1) for part in (numbers[i : i + every] for i in range(0, len(numbers), every))
        ]
        self._spans = DeviceSpans(config.spans, checkpoint.device)
        self._ahead: deque[Event] = deque()  # of cells that the GPU may still compute
        self._picks: deque[_Picking] = deque()
        self._held: dict[int, dict[str, NDArray[np.int64]]] = {}
        self._rooms: dict[int, _Prompt] = {}
        self._turn = 0
        # Takes the events of a step that has not returned yet.
        self.report: Callable[[list[Computed | Prefilled | Broken]], None] | None = None

    @property
    def card(self) -> EngineDescription:
        """What peers compare."""
        return self._description

    @property
    def pool(self) -> SharedMemory | CardMemory:
        """The pool's memory."""
        if self.memory.is_cuda:
            return CardMemory(
                card=self.memory.get_device(), address=self.memory.data_ptr(), byte_count=len(self.memory)
            )
        return self._shared

    @property
    def idle(self) -> bool:
        """Whether step() would do nothing."""
        return not self._rooms and not self._picks and (bool(self._held) or not self._spans.pending)

    def admit(self, request: Request) -> bool:
        """Takes the request if pages for its whole prompt are free."""
        return self.admit_with_growth(request, 0) is not None

    def admit_with_growth(self, request: Request, growth: int) -> dict[str, NDArray[np.int64]] | None:
        """As `admit`, with pages for `growth` more tokens for decode from this pool. Returns slots by component."""
        self._checkpoint.enter()
        check_request(request, self._checkpoint)
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
        device = self._checkpoint.device
        self._rooms[request.room] = _Prompt(
            request, pages, {name: upload(torch.as_tensor(own), device) for name, own in slots.items()}
        )
        return slots

    @torch.inference_mode()
    def step(self) -> list[Computed | Prefilled | Broken]:
        """Computes one chunk."""
        self._checkpoint.enter()
        events: list[Computed | Prefilled | Broken] = []
        if self._rooms:
            self._turn += 1
            oldest = next(iter(self._rooms.values()))
            events += self._chunk(oldest if self._turn % 2 else min(self._rooms.values(), key=lambda room: room.left))
        events += self._first_tokens()
        while self._picks and not (self._rooms or events):  # there is nothing to do but to wait for the GPU
            events.append(self._first_token(self._picks.popleft()))
        if not self._held:
            self._spans.report()
        return events

    def cancel(self, room: int) -> None:
        """Stops computing the room; its pages stay taken until `free`."""
        self._rooms.pop(room, None)
        self._picks = deque(each for each in self._picks if each.request.room != room)

    def free(self, room: int) -> None:
        """The room's pages may be reused."""
        self.cancel(room)
        self._give(self._held.pop(room, {}))

    def _give(self, pages: dict[str, NDArray[np.int64]]) -> None:
        for name, own in pages.items():
            self._pages[name].give(own)

    def _chunk(self, room: _Prompt) -> list[Computed | Prefilled | Broken]:
        """Computes the room's next tokens through all layers. Returns cells, and the end of a prompt of which it picks
        the first token at once."""
        prompt, number = room.request.prompt, room.request.room
        end = min(room.done + self._config.chunk_tokens, len(prompt))
        ids = upload(torch.as_tensor(prompt[room.done : end]), self._checkpoint.device)
        events: list[Computed | Prefilled | Broken] = []
        groups = deque(self._groups)

        def entered(layer: int) -> None:
            """All layers before this one are computed, or queued on the GPU."""
            while groups and groups[0][1] <= layer:
                made = [*self._cells(room, groups.popleft(), (room.done, end), self._event()), *self._first_tokens()]
                if self.report is not None:
                    self.report(made)
                else:
                    events.extend(made)

        with self._spans.span("compute", f"rows {room.done}-{end}", room=number):
            slots = {name: own[: len(prompt)] for name, own in room.slots.items()}
            logits = self._model.chunk(ids, slots, done=room.done, on_layer=entered)
        entered(self._groups[-1][1])
        room.done = end
        if room.left == 0:
            del self._rooms[number]
            picking = _Picking(room.request, Download(logits))
            # The first token follows in a later step, so that the last cells need not wait for it. Ranks step alike.
            if logits.is_cuda and self._config.group.ranks.tp_size == 1:
                self._picks.append(picking)
            else:
                events.append(self._first_token(picking))
        return events

    def _cells(
        self, room: _Prompt, layers: tuple[int, int], rows: tuple[int, int], after: Event | None
    ) -> list[Computed]:
        """Of each component that has some of these layers, and some of these rows of the prompt."""
        cells: list[Computed] = []
        tokens = len(room.request.prompt)
        for component in self._description.components:
            own = [layer for layer in self._layers[component.name] if layers[0] <= layer < layers[1]]
            before = tokens - component.rows(tokens)  # that no window of a later token reaches
            first, end = max(0, rows[0] - before), rows[1] - before
            if not own or first >= end:
                continue
            page_size = component.layout.page_size
            pages = room.pages[component.name][before // page_size : self._pages[component.name].needed(rows[1])]
            cells.append(
                Computed(
                    room=room.request.room, component=component.name, rows=(first, end), layers=(own[0], own[-1] + 1),
                    pages=pages, after=after, skip=before % page_size,
                )
            )  # fmt: skip
        return cells

    def _event(self) -> Event | None:
        """Fires when everything computed so far is in the pool."""
        if not self.memory.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        self._ahead.append(event)
        if len(self._ahead) > AHEAD_MAX:
            wait_event(self._ahead.popleft())
        return event

    def _first_tokens(self) -> list[Prefilled | Broken]:
        """Of prompts whose last logits have arrived meanwhile."""
        made: list[Prefilled | Broken] = []
        while self._picks and self._picks[0].logits.ready:
            made.append(self._first_token(self._picks.popleft()))
        return made

    def _first_token(self, picking: _Picking) -> Prefilled | Broken:
        """Picks the first token by the logits of the prompt's last row."""
        request, logits = picking.request, picking.logits.get().numpy()
        if not np.isfinite(logits).all():
            return Broken(room=request.room, detail="the logits are not finite")
        digest = chain(b"", logits) if self._options.digests else b""
        picked = pick(logits, request.sampling, prompt=request.prompt, ids=(), eos=tuple(self._checkpoint.eos))
        first = FirstToken.of(prompt_tokens=len(request.prompt), first=picked, logits_digest=digest)
        return Prefilled(room=request.room, aux=first.pack())
