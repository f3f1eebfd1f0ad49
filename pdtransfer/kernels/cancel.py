"""A word that stops copies while they run."""

from __future__ import annotations

import ctypes


class Cancel:
    """Set once, from any thread; a copy looks at it between batches of rows, without the GIL."""

    __slots__ = ("_word", "address")

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        self.address = ctypes.addressof(self._word)

    def set(self) -> None:
        """Stops every copy that was given this word, now and later."""
        self._word.value = 1

    @property
    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._word.value != 0
