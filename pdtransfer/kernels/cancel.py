"""A word in memory that stops running copies."""

from __future__ import annotations

import ctypes


class CancelWord:
    """Set once, from any thread. A copy reads it between batches of rows, without the GIL."""

    __slots__ = ("_word", "address")

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        self.address = ctypes.addressof(self._word)

    def set(self) -> None:
        """Stops every running and later copy that takes this word."""
        self._word.value = 1

    @property
    def is_set(self) -> bool:
        """True if `set` was called."""
        return self._word.value != 0
