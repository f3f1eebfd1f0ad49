"""Names on which two engines agree without a message: rooms by an engine's own label, weights by their contents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

from ..errors import ConfigError


def room_id(label: str) -> int:
    """The room, a u64, of a request that both engines know by the same text, such as a `transfer_id`.

    Proxies lose the low bits of large integers in JSON; they pass a text on as it is. Two labels share a room once in
    2**64 pairs.
    """
    return int.from_bytes(sha256(label.encode()).digest()[:8], "little") or 1  # 0 names none on the wire


def weights_digest(facts: Mapping[str, object]) -> bytes:
    """The digest for NodeSettings.weights of everything that makes two engines' KV caches the same: the model's
    configuration, dtype, quantisation, and the layout of the cache.

    `facts` are JSON: the order of keys does not matter, nor does the difference between a list and a tuple. Raises
    ConfigError for a value that is not JSON.
    """
    try:
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"facts: {error}") from None
    return sha256(text.encode()).digest()
