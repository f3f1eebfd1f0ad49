"""The vocabulary: ids 0 to 255 are bytes, 256 ends a sequence. An answer consists of lower-case letters."""

from __future__ import annotations

from hashlib import shake_128

import numpy as np
from numpy.typing import NDArray

EOS = 256
VOCABULARY = 257

_LETTERS = range(97, 123)
_FLOOR = np.float32(-32.0)  # the logit of what is not a letter: a bias can lift it above every letter
_SCALE = np.float32(2.0**-12)  # logits of letters are within [0, 16)


def logits_of(digest: bytes) -> NDArray[np.float32]:
    """The logits that follow from a digest, float32 (VOCABULARY,). Exact: each is an integer times a power of two."""
    drawn = np.frombuffer(shake_128(digest).digest(2 * len(_LETTERS)), "<u2")
    logits = np.full(VOCABULARY, _FLOOR, np.float32)
    logits[_LETTERS.start : _LETTERS.stop] = drawn.astype(np.float32) * _SCALE
    return logits
