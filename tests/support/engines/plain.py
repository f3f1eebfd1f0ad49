"""An engine without a model, for daemons that are killed and started often: `--engine
tests.support.engines.plain:create`.

Row p of a layer is a stamp of the layer and of tokens 0 to p, repeated over the row; the token at index i is a hash of
(prompt, i). Decode looks at every row of every room at every step: a byte that is not there, or is another room's,
breaks its request with `WRONG`. Importing it takes a third of a second, since there is no torch in it.

Options: `row_bytes` of one layer; `twin`: decode has its KV once in each memory; `step_ms`, how long a step takes at
least; `forks`: a prompt with that mark has prefill fork a child that keeps all its mappings until it is killed;
`gates`: a directory (fleets.Gates), and while there is a file of this engine's role in it, prefill computes no room's
last chunk, decode no more than one token each.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdtransfer.engine_api import (
    Broken,
    Computed,
    EngineCard,
    EngineConfig,
    Finished,
    HotFigures,
    Prefilled,
    Request,
    Token,
)
from pdtransfer.layout.layout import Component, Layout, Span
from pdtransfer.layout.layout_builders import host_layout

LAYERS = 2
ROW_BYTES = 64
FORKS = ord("!")  # the first byte of a prompt that has prefill fork
HELD_S = 2e-3  # between two looks at a gate
CHILD_S = 60  # after which a forked child ends by itself, lest it outlive a test that was cut short
WRONG = "these bytes are not this room's"


def stamps(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One for each token, of it and of those before it; none is 0."""
    factors = np.cumprod(np.full(len(ids), 0x9E3779B97F4A7C15, np.uint64))
    return np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * factors) | np.uint64(1)


def token(prompt: NDArray[np.int64], index: int) -> int:
    """A lower-case letter."""
    return 97 + (int(stamps(prompt)[-1] >> np.uint64(8)) + index * 7_919) % 26


def text(prompt: str, max_tokens: int) -> str:
    """What comes of a prompt."""
    ids = np.frombuffer(prompt.encode(), np.uint8).astype(np.int64)
    return "".join(chr(token(ids, index)) for index in range(max_tokens))


