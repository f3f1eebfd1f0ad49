"""An engine that computes nothing and takes its time: what fleets of a busy host can still be timed with.

A chunk of a prompt takes `token_us` a token, a decode step `step_ms` and `request_ms` for each request of the batch.
The engine sleeps for what is left of that, so that neighbours on the same cores hardly change its rates. Rows are
never written: what they would hold is nobody's.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdtransfer import Component, Span, allocate, host_layout
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

ROW_BYTES = 1_024
PAGE_SIZE = 16


def _describe(config: EngineConfig) -> EngineDescription:
    layout = host_layout(
        config.host_layout, kinds=("latent",), layers=1, heads=1, head_bytes=ROW_BYTES, dtype="uint8",
        slots=config.slots, page_size=PAGE_SIZE,
    )  # fmt: skip
    component = Component(name="kv", memory="dram", tokens_per_row=1, span=Span(), layout=layout)
    return EngineDescription(
        model="paced", weights=b"paced", components=(component,), memory_bytes=layout.end,
        full_sampling=True,  # of tokens that are not sampled
    )  # fmt: skip


def _until(due_s: float) -> None:
    left_s = due_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


class PacedPrefill:
    """A `PrefillEngine`. As the project's own engines: the oldest room and the one with the fewest tokens left take
    turns, a chunk each."""

    def __init__(self, config: EngineConfig) -> None:
        self.card, self._chunk_tokens = _describe(config), config.chunk_tokens
        self.pool = allocate(self.card.memory_bytes).view
        self._token_s = float(config.options.get("token_us", 500)) / 1e6
        self._free = deque(range(config.slots // PAGE_SIZE))
        self._held: dict[int, NDArray[np.int64]] = {}
        self._rooms: dict[int, tuple[Request, int]] = {}  # with the tokens that are done
        self._turn = 0

    @property
    def idle(self) -> bool:
        """Whether step() would do nothing."""
        return not self._rooms

    def admit(self, request: Request) -> bool:
        """Takes pages for the whole prompt."""
        pages = -(-len(request.prompt) // PAGE_SIZE)
        if pages > len(self._free):
            return False
        self._held[request.room] = np.array([self._free.popleft() for _ in range(pages)], np.int64)
        self._rooms[request.room] = request, 0
        return True

    def step(self) -> list[Computed | Prefilled | Broken]:
        """Takes the time of one chunk."""
        if not self._rooms:
            return []
        begins_s = time.monotonic()
        self._turn += 1
        rooms = list(self._rooms.values())
        request, first = rooms[0] if self._turn % 2 else min(rooms, key=lambda each: len(each[0].prompt) - each[1])
        tokens, room = len(request.prompt), request.room
        end = min(tokens, first + self._chunk_tokens)
        _until(begins_s + (end - first) * self._token_s)
        self._rooms[room] = request, end
        pages = self._held[room][: -(-end // PAGE_SIZE)]
        made: list[Computed | Prefilled | Broken] = [
            Computed(room=room, component="kv", rows=(first, end), layers=(0, 1), pages=pages)
        ]
        if end == tokens:
            del self._rooms[room]
            made.append(Prefilled(room=room, aux=b"paced"))
        return made

    def cancel(self, room: int) -> None:
        """Computes nothing more of the room."""
        self._rooms.pop(room, None)

    def free(self, room: int) -> None:
        """Nothing reads the room's pages any more."""
        self.cancel(room)
        self._free.extend(self._held.pop(room, np.zeros(0, np.int64)).tolist())


class PacedDecode:
    """A `DecodeEngine`: prefill's token and the first of its own leave with the first step, as in the project's."""

    def __init__(self, config: EngineConfig) -> None:
        self.card, self._batch_max = _describe(config), config.batch_max
        self._step_s = float(config.options.get("step_ms", 40)) / 1e3
        self._request_s = float(config.options.get("request_ms", 2)) / 1e3
        self._rooms: dict[int, tuple[int, int]] = {}  # tokens wanted, and done

    @property
    def idle(self) -> bool:
        """Whether step() would do nothing."""
        return not self._rooms

    @property
    def figures(self) -> HotFigures:
        """No device is here."""
        return HotFigures()

    def attach(self, arena: memoryview) -> None:
        """Reads nothing of it."""

    def check(self, request: Request) -> None:
        """Takes every request."""

    def admit(self, request: Request, slots: dict[str, NDArray[np.int64]], aux: bytes) -> None:  # noqa: ARG002
        """The room has landed."""
        self._rooms[request.room] = request.sampling.max_tokens, 0

    def step(self) -> list[Token | Finished | Broken]:
        """Takes the time of a step of all rooms, up to the largest batch."""
        begins_s = time.monotonic()
        batch = list(self._rooms.items())[: self._batch_max]
        if not batch:
            return []
        _until(begins_s + self._step_s + self._request_s * len(batch))
        made: list[Token | Finished | Broken] = []
        for room, (wanted, done) in batch:
            del self._rooms[room]  # rooms take turns
            upto = min(wanted, done + (1 if done else 2))
            made += [Token(room=room, index=index, id=97 + index % 26) for index in range(done, upto)]
            if upto == wanted:
                made.append(Finished(room=room, reason="length"))
            else:
                self._rooms[room] = wanted, upto
        return made

    def cancel(self, room: int) -> None:
        """Forgets the room."""
        self._rooms.pop(room, None)


def create(config: EngineConfig) -> Any:
    """The factory that --engine names."""
    return PacedPrefill(config) if config.role == "prefill" else PacedDecode(config)
