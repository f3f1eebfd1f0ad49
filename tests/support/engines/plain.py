"""The engine of examples/engine.py, with a test's hands on it: `--engine tests.support.engines.plain:create`.

Options: `row_bytes` of one layer; `twin`: decode has its KV once in each memory; `step_ms`, how long a step takes at
least; `gates`: a directory (fleets.Gates), and while there is a file of this engine's role in it, prefill computes no
room's last chunk, decode no more than one token each. A prompt that begins with FORKS has prefill fork a child that
keeps all its mappings until it is killed.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from examples.engine import (
    ROW_BYTES,
    Answer,
    Broken,
    Computed,
    Decode,
    EngineConfig,
    Finished,
    Prefill,
    Prefilled,
    Rows,
    Token,
    text,  # noqa: F401 (what a fleet's answers are compared with)
)

FORKS = ord("!")  # the first byte of a prompt that has prefill fork
HELD_S = 2e-3  # between two looks at a gate
CHILD_S = 60  # after which a forked child ends by itself, lest it outlive a test that was cut short


class PlainPrefill(Prefill):
    def __init__(self, config: EngineConfig, row_bytes: int, step_s: float, gate: Path) -> None:
        super().__init__(config, row_bytes=row_bytes)
        self._step_s, self._gate = step_s, gate

    def step(self) -> list[Computed | Prefilled | Broken]:
        if self.idle:
            return []
        time.sleep(self._step_s)
        room = next(iter(self._rooms.values()))
        if not room.done and room.request.prompt[0] == FORKS:
            fork()
        if self.chunk_end(room) == len(room.request.prompt) and self._gate.exists():
            time.sleep(HELD_S)
            return []
        return super().step()


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


class PlainDecode(Decode):
    def __init__(self, config: EngineConfig, row_bytes: int, step_s: float, gate: Path, *, twin: bool) -> None:
        super().__init__(config, row_bytes=row_bytes)
        self._step_s, self._gate = step_s, gate
        self._hbm: Rows | None = None
        if twin:
            (kv,) = self.description.components
            both = kv, msgspec.structs.replace(kv, memory="hbm")
            self.description = replace(self.description, components=both, hbm_bytes=self.description.memory_bytes)

    def attach(self, arena: memoryview, *, hbm: memoryview | None = None) -> None:
        super().attach(arena)
        self._hbm = None if hbm is None else Rows(hbm, self.description.components[0].layout)

    def rows_of(self, room: Answer) -> Rows:
        return self._rows if self._hbm is None or room.request.enable_hisparse else self._hbm

    def step(self) -> list[Token | Finished | Broken]:
        if self.idle:
            return []
        time.sleep(self._step_s)
        tokens: list[Token | Finished | Broken] = []
        held = self._gate.exists()
        if held:
            time.sleep(HELD_S)
        for number, room in list(self._rooms.items()):
            if not held or room.rows == len(room.request.prompt):
                tokens += self.advance(number)
        return tokens


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
