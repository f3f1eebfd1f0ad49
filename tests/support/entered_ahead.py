"""Arenas of which a writer enters nothing but what rows are about to land in, until a test lets it go on."""

from __future__ import annotations

import threading

import pytest

from pdtransfer.transports.shm import entering
from pdtransfer.transports.shm.entering import EnteredArena

PAGE_BYTES = 4_096


class Ahead:
    """But for the first piece of each arena when it is mapped; pieces are pages of memory, by default."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, piece_bytes: int = PAGE_BYTES) -> None:
        self.go_on, begun = threading.Event(), set[EnteredArena]()
        enter_next = EnteredArena.enter_next

        def step(arena: EnteredArena) -> bool:
            first = arena not in begun
            begun.add(arena)
            assert first or self.go_on.wait(60)
            return enter_next(arena)

        monkeypatch.setattr(entering, "STEP_BYTES", piece_bytes)
        monkeypatch.setattr(entering, "PIECE_BYTES", piece_bytes)
        monkeypatch.setattr(EnteredArena, "enter_next", step)

    def finish(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets it enter the rest, in one step."""
        monkeypatch.setattr(entering, "STEP_BYTES", 1 << 40)
        self.go_on.set()
