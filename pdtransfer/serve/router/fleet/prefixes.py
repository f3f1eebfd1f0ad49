"""Which workers were sent a prompt's blocks lately, and so may have them cached. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import takewhile

EVERYONE = -1  # a mask with all bits set


class PrefixHolders:
    """Which workers know a block: a mask for each key."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}

    def add(self, key: bytes, number: int) -> None:
        """The worker of this number knows the key."""
        self._masks[key] = self._masks.get(key, 0) | 1 << number

    def discard(self, keys: Collection[bytes], number: int) -> None:
        """It knows these keys no more."""
        for key in keys:
            mask = self._masks.get(key, 0) & ~(1 << number)
            if mask:
                self._masks[key] = mask
            else:
                self._masks.pop(key, None)

    def levels(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """All workers, by how many of these keys they know up to the first unknown one: their mask, and that number. No
        mask is empty."""
        levels: list[tuple[int, int]] = []
        holders = EVERYONE
        for blocks, key in enumerate(keys):
            more = holders & self._masks.get(key, 0)
            if more != holders:
                levels.append((holders & ~more, blocks))
            holders = more
            if not holders:
                return levels
        levels.append((holders, len(keys)))
        return levels


class KnownPrefixes:
    """The keys that a router sent to one worker recently, at most `keys_max`; a prompt's deepest blocks are dropped
    first. `holders` have them by the worker's `number` as well. With them the ends of prompts that it has answered."""

    def __init__(self, keys_max: int, holders: PrefixHolders | None = None, number: int = 0) -> None:
        self._keys_max, self._holders, self._number = keys_max, holders, number
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._ends: set[bytes] = set()

    def learn(self, keys: Sequence[bytes]) -> None:
        """Adds keys."""
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)
            else:
                self._keys[key] = None
                if self._holders is not None:
                    self._holders.add(key, self._number)
        if len(self._keys) > self._keys_max:
            gone = [self._keys.popitem(last=False)[0] for _ in range(len(self._keys) - self._keys_max)]
            self._ends.difference_update(gone)
            self._discard(gone)

    def answered(self, keys: Sequence[bytes]) -> None:
        """The worker has a prompt of these keys, and its answer."""
        if keys and self.count(keys) == len(keys):
            self._ends.add(keys[-1])

    def held(self, keys: Sequence[bytes]) -> int:
        """The number of these keys up to the end of the longest answered prompt that is a beginning of theirs."""
        return max((place for place, key in enumerate(keys[: self.count(keys)], 1) if key in self._ends), default=0)

    def count(self, keys: Sequence[bytes]) -> int:
        """The number of these keys up to the first unknown one."""
        return sum(1 for _ in takewhile(self._keys.__contains__, keys))

    def clear(self) -> None:
        """Forgets all keys."""
        self._discard(self._keys)
        self._keys.clear()
        self._ends.clear()

    def _discard(self, keys: Collection[bytes]) -> None:
        if self._holders is not None:
            self._holders.discard(keys, self._number)
