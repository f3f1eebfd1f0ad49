"""Tables that a card has been given: they stay while a launch may read them, and some while longer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import WorldError

TABLES_MAX = 1_024  # that nobody uses: who loads a request layer by layer has one a layer, each of some KiB


class Memory(Protocol):
    """What tables take of a card."""

    @property
    def aside(self) -> int: ...

    def allocate(self, byte_count: int, stream: int | None = None) -> int: ...

    def free(self, address: int, stream: int | None = None) -> None: ...

    def upload(self, address: int, content: NDArray[Any], stream: int) -> None: ...

    def synchronise(self, stream: int) -> None: ...

    def event(self) -> Any: ...

    def record(self, event: Any, stream: int) -> None: ...

    def passed(self, event: Any) -> bool: ...


@dataclass(slots=True)
class _Table:
    address: int
    users: int = 0
    launched: dict[int, Any] = field(default_factory=dict[int, Any])  # by stream, the event after its last launch


class Tables:
    """By what names each for good. From any thread; nobody waits for what others have queued."""

    def __init__(self, card: Memory, *, most: int = TABLES_MAX) -> None:
        self._card, self._most = card, most
        self._lock = threading.Lock()
        self._held: dict[object, _Table] = {}  # the one used last comes last
        self._events: list[Any] = []  # of tables that are gone

    def kept(self, key: object, table: NDArray[np.int64]) -> int:
        """Where the card has `table`. It stays there until `let` is called for it as often as this was.

        Waits for the upload where the table is new to the card.
        """
        with self._lock:
            held = self._held.pop(key, None)
            if held is None:
                self._make_place()
                aside = self._card.aside
                held = _Table(self._card.allocate(table.nbytes, aside))
                self._card.upload(held.address, table, aside)
                self._card.synchronise(aside)
            held.users += 1
            self._held[key] = held
            return held.address

    def let(self, key: object, stream: int | None = None) -> None:
        """All launches from it are queued, on `stream` or ahead of what comes there next; without one, they have ended.

        Raises WorldError where the card does not say when they end: then the table stays for good.
        """
        with self._lock:
            held = self._held[key]
            if stream is not None:
                event = held.launched.get(stream)
                if event is None:
                    event = held.launched[stream] = self._events.pop() if self._events else self._card.event()
                self._card.record(event, stream)
            held.users -= 1

    def _make_place(self) -> None:
        """Whatever comes in a table's place would be read by a launch that is to be made from it, or has not ended:
        those that may still be read go over the limit."""
        if (over := len(self._held) + 1 - self._most) > 0:
            for key in list(islice((key for key, held in self._held.items() if self._unread(held)), over)):
                held = self._held.pop(key)
                self._events += held.launched.values()
                self._card.free(held.address, self._card.aside)

    def _unread(self, held: _Table) -> bool:
        """Whether nothing reads it, or ever will: a launch that a graph has captured may be made again, and its event
        can't be asked."""
        try:
            return not held.users and all(self._card.passed(event) for event in held.launched.values())
        except WorldError:
            return False