class Rows:
    """The rows of a pool or an arena, by layer and slot."""

    def __init__(self, memory: memoryview, layout: Layout) -> None:
        assert layout.page_size == 1, "slots are pages here"
        words = np.frombuffer(memory, np.uint64)
        self._layers = [
            np.lib.stride_tricks.as_strided(
                words[plane.base // 8 :], (layout.slots, plane.row_bytes // 8), (plane.page_stride, 8)
            )
            for plane in sorted(layout.planes, key=lambda plane: plane.layer)
        ]

    def write(self, slots: NDArray[np.int64], row_stamps: NDArray[np.uint64]) -> None:
        """A row a stamp, to a slot each."""
        for layer, rows in enumerate(self._layers):
            rows[slots] = (row_stamps + np.uint64(layer))[:, None]

    def right(self, slots: NDArray[np.int64], row_stamps: NDArray[np.uint64]) -> bool:
        """Whether they are there."""
        return all(
            bool((rows[slots] == (row_stamps + np.uint64(layer))[:, None]).all())
            for layer, rows in enumerate(self._layers)
        )


def card(config: EngineConfig, row_bytes: int) -> EngineCard:
    layout = host_layout(
        config.host_layout, kinds=("latent",), layers=LAYERS, heads=1, head_bytes=row_bytes, dtype="uint8",
        slots=config.slots, page_size=1,
    )  # fmt: skip
    component = Component(name="kv", memory="dram", tokens_per_row=1, span=Span(), layout=layout)
    return EngineCard(model="plain", weights=b"plain", components=(component,), memory_bytes=layout.end)


@dataclass(slots=True)
class _Prompt:
    request: Request
    slots: NDArray[np.int64]
    stamps: NDArray[np.uint64]
    done: int = 0


class PlainPrefill:
    """A base.PrefillEngine: one chunk of the oldest room a step."""

    def __init__(self, config: EngineConfig, row_bytes: int, step_s: float, gate: Path) -> None:
        self.card, self._config, self._step_s, self._gate = card(config, row_bytes), config, step_s, gate
        self._memory = np.zeros(self.card.memory_bytes, np.uint8)
        self.pool = memoryview(self._memory)
        self._rows = Rows(self.pool, self.card.components[0].layout)
        self._free = deque(range(config.slots))
        self._held: dict[int, NDArray[np.int64]] = {}
        self._rooms: dict[int, _Prompt] = {}

    @property
    def idle(self) -> bool:
        return not self._rooms

    def admit(self, request: Request) -> bool:
        if len(request.prompt) > self._config.slots:
            raise ValueError(f"{len(request.prompt)} tokens, the pool has {self._config.slots} slots")
        if len(request.prompt) > len(self._free):
            return False
        slots = np.array([self._free.popleft() for _ in request.prompt], np.int64)
        self._held[request.room] = slots
        self._rooms[request.room] = _Prompt(request, slots, stamps(request.prompt))
        return True

    def step(self) -> list[Computed | Prefilled | Broken]:
        if not self._rooms:
            return []
        time.sleep(self._step_s)
        room = next(iter(self._rooms.values()))
        number, total = room.request.room, len(room.request.prompt)
        if not room.done and room.request.prompt[0] == FORKS:
            fork()
        end = min(total, room.done + self._config.chunk_tokens)
        if end == total and self._gate.exists():
            time.sleep(HELD_S)
            return []
        self._rows.write(room.slots[room.done : end], room.stamps[room.done : end])
        rows, room.done = (room.done, end), end
        made: list[Computed | Prefilled | Broken] = [
            Computed(room=number, component="kv", rows=rows, layers=(0, LAYERS), pages=room.slots[:end])
        ]
        if end == total:
            del self._rooms[number]
            made.append(Prefilled(room=number, aux=room.stamps[-1].tobytes()))
        return made

    def cancel(self, room: int) -> None:
        self._rooms.pop(room, None)

    def free(self, room: int) -> None:
        self.cancel(room)
        self._free.extend(self._held.pop(room, np.zeros(0, np.int64)).tolist())


def fork() -> None:
    """A child that does nothing, and so keeps every mapping and descriptor of this process but standard output."""
    if os.fork() == 0:
        os.close(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(CHILD_S)
        while True:
            signal.pause()


@dataclass(slots=True)
class _Room:
    request: Request
    slots: NDArray[np.int64]
    stamps: NDArray[np.uint64]  # of the prompt and of all that will be generated
    rows: int
    ids: list[int]


class PlainDecode:
    """A base.DecodeEngine: a token a step for every room."""

    def __init__(self, config: EngineConfig, row_bytes: int, step_s: float, gate: Path, *, twin: bool) -> None:
        self.card, self._config, self._step_s, self._gate = card(config, row_bytes), config, step_s, gate
        if twin:
            (kv,) = self.card.components
            both = kv, msgspec.structs.replace(kv, memory="hbm")
            self.card = replace(self.card, components=both, hbm_bytes=self.card.memory_bytes)
        self._rows: dict[bool, Rows] = {}  # by whether a request wants HiSparse
        self._rooms: dict[int, _Room] = {}

    @property
    def idle(self) -> bool:
        return not self._rooms

    @property
    def figures(self) -> HotFigures:
        """It has no device that anybody would wait for."""
        return HotFigures(running=sum(room.request.enable_hisparse for room in self._rooms.values()))

    def attach(self, arena: memoryview, *, hbm: memoryview | None = None) -> None:
        layout = self.card.components[0].layout
        self._rows[True] = Rows(arena, layout)
        self._rows[False] = self._rows[True] if hbm is None else Rows(hbm, layout)

    def check(self, request: Request) -> None:
        pass

    def admit(self, request: Request, slots: dict[str, NDArray[np.int64]], aux: bytes) -> None:
        prompt = request.prompt
        ids = [token(prompt, index) for index in range(request.sampling.max_tokens)]
        made = stamps(np.concatenate([prompt, np.array(ids, np.int64)]))
        if aux != made[len(prompt) - 1].tobytes():
            raise ValueError(f"aux: {aux.hex()} is not this prompt's")
        self._rooms[request.room] = _Room(request, slots["kv"], made, len(prompt), ids)

    def step(self) -> list[Token | Finished | Broken]:
        if not self._rooms:
            return []
        time.sleep(self._step_s)
        made: list[Token | Finished | Broken] = []
        held = self._gate.exists()
        if held:
            time.sleep(HELD_S)
        for number, room in list(self._rooms.items()):
            if held and room.rows > len(room.request.prompt):
                continue
            rows = self._rows[room.request.enable_hisparse]
            if not rows.right(room.slots[: room.rows], room.stamps[: room.rows]):
                del self._rooms[number]
                made.append(Broken(room=number, detail=WRONG))
                continue
            at, own = room.rows - len(room.request.prompt), slice(room.rows, room.rows + 1)
            rows.write(room.slots[own], room.stamps[own])
            room.rows += 1
            made += told(self._rooms, number, at)
        return made

    def cancel(self, room: int) -> None:
        self._rooms.pop(room, None)


def told(rooms: dict[int, Any], number: int, index: int) -> list[Token | Finished]:
    """A room's token at that index, and its end, with which it leaves `rooms`, if that is its last."""
    ids = rooms[number].ids
    made: list[Token | Finished] = [Token(room=number, index=index, id=ids[index])]
    if index + 1 == len(ids):
        del rooms[number]
        made.append(Finished(room=number, reason="length"))
    return made


def create(config: EngineConfig) -> Any:
    """The engine that `config.role` names."""
    options = dict(config.options)
    row_bytes, step_s = int(options.pop("row_bytes", ROW_BYTES)), float(options.pop("step_ms", 0)) / 1e3
    gate = Path(options.pop("gates", "/nowhere")) / config.role
    twin = bool(options.pop("twin", ""))
    assert not options, options
    if config.role == "prefill":
        return PlainPrefill(config, row_bytes, step_s, gate)
    return PlainDecode(config, row_bytes, step_s, gate, twin=twin)
