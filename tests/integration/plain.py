"""An engine without a model, for daemons that are killed and started often: `--engine tests.integration.plain:create`.

Row p of a prompt is a stamp of (prompt, p, layer), repeated over the row, and the token at index i a hash of (prompt,
i). Decode looks at every row of every room at every step: a byte that is not there, or is another room's, breaks its
request with `WRONG`. Importing it takes a third of a second, since there is no torch in it.

Options: `row_bytes` of one layer; `step_ms`, how long a step takes at least; `forks`: a prompt with that mark has
prefill fork a child that keeps all its mappings until it is killed.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdtransfer.engine.base import Broken, Computed, EngineCard, EngineConfig, Finished, Prefilled, Request, Token
from pdtransfer.layout import Component, Layout, Span
from pdtransfer.layouts import host_layout

LAYERS = 2
ROW_BYTES = 64
FORKS = ord("!")  # the first byte of a prompt that has prefill fork
CHILD_S = 60  # after which a forked child ends by itself, lest it outlive a test that was cut short
WRONG = "these bytes are not this room's"


def seed_of(prompt: NDArray[np.int64]) -> int:
    """What all of a room's rows and tokens depend on."""
    return int.from_bytes(hashlib.blake2b(prompt.astype(np.int64).tobytes(), digest_size=6).digest(), "little")


def token(seed: int, index: int) -> int:
    """A lower-case letter."""
    return 97 + (seed * 31 + index * 7919) % 26


def text(prompt: str, max_tokens: int) -> str:
    """What comes of a prompt."""
    seed = seed_of(np.frombuffer(prompt.encode(), np.uint8).astype(np.int64))
    return "".join(chr(token(seed, index)) for index in range(max_tokens))


def stamps(seed: int, positions: NDArray[np.int64], layer: int) -> NDArray[np.uint64]:
    """One a row, none of them 0."""
    mixed = (positions.astype(np.uint64) * np.uint64(LAYERS) + np.uint64(layer)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed ^ np.uint64(seed)) | np.uint64(1)


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

    def write(self, slots: NDArray[np.int64], seed: int, first: int) -> None:
        """Rows first, first + 1 and so on go to these slots."""
        positions = np.arange(first, first + len(slots))
        for layer, rows in enumerate(self._layers):
            rows[slots] = stamps(seed, positions, layer)[:, None]

    def right(self, slots: NDArray[np.int64], seed: int) -> bool:
        """Whether rows 0, 1 and so on are in these slots."""
        positions = np.arange(len(slots))
        return all(
            bool((rows[slots] == stamps(seed, positions, layer)[:, None]).all())
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
    seed: int
    done: int = 0


class PlainPrefill:
    """A base.PrefillEngine: one chunk of the oldest room a step."""

    def __init__(self, config: EngineConfig, row_bytes: int, step_s: float) -> None:
        self.card, self._config, self._step_s = card(config, row_bytes), config, step_s
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
        self._rooms[request.room] = _Prompt(request, slots, seed_of(request.prompt))
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
        self._rows.write(room.slots[room.done : end], room.seed, room.done)
        rows, room.done = (room.done, end), end
        made: list[Computed | Prefilled | Broken] = [
            Computed(room=number, component="kv", rows=rows, layers=(0, LAYERS), pages=room.slots[:end])
        ]
        if end == total:
            del self._rooms[number]
            made.append(Prefilled(room=number, aux=room.seed.to_bytes(8, "little")))
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
    seed: int
    rows: int
    ids: list[int] = field(default_factory=list[int])


class PlainDecode:
    """A base.DecodeEngine: a token a step for every room."""

    def __init__(self, config: EngineConfig, row_bytes: int, step_s: float) -> None:
        self.card, self._config, self._step_s = card(config, row_bytes), config, step_s
        self._rows: Rows | None = None
        self._rooms: dict[int, _Room] = {}

    @property
    def idle(self) -> bool:
        return not self._rooms

    def attach(self, arena: memoryview) -> None:
        self._rows = Rows(arena, self.card.components[0].layout)

    def check(self, request: Request) -> None:
        pass

    def admit(self, request: Request, slots: dict[str, NDArray[np.int64]], aux: bytes) -> None:
        seed = seed_of(request.prompt)
        if aux != seed.to_bytes(8, "little"):
            raise ValueError(f"aux: {aux.hex()} is not this prompt's")
        self._rooms[request.room] = _Room(request, slots["kv"], seed, len(request.prompt))

    def step(self) -> list[Token | Finished | Broken]:
        if not self._rooms:
            return []
        time.sleep(self._step_s)
        assert self._rows is not None
        made: list[Token | Finished | Broken] = []
        for number, room in list(self._rooms.items()):
            if not self._rows.right(room.slots[: room.rows], room.seed):
                del self._rooms[number]
                made.append(Broken(room=number, detail=WRONG))
                continue
            room.ids.append(token(room.seed, len(room.ids)))
            made.append(Token(room=number, index=len(room.ids) - 1, id=room.ids[-1]))
            self._rows.write(room.slots[room.rows : room.rows + 1], room.seed, room.rows)
            room.rows += 1
            if len(room.ids) == room.request.sampling.max_tokens:
                del self._rooms[number]
                made.append(Finished(room=number, reason="length"))
        return made

    def cancel(self, room: int) -> None:
        self._rooms.pop(room, None)


def create(config: EngineConfig) -> Any:
    """The engine that `config.role` names."""
    options = dict(config.options)
    row_bytes, step_s = int(options.pop("row_bytes", ROW_BYTES)), float(options.pop("step_ms", 0)) / 1e3
    assert not options, options
    return (PlainPrefill if config.role == "prefill" else PlainDecode)(config, row_bytes, step_s)
