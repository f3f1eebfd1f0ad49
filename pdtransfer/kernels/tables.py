"""Tables that a card has been given: they stay while a launch is made from them, and some while longer."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

TABLES_MAX = 1_024  # that nobody uses: who loads a request layer by layer has one a layer, each of some KiB


class Memory(Protocol):
    """What tables take of a card."""

    def allocate(self, byte_count: int, stream: int | None = None) -> int: ...

    def free(self, address: int, stream: int | None = None) -> None: ...

    def upload(self, address: int, content: NDArray[Any], stream: int) -> None: ...

    def synchronise(self, stream: int) -> None: ...


@dataclass(slots=True)
class _Table:
    address: int
    users: int = 0


class Tables:
    """By what names each for good. From any thread."""

    def __init__(self, card: Memory, *, most: int = TABLES_MAX) -> None:
        self._card, self._most = card, most
        self._lock = threading.Lock()
        self._held: dict[object, _Table] = {}  # the one used last comes last

    def kept(self, key: object, table: NDArray[np.int64]) -> int:
        """Where the card has `table`. It stays there until `let` is called for it as often as this was.

        Waits for the card where the table is new to it, and where it has to forget one.
        """
        with self._lock:
            held = self._held.pop(key, None)
            if held is None:
                self._make_place()
                held = _Table(self._card.allocate(table.nbytes))
                self._card.upload(held.address, table, 0)
                self._card.synchronise(0)
            held.users += 1
            self._held[key] = held
            return held.address

    def let(self, key: object) -> None:
        """All launches from it are queued: freeing it waits for these."""
        with self._lock:
            self._held[key].users -= 1

    def _make_place(self) -> None:
        """A launch that another thread is about to make would read whatever comes in a table's place, and write there:
        those in use go over the limit."""
        if (over := len(self._held) + 1 - self._most) > 0:
            for key in [key for key, held in self._held.items() if not held.users][:over]:
                self._card.free(self._held.pop(key).address)
