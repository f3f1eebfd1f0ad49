"""The reference model's tokeniser: ids 0 to 255 are bytes, 256 is EOS. Imports no torch, so a router may use it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

EOS = 256
VOCABULARY = 257


def encode(text: bytes) -> NDArray[np.int64]:
    """One id for each byte, int64 (bytes,), without special tokens."""
    return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


def decode(ids: Iterable[int]) -> bytes:
    """The bytes among the ids, in order, without EOS. Raises ValueError for an id outside the vocabulary."""
    ids = list(ids)
    for index, token in enumerate(ids):
        if not 0 <= token < VOCABULARY:
            raise ValueError(f"id {token} at {index} is not within [0, {VOCABULARY})")
    return bytes(token for token in ids if token != EOS)
