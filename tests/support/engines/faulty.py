"""An engine with a mind of its own, for daemons under test: `--engine tests.support.engines.faulty:create`.

Options beside the engine's own: `model`: plain, reference, or else stamp; `step_ms`, how long every step takes at
least; `fault`, what goes wrong with a prompt that starts with a question mark ("refuse": it finds no place on a device
of HiSparse, unless its rank leads), at its warm-up ("cold"), or where it is made by a rank that does not lead ("rank");
`gates`: a directory (fleets.Gates), and while there is a file of this engine's role in it, it makes no step, but one
when it has admitted rooms; while there is one called warm-up, that takes as long.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdtransfer.serve.engine_api import Broken, EngineConfig, Finished, Request, Token
from pdtransfer.serve.engines.stamp import factory as stamp
from tests.support.engines import plain

HELD_S = 2e-3  # between two looks at a gate
MARK = ord("?")  # the first byte of a prompt that has a fault


class Slow:
    """Hands everything on to the engine, slowly; `fault` happens to marked prompts."""

    def __init__(self, engine: Any, config: EngineConfig, *, step_ms: float, fault: str, gates: str) -> None:
        self._engine, self._role, self._step_s, self._fault = engine, config.role, step_ms / 1e3, fault
        self._gate, self._warm_up = Path(gates) / config.role, Path(gates) / "warm-up"
        self._follows = config.group.ranks.tp_rank > 0
        self._marked: set[int] = set()
        self._admitted = False  # a room since the last step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def warm_up(self) -> None:
        while self._warm_up.exists():
            self._warm_up.with_name("warming-up").touch()
            time.sleep(HELD_S)
        if self._fault == "cold":
            raise RuntimeError("as the test wants it")
        getattr(self._engine, "warm_up", lambda: None)()  # the plain ones have none

    def admit(self, request: Request, *more: Any) -> Any:
        if request.prompt[0] == MARK:
            self._marked.add(request.room)
        self._admitted = True
        return self._engine.admit(request, *more)

    @property
    def computes_rests(self) -> bool:
        return getattr(self._engine, "computes_rests", False)  # the plain ones do not say

    def admit_rest(self, request: Request, *more: Any) -> None:
        self._admitted = True
        self._engine.admit_rest(request, *more)

    def step(self) -> list[Any]:
        time.sleep(self._step_s)
        if self._held():
            return []
        if self._fault == "refuse":
            self._refuse()
        made = self._engine.step()
        marked = [each for each in made if each.room in self._marked]
        if not marked or self._fault in ("", "refuse"):
            return made
        if self._fault == "die":
            raise RuntimeError("as the test wants it")
        return [each for each in made if each.room not in self._marked] + self._spoil(marked)

    def _held(self) -> bool:
        """Whether a closed gate lets no room have its step now; prefill waits there, as its group's other ranks do. It
        lets a step pass once a room has been admitted."""
        admitted, self._admitted = self._admitted, False
        while not admitted and self._gate.exists():
            time.sleep(HELD_S)
            if self._role == "decode":
                return True
        return False

    def _refuse(self) -> None:
        hot = self._engine.model.hot
        for room, placement in hot._placed.items() if self._follows else ():
            if room in self._marked:
                hot._pool.refused[placement.row] = 1

    def _spoil(self, made: list[Any]) -> list[Any]:
        room = made[0].room
        match self._fault:
            case "break":
                self._engine.cancel(room)
                return [Broken(room=room, detail="as the test wants it")]
            case "babble":  # more tokens than were asked for, and an end of a room that nobody knows
                return [
                    *(Token(room=room, index=index, id=7) for index in range(50)),
                    Finished(room=1, reason="length"),
                ]
            case _:
                raise AssertionError(self._fault)


def create(config: EngineConfig) -> Any:
    """The engine that `model` names."""
    options = dict(config.options)
    own = {"step_ms": float(options.pop("step_ms", 0)), "fault": options.pop("fault", "")}
    own["gates"] = options.pop("gates", "/nowhere")
    if own["fault"] == "rank" and config.group.ranks.tp_rank > 0:
        raise RuntimeError("as the test wants it")
    match options.pop("model", ""):
        case "plain":
            make = plain.create
        case "reference":
            from pdtransfer_lab.models.factory import create as make
        case _:
            make = stamp.create
    return Slow(make(replace(config, options=options)), config, **own)
