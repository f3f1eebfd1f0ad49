"""An engine without a model and without torch, for the daemons of pdtransfer: what an engine of one's own has to do.

    python -m pdtransfer prefill --engine examples.engine:create --bind tcp://127.0.0.1:7101
    python -m pdtransfer decode --engine examples.engine:create --bind tcp://127.0.0.1:7201
    python -m pdtransfer router --prefill tcp://127.0.0.1:7101 --decode tcp://127.0.0.1:7201

`python -m` finds the module because the current directory, the checkout, is on its path. `pdtransfer.serve.engine_api`
describes every call that an engine receives; here is the least that serves completions over HTTP.

The KV of position p in a layer is a stamp of the layer and of tokens 0 to p, repeated over the row. The token at index
i of an answer is a hash of the prompt and i. At every step decode compares each row of each room with its stamp. So a
byte that did not arrive, or belongs to another room, fails the request with `WRONG`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdtransfer import Component, Layout, Span, allocate, host_layout
from pdtransfer.serve.engine_api import (
    Broken,
    Computed,
    EngineConfig,
    EngineDescription,
    Finished,
    HotFigures,
    Prefilled,
    Request,
    Token,
)

LAYERS = 2
ROW_BYTES = 64  # of one layer, unless --engine-option row_bytes=N changes it
WRONG = "these bytes are not this room's"


def stamps(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """uint64 (n,) for token ids int64 (n,): a hash of each token and of all before it; none is 0."""
    factors = np.cumprod(np.full(len(ids), 0x9E3779B97F4A7C15, np.uint64))
    return np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * factors) | np.uint64(1)


def token(prompt: NDArray[np.int64], index: int) -> int:
    """The token that this "model" generates at `index`: a lower-case letter."""
    return 97 + (int(stamps(prompt)[-1] >> np.uint64(8)) + index * 7_919) % 26


def text(prompt: str, max_tokens: int) -> str:
    """The completion of a prompt, for those who check the answers of a fleet."""
    ids = np.frombuffer(prompt.encode(), np.uint8).astype(np.int64)
    return "".join(chr(token(ids, index)) for index in range(max_tokens))


def describe(config: EngineConfig, row_bytes: int = ROW_BYTES) -> EngineDescription:
    """What this rank holds: one component of latent rows. Peers pair only if `model` and `weights` are equal."""
    layout = host_layout(
        config.host_layout,
        kinds=("latent",),
        layers=LAYERS,
        heads=1,
        head_bytes=row_bytes,
        dtype="uint8",
        slots=config.slots,
        page_size=1,  # whatever the flag is: an engine ignores what it does not need
    )
    component = Component(name="kv", memory="dram", tokens_per_row=1, span=Span(), layout=layout)
    return EngineDescription(model="plain", weights=b"plain", components=(component,), memory_bytes=layout.end)


class Rows:
    """The rows of a pool or an arena by layer and slot, as views of its memory. A page is one slot."""

    def __init__(self, memory: memoryview, layout: Layout) -> None:
        assert layout.page_size == 1
        words = np.frombuffer(memory, np.uint64)
        self._layers = [
            np.lib.stride_tricks.as_strided(
                words[plane.base // 8 :], (layout.slots, plane.row_bytes // 8), (plane.page_stride, 8)
            )
            for plane in sorted(layout.planes, key=lambda plane: plane.layer)
        ]

    def write(self, slots: NDArray[np.int64], row_stamps: NDArray[np.uint64]) -> None:
        """Writes a stamp to the row of each slot, in every layer."""
        for layer, rows in enumerate(self._layers):
            rows[slots] = (row_stamps + np.uint64(layer))[:, None]

    def right(self, slots: NDArray[np.int64], row_stamps: NDArray[np.uint64]) -> bool:
        """True if every layer holds these stamps."""
        return all(
            bool((rows[slots] == (row_stamps + np.uint64(layer))[:, None]).all())
            for layer, rows in enumerate(self._layers)
        )


@dataclass(slots=True)
class Prompt:
    """A room of prefill: `done` of its tokens are computed."""

    request: Request
    slots: NDArray[np.int64]
    stamps: NDArray[np.uint64]
    done: int = 0


class Prefill:
    """A `PrefillEngine`: each step computes one chunk of the oldest room."""

    def __init__(self, config: EngineConfig, *, row_bytes: int = ROW_BYTES) -> None:
        self.description = describe(config, row_bytes)
        self._chunk_tokens, self._slots = config.chunk_tokens, config.slots
        self.pool = allocate(self.description.memory_bytes).view  # another process may read it only in `SharedMemory`
        self._rows = Rows(self.pool, self.description.components[0].layout)
        self._free = deque(range(config.slots))
        self._held: dict[int, NDArray[np.int64]] = {}
        self._rooms: dict[int, Prompt] = {}

    @property
    def idle(self) -> bool:
        """True if step() would do nothing."""
        return not self._rooms

    def admit(self, request: Request) -> bool:
        """Takes slots for the whole prompt. False if too few are free now, ValueError if they never will be."""
        if len(request.prompt) > self._slots:
            raise ValueError(f"{len(request.prompt)} tokens, the pool has {self._slots} slots")
        if len(request.prompt) > len(self._free):
            return False
        slots = np.array([self._free.popleft() for _ in request.prompt], np.int64)
        self._held[request.room] = slots
        self._rooms[request.room] = Prompt(request, slots, stamps(request.prompt))
        return True

    def step(self) -> list[Computed | Prefilled | Broken]:
        """Computes a chunk and reports it: its rows leave for decode while the next chunk is computed."""
        if not self._rooms:
            return []
        room = next(iter(self._rooms.values()))
        number, first, end = room.request.room, room.done, self.chunk_end(room)
        self._rows.write(room.slots[first:end], room.stamps[first:end])
        room.done = end
        outcomes: list[Computed | Prefilled | Broken] = [
            Computed(room=number, component="kv", rows=(first, end), layers=(0, LAYERS), pages=room.slots[:end])
        ]
        if end == len(room.request.prompt):
            del self._rooms[number]
            outcomes.append(Prefilled(room=number, aux=room.stamps[-1].tobytes()))
        return outcomes

    def chunk_end(self, room: Prompt) -> int:
        """Where the next chunk of this room ends, in tokens."""
        return min(len(room.request.prompt), room.done + self._chunk_tokens)

    def cancel(self, room: int) -> None:
        """Computes nothing more of the room. Its slots may still be read: they stay until `free`."""
        self._rooms.pop(room, None)

    def free(self, room: int) -> None:
        """Nothing reads the room's slots any more."""
        self.cancel(room)
        self._free.extend(self._held.pop(room, np.zeros(0, np.int64)).tolist())


