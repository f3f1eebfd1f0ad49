"""Tables that are uploaded to a GPU once and stay there while a launch may read them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import WorldError

if TYPE_CHECKING:
    from .gpu import Gpu

TABLES_MAX = 1_024  # unused tables that stay: a request that loads layer by layer has one for each layer


@dataclass(slots=True)
class _Table:
    address: int
    users: int = 0
    launched: dict[int, Any] = field(default_factory=dict[int, Any])  # by stream, the event after its last launch


class DeviceTables:
    """Uploaded tables by key. Any thread may call it; it does not wait for other work on the GPU."""

    def __init__(self, gpu: Gpu, *, most: int = TABLES_MAX) -> None:
        self._gpu, self._most = gpu, most
        self._lock = threading.Lock()
        self._tables: dict[object, _Table] = {}  # the most recently used table is last
        self._events: list[Any] = []  # of evicted tables, for reuse

    def acquire(self, key: object, content: NDArray[np.int64]) -> int:
        """Returns the device address of the table `key`, which stays until `release` was called as often as this.

        Uploads `content` and waits for the upload if the GPU does not have the table.
        """
        with self._lock:
            table = self._tables.pop(key, None)
            if table is None:
                self._evict()
                stream = self._gpu.side_stream
                table = _Table(self._gpu.allocate(content.nbytes, stream))
                self._gpu.upload(table.address, content, stream)
                self._gpu.synchronise(stream)
            table.users += 1
            self._tables[key] = table
            return table.address

    def release(self, key: object, stream: int | None = None) -> None:
        """Ends one use: all its launches are queued on `stream`, or have ended if `stream` is None.

        Raises WorldError if the GPU cannot record an event; then the table is never evicted.
        """
        with self._lock:
            table = self._tables[key]
            if stream is not None:
                event = table.launched.get(stream)
                if event is None:
                    event = table.launched[stream] = self._events.pop() if self._events else self._gpu.event()
                self._gpu.record(event, stream)
            table.users -= 1

    def _evict(self) -> None:
        """Frees the oldest unused tables above the limit. Tables that a launch may still read stay, above it too."""
        if (over := len(self._tables) + 1 - self._most) > 0:
            for key in list(islice((key for key, table in self._tables.items() if self._is_unused(table)), over)):
                table = self._tables.pop(key)
                self._events += table.launched.values()
                self._gpu.free(table.address, self._gpu.side_stream)

    def _is_unused(self, table: _Table) -> bool:
        """True if no launch reads the table now or later. A captured graph may repeat a launch; its event cannot be
        queried, and its table stays."""
        try:
            return not table.users and all(self._gpu.passed(event) for event in table.launched.values())
        except WorldError:
            return False
