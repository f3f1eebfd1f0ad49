"""An engine with a hybrid model's pools, for daemons and for one process: `--engine-option pools=deepseek_v4`.

It hands rooms of several components over and checks them; `hybrid_rows` has what their bytes are. The digest of each
component's rows, as prefill wrote them, is in a room's aux, and decode's first step compares them with the arena.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdtransfer.kernels.plane_views import device_tensor
from pdtransfer.layout.geometry import Int64s
from pdtransfer.layout.layout import Component, check_slots
from pdtransfer.memory.free_pages import FreePages
from pdtransfer.memory.shared_pool import shared_memory
from pdtransfer.serve.engine_api import (
    Broken,
    CardMemory,
    Computed,
    EngineConfig,
    EngineDescription,
    Event,
    Finished,
    HotFigures,
    Prefilled,
    Request,
    SharedMemory,
    Token,
)
from pdtransfer.serve.sampling import chain, draw, tokens_digest

from .architecture import DIGEST_BYTES, Architecture
from .description import check_request, device_of
from .hybrid_rows import (
    HybridHandoff,
    HybridOptions,
    HybridRows,
    Stamps,
    describe_hybrid,
    flat_words,
    last_tokens,
    row_of,
    stamps_of,
)

Pages = dict[str, Int64s]


@dataclass(slots=True, eq=False)
class _HybridPrompt:
    request: Request
    pages: Pages
    skip: dict[str, int]
    stamps: Stamps
    done: int = 0


class HybridPrefill:
    """A PrefillEngine: one chunk of the oldest room a step."""

    def __init__(self, config: EngineConfig, options: HybridOptions) -> None:
        self._config, self._options = config, options
        self._description, self._device = describe_hybrid(config, options), device_of(config.device)
        byte_count = self._description.memory_bytes
        if self._device.type == "cuda":
            self.flat = flat_words(byte_count, config.device)
            torch.cuda.current_stream(self.flat.device).synchronize()  # other streams read it
        else:
            self._shared = shared_memory(byte_count, self)
            self.flat = torch.frombuffer(self._shared.view, dtype=torch.int32, count=byte_count // 4)
        self._rows = HybridRows({"dram": self.flat}, self._description.components, options.seed)
        self._free = {
            each.name: FreePages(count=each.layout.slots // each.layout.page_size, page_size=each.layout.page_size)
            for each in self._description.components
        }
        self._held: dict[int, Pages] = {}
        self._rooms: dict[int, _HybridPrompt] = {}

    @property
    def card(self) -> EngineDescription:
        return self._description

    @property
    def pool(self) -> SharedMemory | CardMemory:
        if self.flat.is_cuda:
            number, byte_count = self.flat.get_device(), self._description.memory_bytes
            return CardMemory(card=number, address=self.flat.data_ptr(), byte_count=byte_count)
        return self._shared

    @property
    def idle(self) -> bool:
        return not self._rooms

    def admit(self, request: Request) -> bool:
        return self.admit_with_growth(request, 0) is not None

    def admit_with_growth(self, request: Request, growth: int) -> Pages | None:
        """As `admit`, with pages for `growth` more tokens for decode from this pool. Returns slots by component."""
        _check(request, self._options)
        if request.room in self._held:
            raise ValueError(f"room {request.room:016x} exists already")
        prompt, tokens = len(request.prompt), len(request.prompt) + growth
        if tokens > self._config.slots:
            raise ValueError(f"{tokens} tokens, the pool has {self._config.slots} slots")
        pages, skip = Pages(), dict[str, int]()
        for each in self._description.components:
            size = each.layout.page_size
            # A window may begin inside a page, as far as the pages that each request has of it leave room.
            start = max(0, prompt - each.span.tokens) if each.span.kind == "last" else 0
            skip[each.name] = min(start % size, -each.span.tokens % size)
            if (taken := self._free[each.name].take(skip[each.name] + each.rows(tokens))) is not None:
                pages[each.name] = taken
        if pages.keys() != self._free.keys():
            self._give(pages)
            return None
        self._held[request.room] = pages
        room = self._rooms[request.room] = _HybridPrompt(request, pages, skip, stamps_of(request.prompt))
        return {each.name: self._slots(room, each) for each in self._description.components}

    def step(self) -> list[Computed | Prefilled | Broken]:
        _enter(self._device)
        if not self._rooms:
            return []
        room = next(iter(self._rooms.values()))
        tokens = len(room.request.prompt)
        first, room.done = room.done, min(tokens, room.done + self._config.chunk_tokens)
        components = self._description.components
        cells = [(each, rows) for each in components if (rows := _whole(each, first, room.done, tokens))]
        for component, rows in cells:
            last = last_tokens(component, tokens)[slice(*rows)]
            self._rows.write(component.name, self._slots(room, component)[slice(*rows)], room.stamps[last])
        after = self._event()
        made: list[Computed | Prefilled | Broken] = [
            Computed(
                room=room.request.room, component=each.name, rows=rows, layers=each.layout.layer_range,
                pages=room.pages[each.name], after=after, skip=room.skip[each.name],
            )
            for each, rows in cells
        ]  # fmt: skip
        if room.done == tokens:
            del self._rooms[room.request.room]
            made.append(self._prefilled(room))
        return made

    def cancel(self, room: int) -> None:
        self._rooms.pop(room, None)

    def free(self, room: int) -> None:
        self.cancel(room)
        self._give(self._held.pop(room, {}))

    def _give(self, pages: Pages) -> None:
        for name, own in pages.items():
            self._free[name].give(own)

    def _slots(self, room: _HybridPrompt, component: Component) -> Int64s:
        size, name = component.layout.page_size, component.name
        return (room.pages[name][:, None] * size + np.arange(size)).reshape(-1)[room.skip[name] :]

    def _event(self) -> Event | None:
        if not self.flat.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _prefilled(self, room: _HybridPrompt) -> Prefilled:
        request, tokens = room.request, len(room.request.prompt)
        slots = {each.name: self._slots(room, each) for each in self._description.components}
        logits = self._rows.logits(slots, request.prompt, tokens)
        handoff = HybridHandoff(
            "hybrid/1", tokens, draw(logits, request.sampling, 0), chain(b"", logits),
            {each.name: self._rows.digest(each, slots[each.name], tokens, tokens) for each in self._rows.components},
        )  # fmt: skip
        return Prefilled(room=request.room, aux=handoff.pack())


def _whole(component: Component, first: int, end: int, tokens: int) -> tuple[int, int] | None:
    """The rows that tokens [first, end) complete; windows, states and a last row with too few tokens with the end."""
    if component.span.kind != "all":
        return (0, component.rows(tokens)) if end == tokens else None
    rows = first // component.tokens_per_row, end // component.tokens_per_row
    if end == tokens:
        rows = rows[0], component.rows(tokens)
    return rows if rows[0] < rows[1] else None


@dataclass(slots=True, eq=False)
class _HybridAnswer:
    """A landed request. The arena has the rows of all its tokens but the last id."""

    request: Request
    slots: dict[str, Int64s]
    handoff: HybridHandoff
    logits_digest: bytes
    ids: list[int] = field(default_factory=list[int])
    reported: bool = False

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.concatenate([self.request.prompt, np.array(self.ids, np.int64)])

    def end(self, eos: int) -> Literal["stop", "length"] | None:
        """The reason why the last id ends the request, or None."""
        if self.ids[-1] == eos and not self.request.sampling.ignore_eos:
            return "stop"
        return "length" if len(self.ids) == self.request.sampling.max_tokens else None


class HybridDecode:
    """A DecodeEngine: a token a step for each room, out of the arena."""

    def __init__(self, config: EngineConfig, options: HybridOptions) -> None:
        self._config, self._options = config, options
        self._description, self._device = describe_hybrid(config, options), device_of(config.device)
        self._rows: HybridRows | None = None
        self._rooms: dict[int, _HybridAnswer] = {}

    @property
    def card(self) -> EngineDescription:
        return self._description

    @property
    def figures(self) -> HotFigures:
        return HotFigures()

    @property
    def idle(self) -> bool:
        return not self._rooms

    def attach(self, arena: memoryview, *, device_address: int = 0, hbm: memoryview | CardMemory | None = None) -> None:
        made = self._description
        if self._device.type != "cuda":
            near = _words(arena, made.memory_bytes)
        elif device_address:
            near = device_tensor(device_address, made.memory_bytes, self._device).view(torch.int32)
        else:
            raise ValueError(f"arena: it was not registered with {self._device}")
        if isinstance(hbm, CardMemory):
            self.take(near, device_tensor(hbm.address, made.hbm_bytes, self._device).view(torch.int32))
        else:
            self.take(near, None if hbm is None else _words(hbm, made.hbm_bytes))

    def take(self, flat: Tensor, hbm: Tensor | None = None) -> None:
        """Decodes from this memory, int32, which the engine's device reads and writes."""
        memories = {"dram": flat} | ({} if hbm is None else {"hbm": hbm})
        self._rows = HybridRows(memories, self._description.components, self._options.seed)

    def check(self, request: Request) -> None:
        _check(request, self._options)
        tokens = len(request.prompt) + request.sampling.max_tokens
        if tokens > self._config.slots:
            raise ValueError(f"{tokens} tokens, the arena has {self._config.slots} slots")

    def admit(self, request: Request, slots: dict[str, Int64s], aux: bytes) -> None:
        self.check(request)
        if request.room in self._rooms:
            raise ValueError(f"room {request.room:016x} exists already")
        handoff = HybridHandoff.unpack(aux, len(request.prompt))
        components = {each.name: each for each in self._description.components}
        if not slots.keys() == handoff.digests.keys() == components.keys():
            theirs = f"aux: {sorted(handoff.digests)}, slots: {sorted(slots)}"
            raise ValueError(f"{theirs}, expected components {sorted(components)}")
        tokens = len(request.prompt) + request.sampling.max_tokens
        for name, own in slots.items():
            if len(own) < (rows := components[name].rows(tokens)):
                raise ValueError(f"slots of {name}: {len(own)}, expected {rows}")
            check_slots(own, components[name].layout.slots, f"slots of {name}")
        answer = _HybridAnswer(request, slots, handoff, handoff.logits_digest, [handoff.first_token])
        self._rooms[request.room] = answer

    def step(self) -> list[Token | Finished | Broken]:
        _enter(self._device)
        made: list[Token | Finished | Broken] = []
        for number in list(islice(self._rooms, self._config.batch_max)):
            room = self._rooms.pop(number)  # to the end of the queue: rooms take turns
            if not room.reported and (wrong := self._differs(room)):
                detail = f"component {wrong!r}: these are not the bytes that prefill wrote"
                made.append(Broken(room=number, detail=detail))
            elif (room.reported or not self._report(room, made)) and not self._advance(room, made):
                self._rooms[number] = room
        return made

    def cancel(self, room: int) -> None:
        self._rooms.pop(room, None)

    def _differs(self, room: _HybridAnswer) -> str:
        """The first component whose rows are not those that prefill wrote, or an empty text."""
        found = self._digests(room, len(room.request.prompt))
        return next((name for name, digest in found.items() if digest != room.handoff.digests[name]), "")

    def _digests(self, room: _HybridAnswer, tokens: int) -> dict[str, bytes]:
        assert self._rows is not None
        prompt = len(room.request.prompt)
        return {
            each.name: self._rows.digest(each, room.slots[each.name], tokens, prompt) for each in self._rows.components
        }

    def _advance(self, room: _HybridAnswer, made: list[Token | Finished | Broken]) -> bool:
        """Writes the last id's rows, reads, and picks the next id. Returns whether that was the last."""
        assert self._rows is not None
        ids, prompt = room.tokens, len(room.request.prompt)
        stamp = stamps_of(ids)[-1:]
        for each in self._rows.components:
            row = row_of(each, len(ids) - 1, prompt)
            self._rows.write(each.name, room.slots[each.name][row : row + 1], stamp)
        logits = self._rows.logits(room.slots, ids, prompt)
        room.logits_digest = chain(room.logits_digest, logits)
        room.ids.append(draw(logits, room.request.sampling, len(room.ids)))
        return self._report(room, made)

    def _report(self, room: _HybridAnswer, made: list[Token | Finished | Broken]) -> bool:
        """Reports the last id, and the end if it ends the request. Returns whether it does."""
        room.reported, number = True, room.request.room
        made.append(Token(room=number, index=len(room.ids) - 1, id=room.ids[-1]))
        reason = room.end(self._options.eos)
        if reason is None:
            return False
        digests = self._digests(room, len(room.tokens) - 1)
        made.append(Finished(
            room=number, reason=reason, tokens_digest=tokens_digest(room.ids), logits_digest=room.logits_digest,
            kv_digest=blake2b(b"".join(digests.values()), digest_size=DIGEST_BYTES).digest(),
        ))  # fmt: skip
        return True


def _enter(device: torch.device) -> None:
    """Called on the thread that is about to compute: events are of that thread's GPU, which is GPU 0 at first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _words(memory: memoryview, byte_count: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.int32, count=byte_count // 4)


def _check(request: Request, options: HybridOptions) -> None:
    check_request(request, Architecture(attention="mla", context_tokens=options.context_tokens))
