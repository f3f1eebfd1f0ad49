"""The keys of a prompt's blocks: equal keys mean equal prefixes of one model, its weights and a salt."""

from __future__ import annotations

from hashlib import sha256

KEY_BYTES = 16
_ID_BYTES = 4  # a token id is sent and hashed as little-endian u32


def root_key(model: str, weights: bytes, salt: bytes) -> bytes:
    """The key before a prompt's first block."""
    digest = sha256()
    for part in (model.encode(), weights, salt):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()[:KEY_BYTES]


def block_keys(root: bytes, prompt: bytes, *, block_tokens: int, blocks_max: int) -> tuple[bytes, ...]:
    """A key for each of the first `blocks_max` full blocks of `prompt`, little-endian u32 token ids."""
    size, view = block_tokens * _ID_BYTES, memoryview(prompt)
    running, keys = sha256(root), list[bytes]()  # one running digest: a new one for each block takes twice as long
    for start in range(0, min(len(prompt) // size, blocks_max) * size, size):
        running.update(view[start : start + size])
        keys.append(running.digest()[:KEY_BYTES])
    return tuple(keys)
