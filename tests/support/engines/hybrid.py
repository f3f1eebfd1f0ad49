"""An engine with a DeepSeek V4's components and no model, for daemons: `--engine tests.support.engines.hybrid:create`.

A row holds, over and over, a stamp of its place in the model and of all tokens up to its last one. Decode looks at
every row of every component at every step, and writes each new token's: a window's over the oldest one, a compressed
row and a state anew. A byte that is not there, or is another room's, breaks its request. `page_size` is in tokens.
Option `index`: hbm, and decode has its index in that memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.engine import WRONG, emit, stamps, token
from pdtransfer.engine_api import Broken, Computed, EngineConfig, EngineDescription, Finished, Prefilled, Request, Token
from pdtransfer.layout.deepseek_v4 import deepseek_v4
from pdtransfer.layout.layout import Component

RATIOS = (0, 4, 128, 4)
WINDOW = 48
REQUESTS = 12

Slots = dict[str, NDArray[np.int64]]


def card(config: EngineConfig) -> EngineDescription:
    granular = config.page_size == 1
    components = deepseek_v4(
        config.host_layout, ratios=RATIOS, tokens=config.slots, requests=REQUESTS, page_tokens=config.page_size,
        page_align=8 if granular else 576, window_tokens=WINDOW, window_page_size=1 if granular else 16,
        index_memory="hbm" if config.options.get("index") == "hbm" else "dram",
    )  # fmt: skip
    ends = {memory: [each.layout.end for each in components if each.memory == memory] for memory in ("dram", "hbm")}
    return EngineDescription(
        model="hybrid", weights=b"hybrid", components=components, memory_bytes=max(ends["dram"]),
        hbm_bytes=max(ends["hbm"], default=0),
    )  # fmt: skip


def ends(component: Component, tokens: int) -> NDArray[np.int64]:
    """The last token of each row of so many tokens, in the order of the rows."""
    rows = component.rows(tokens)
    match component.span.kind:
        case "all":
            return np.minimum(np.arange(1, rows + 1) * component.tokens_per_row, tokens) - 1
        case "last":
            return np.arange(tokens - rows, tokens)
        case "once":
            return np.array([tokens - 1])


class Rows:
    """The rows of a pool or of an arena's memories, by component and slot."""

    def __init__(self, memories: dict[str, memoryview], components: tuple[Component, ...]) -> None:
        words = {memory: np.frombuffer(view, np.uint32) for memory, view in memories.items()}
        self._planes: dict[str, list[tuple[int, NDArray[np.uint32]]]] = {}
        for place, component in enumerate(components):
            layout = component.layout
            self._planes[component.name] = [
                (
                    (place * 64 + at) * 0x9E3779B1 & 0xFFFFFFFF,
                    np.lib.stride_tricks.as_strided(
                        words[component.memory][plane.base // 4 :],
                        (layout.slots // layout.page_size, layout.page_size, plane.row_bytes // 4),
                        (plane.page_stride, plane.row_stride, 4),
                    ),
                )
                for at, plane in enumerate(layout.planes)
            ]
        self._page_size = {each.name: each.layout.page_size for each in components}

    def write(self, name: str, slots: NDArray[np.int64], made: NDArray[np.uint64]) -> None:
        at = np.divmod(slots, self._page_size[name])
        for salt, rows in self._planes[name]:
            rows[at] = (made.astype(np.uint32) ^ np.uint32(salt))[:, None]

    def right(self, name: str, slots: NDArray[np.int64], made: NDArray[np.uint64]) -> bool:
        at = np.divmod(slots, self._page_size[name])
        return all(
            bool((rows[at] == (made.astype(np.uint32) ^ np.uint32(salt))[:, None]).all())
            for salt, rows in self._planes[name]
        )


@dataclass(slots=True)
class _Prompt:
    request: Request
    pages: Slots
    skip: dict[str, int]
    stamps: NDArray[np.uint64]
    done: int = 0


class HybridPrefill:
    """A base.PrefillEngine: one chunk of the oldest room a step."""

    def __init__(self, config: EngineConfig) -> None:
        self.card, self._config = card(config), config
        self._memory = np.zeros(self.card.memory_bytes, np.uint8)
        self.pool = memoryview(self._memory)
        self._rows = Rows({"dram": self.pool}, self.card.components)
        self._free = {
            each.name: list(range(each.layout.slots // each.layout.page_size)) for each in self.card.components
        }
        self._held: dict[int, Slots] = {}
        self._rooms: dict[int, _Prompt] = {}

    @property
    def idle(self) -> bool:
        return not self._rooms

    def admit(self, request: Request) -> bool:
        tokens, skip, wanted = len(request.prompt), dict[str, int](), dict[str, int]()
        for each in self.card.components:
            page_size = each.layout.page_size
            skip[each.name] = max(0, tokens - WINDOW) % page_size if each.span.kind == "last" else 0
            wanted[each.name] = -(-(skip[each.name] + each.rows(tokens)) // page_size)
        if any(count > len(self._free[name]) for name, count in wanted.items()):
            return False
        pages = {name: np.array([self._free[name].pop() for _ in range(count)]) for name, count in wanted.items()}
        self._held[request.room] = pages
        self._rooms[request.room] = _Prompt(request, pages, skip, stamps(request.prompt))
        return True

    def step(self) -> list[Computed | Prefilled | Broken]:
        if not self._rooms:
            return []
        number, room = next(iter(self._rooms.items()))
        tokens = len(room.request.prompt)
        first, room.done = room.done, min(tokens, room.done + self._config.chunk_tokens)
        made: list[Computed | Prefilled | Broken] = [
            self._computed(number, room, component, rows) for component, rows in self._whole(first, room.done, tokens)
        ]
        if room.done == tokens:
            del self._rooms[number]
            made.append(Prefilled(room=number, aux=room.stamps[-1].tobytes()))
        return made

    def _whole(self, first: int, end: int, tokens: int) -> Iterator[tuple[Component, tuple[int, int]]]:
        """The rows that tokens [first, end) complete: the last ones, windows and states with the prompt's end."""
        for each in self.card.components:
            rows = first // each.tokens_per_row, end // each.tokens_per_row
            if end == tokens:
                rows = rows[0] if each.span.kind == "all" else 0, each.rows(tokens)
            elif each.span.kind != "all":
                continue
            if rows[0] < rows[1]:
                yield each, rows

    def _computed(self, number: int, room: _Prompt, component: Component, rows: tuple[int, int]) -> Computed:
        name, page_size = component.name, component.layout.page_size
        pages, skip = room.pages[name], room.skip[name]
        slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[skip + rows[0] : skip + rows[1]]
        last = ends(component, len(room.stamps))[rows[0] : rows[1]]
        self._rows.write(name, slots, room.stamps[last])
        layers = component.layout.layer_range
        return Computed(room=number, component=name, rows=rows, layers=layers, pages=pages, skip=skip)

    def cancel(self, room: int) -> None:
        self._rooms.pop(room, None)

    def free(self, room: int) -> None:
        self.cancel(room)
        for name, pages in self._held.pop(room, {}).items():
            self._free[name].extend(pages.tolist())


@dataclass(slots=True)
class _Room:
    request: Request
    slots: Slots
    stamps: NDArray[np.uint64]  # of the prompt and of all that will be generated
    tokens: int
    window: NDArray[np.int64]  # the token that each of the window's rows has; -1: none yet
    ids: list[int] = field(default_factory=list[int])


class HybridDecode:
    """A base.DecodeEngine: a token a step for every room."""

    def __init__(self, config: EngineConfig) -> None:
        self.card = card(config)
        self._rows: Rows | None = None
        self._rooms: dict[int, _Room] = {}

    @property
    def idle(self) -> bool:
        return not self._rooms

    def attach(self, arena: memoryview, *, hbm: memoryview | None = None) -> None:
        self._rows = Rows({"dram": arena, **({} if hbm is None else {"hbm": hbm})}, self.card.components)

    def check(self, request: Request) -> None:
        pass

    def admit(self, request: Request, slots: Slots, aux: bytes) -> None:
        prompt, tokens = request.prompt, len(request.prompt)
        ids = [token(prompt, index) for index in range(request.sampling.max_tokens)]
        made = stamps(np.concatenate([prompt, np.array(ids, np.int64)]))
        if aux != made[tokens - 1].tobytes():
            raise ValueError(f"aux: {aux.hex()} is not this prompt's")
        if wrong := {
            c.name: len(slots[c.name]) for c in self.card.components if len(slots[c.name]) != c.rows(len(made))
        }:
            raise ValueError(f"slots: {wrong} for {len(made)} tokens")
        window = np.full(len(slots["window"]), -1)
        kept = min(tokens, WINDOW)
        window[:kept] = np.arange(tokens - kept, tokens)
        self._rooms[request.room] = _Room(request, slots, made, tokens, window, ids)

    def _right(self, room: _Room) -> str:
        """The component whose rows are not what they should be."""
        assert self._rows is not None
        for each in self.card.components:
            slots, last = room.slots[each.name], ends(each, room.tokens)
            if each.span.kind == "last":
                slots, last = slots[room.window >= 0], room.window[room.window >= 0]
            if not self._rows.right(each.name, slots[: len(last)], room.stamps[last]):
                return each.name
        return ""

    def _write(self, room: _Room) -> None:
        """The next token's rows."""
        assert self._rows is not None
        position = room.tokens
        place = int(room.window.argmin())  # empty ones first, then the oldest
        room.window[place] = position
        row = {"all": lambda c: position // c.tokens_per_row, "last": lambda _: place, "once": lambda _: 0}
        for each in self.card.components:
            at = row[each.span.kind](each)
            self._rows.write(each.name, room.slots[each.name][at : at + 1], room.stamps[position : position + 1])
        room.tokens += 1

    def step(self) -> list[Token | Finished | Broken]:
        made: list[Token | Finished | Broken] = []
        for number, room in list(self._rooms.items()):
            if wrong := self._right(room):
                del self._rooms[number]
                made.append(Broken(room=number, detail=f"{WRONG}: {wrong}"))
                continue
            at = room.tokens - len(room.request.prompt)
            self._write(room)
            made += emit(self._rooms, number, at)
        return made

    def cancel(self, room: int) -> None:
        self._rooms.pop(room, None)


def create(config: EngineConfig) -> Any:
    """The engine that `config.role` names."""
    return HybridPrefill(config) if config.role == "prefill" else HybridDecode(config)
