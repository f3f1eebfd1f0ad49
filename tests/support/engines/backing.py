"""The plain engine for a decode daemon whose arena stays at its first chunk while its gate is closed:
`--engine tests.support.engines.backing:create`, option `gates`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.serve.engine_api import EngineConfig
from tests.support.engines import plain
from tests.support.engines.plain import HELD_S


def create(config: EngineConfig) -> Any:
    """As plain.create."""
    options = dict(config.options)
    hold(Path(options.pop("gates")) / config.role)
    return plain.create(replace(config, options=options))


def hold(gate: Path) -> None:
    """Has this process back no more than the first chunk of its arena while that file is there."""
    prefault = ArenaMemory.prefault

    def held(self: ArenaMemory, *given: Any) -> bool:
        while self.bytes_ready and gate.exists():
            time.sleep(HELD_S)
        return prefault(self, *given)

    ArenaMemory.prefault = held
