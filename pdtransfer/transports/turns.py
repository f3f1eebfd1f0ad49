"""Fair turns: grants that have work queued take turns, so that a small one does not wait for a large one.

This module imports nothing of the package, because an engine's own process loads it by its path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Queue(Generic[Item]):
    """The items of one key, the next one first."""

    __slots__ = ("items", "key", "left_bytes")

    def __init__(self, key: Hashable, left_bytes: int) -> None:
        self.key, self.left_bytes = key, left_bytes
        self.items: deque[Item] = deque()


class Turns(Generic[Item]):
    """Queues of items, one for each key, that take turns of `turn_bytes`; by default a turn is one `take`.

    Not for several threads at once.
    """

    def __init__(self, turn_bytes: int = 0) -> None:
        self._turn_bytes = turn_bytes
        self._queues: dict[Hashable, Queue[Item]] = {}  # those that have items
        self._waiting: deque[Queue[Item]] = deque()  # those of them that are not taken, in the order of turns

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def heads(self) -> Iterator[Item]:
        """The first item of each queue that waits for its turn, the next one first."""
        return (queue.items[0] for queue in self._waiting)

    def add(self, key: Hashable, item: Item) -> bool:
        """Queues an item behind those of its own key; whether it is the first."""
        if (queue := self._queues.get(key)) is not None:
            queue.items.append(item)
            return False
        queue = self._queues[key] = Queue(key, self._turn_bytes)
        queue.items.append(item)
        self._waiting.append(queue)
        return True

    def take(self, ready: Callable[[Item], bool] | None = None) -> Queue[Item] | None:
        """Takes out the first queue whose first item is `ready`, until it is put back; None without one."""
        for queue in self._waiting:
            if ready is None or ready(queue.items[0]):
                self._waiting.remove(queue)
                return queue
        return None

    def put_back(self, queue: Queue[Item], byte_count: int = 0) -> None:
        """Ends the turn of a queue that has used `byte_count` of it, unless over an eighth of it is left. A queue
        without items is dropped."""
        queue.left_bytes -= byte_count
        if not queue.items:
            del self._queues[queue.key]
        elif queue.left_bytes > self._turn_bytes // 8:  # less is not worth another piece
            self._waiting.appendleft(queue)
        else:
            queue.left_bytes = self._turn_bytes
            self._waiting.append(queue)

    def remove(self, key: Hashable, item: Item) -> None:
        """Removes an item, if it is queued, from a queue that is not taken."""
        queue = self._queues.get(key)
        if queue is not None and item in queue.items:
            queue.items.remove(item)
            if not queue.items:
                self.drop(key)

    def drop(self, key: Hashable) -> Iterable[Item]:
        """Removes a queue that is not taken, and returns its items."""
        if (queue := self._queues.pop(key, None)) is None:
            return ()
        self._waiting.remove(queue)
        return queue.items