@dataclass(slots=True)
class Answer:
    """A room of decode: its slots and stamps are of the prompt and of all that will be generated."""

    request: Request
    slots: NDArray[np.int64]
    stamps: NDArray[np.uint64]
    rows: int  # that are in the arena by now
    ids: list[int]


class Decode:
    """A `DecodeEngine`: each step generates one token for every room, straight out of the arena."""

    def __init__(self, config: EngineConfig, *, row_bytes: int = ROW_BYTES) -> None:
        self.description = describe(config, row_bytes)
        self._rooms: dict[int, Answer] = {}

    @property
    def idle(self) -> bool:
        """True if step() would do nothing."""
        return not self._rooms

    @property
    def figures(self) -> HotFigures:
        """There is no device here, and nothing waits for one."""
        return HotFigures(running=sum(room.request.enable_hisparse for room in self._rooms.values()))

    def attach(self, arena: memoryview) -> None:
        """The arena's bytes in this process; called once, before the first `admit`."""
        self._rows = Rows(arena, self.description.components[0].layout)

    def check(self, request: Request) -> None:
        """ValueError for a request that this engine can never serve: there is none."""

    def admit(self, request: Request, slots: dict[str, NDArray[np.int64]], aux: bytes) -> None:
        """The room has landed: `slots["kv"]` has one slot for each token of the prompt and of the answer."""
        prompt = request.prompt
        ids = [token(prompt, index) for index in range(request.sampling.max_tokens)]
        expected = stamps(np.concatenate([prompt, np.array(ids, np.int64)]))
        if aux != expected[len(prompt) - 1].tobytes():
            raise ValueError(f"aux: {aux.hex()} is not this prompt's")
        self._rooms[request.room] = Answer(request, slots["kv"], expected, len(prompt), ids)

    def step(self) -> list[Token | Finished | Broken]:
        """One token for every room."""
        return [event for number in list(self._rooms) for event in self.advance(number)]

    def advance(self, number: int) -> list[Token | Finished | Broken]:
        """Checks the room's rows, writes the next one, and reports its token; or why the room is broken."""
        room = self._rooms[number]
        rows = self.rows_of(room)
        if not rows.right(room.slots[: room.rows], room.stamps[: room.rows]):
            del self._rooms[number]
            return [Broken(room=number, detail=WRONG)]
        index, newest = room.rows - len(room.request.prompt), slice(room.rows, room.rows + 1)
        rows.write(room.slots[newest], room.stamps[newest])
        room.rows += 1
        return [*emit(self._rooms, number, index)]

    def rows_of(self, room: Answer) -> Rows:  # noqa: ARG002 (of engines with a second memory)
        """Where the room's rows are."""
        return self._rows

    def cancel(self, room: int) -> None:
        """Touches no slot of the room any more."""
        self._rooms.pop(room, None)


def emit(rooms: dict[int, Any], number: int, index: int) -> list[Token | Finished]:
    """The token of a room at `index`. The last one ends the room, and removes it from `rooms`."""
    ids: list[int] = rooms[number].ids
    outcomes: list[Token | Finished] = [Token(room=number, index=index, id=ids[index])]
    if index + 1 == len(ids):
        del rooms[number]
        outcomes.append(Finished(room=number, reason="length"))
    return outcomes


def create(config: EngineConfig) -> Prefill | Decode:
    """The factory that --engine names: an engine for `config.role`."""
    row_bytes = int(config.options.get("row_bytes", ROW_BYTES))
    if config.role == "prefill":
        return Prefill(config, row_bytes=row_bytes)
    return Decode(config, row_bytes=row_bytes)
