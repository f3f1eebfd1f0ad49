"""The reference engine with a mind of its own, for daemons under test: `--engine tests.integration.engines:create`.

Options beside the reference's: `step_ms`, how long every step takes at least; `fault`, what goes wrong with a prompt
that starts with an exclamation mark.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from pdtransfer.engine import reference
from pdtransfer.engine.base import Broken, EngineConfig, Finished, Request, Token

MARK = ord("!")


class Slow:
    """Hands everything on to the reference engine, slowly; `fault` happens to marked prompts."""

    def __init__(self, engine: Any, step_ms: float, fault: str) -> None:
        self._engine, self._step_s, self._fault = engine, step_ms / 1e3, fault
        self._marked: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def admit(self, request: Request, *more: Any) -> Any:
        if request.prompt[0] == MARK:
            self._marked.add(request.room)
        return self._engine.admit(request, *more)

    def step(self) -> list[Any]:
        time.sleep(self._step_s)
        made = self._engine.step()
        marked = [each for each in made if each.room in self._marked]
        if not marked or not self._fault:
            return made
        if self._fault == "die":
            raise RuntimeError("as the test wants it")
        return [each for each in made if each.room not in self._marked] + self._spoil(marked)

    def _spoil(self, made: list[Any]) -> list[Any]:
        room = made[0].room
        match self._fault:
            case "break":
                self._engine.cancel(room)
                return [Broken(room=room, detail="as the test wants it")]
            case "babble":  # more tokens than were asked for, and an end of a room that nobody knows
                return [*(Token(room=room, index=at, id=7) for at in range(50)), Finished(room=1, reason="length")]
            case _:
                raise AssertionError(self._fault)


def create(config: EngineConfig) -> Any:
    """As reference.create."""
    options = dict(config.options)
    step_ms, fault = float(options.pop("step_ms", 0)), options.pop("fault", "")
    return Slow(reference.create(replace(config, options=options)), step_ms, fault)
