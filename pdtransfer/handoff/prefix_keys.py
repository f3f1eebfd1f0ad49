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


class RunningKeys:
    """The keys of a prompt's blocks, and of those that its answer fills, as tokens come: `keys` has those of the first
    `blocks_max` full blocks."""

    def __init__(self, root: bytes, prompt: bytes, *, block_tokens: int, blocks_max: int) -> None:
        self.keys: list[bytes] = []
        self._block_bytes, self._blocks_max = block_tokens * _ID_BYTES, blocks_max
        self._running = sha256(root)  # one running digest: a new one for each block takes twice as long
        self._rest = b""  # of a block that is not full
        self.last_id = b""  # that was generated; empty before the first
        self.add(prompt)

    def add(self, ids: bytes) -> None:
        """The next tokens: little-endian u32 ids."""
        ids, size = self._rest + ids, self._block_bytes
        view, blocks = memoryview(ids), min(len(ids) // size, self._blocks_max - len(self.keys))
        for start in range(0, blocks * size, size):
            self._running.update(view[start : start + size])
            self.keys.append(self._running.digest()[:KEY_BYTES])
        self._rest = ids[blocks * size :] if len(self.keys) < self._blocks_max else b""

    def generated(self, ids: bytes) -> None:
        """These ids follow. The row of the last one is not written before the next one is generated."""
        if ids:
            self.add(self.last_id + ids[:-_ID_BYTES])
            self.last_id = ids[-_ID_BYTES:]


def block_keys(root: bytes, prompt: bytes, *, block_tokens: int, blocks_max: int) -> tuple[bytes, ...]:
    """A key for each of the first `blocks_max` full blocks of `prompt`, little-endian u32 token ids."""
    return tuple(RunningKeys(root, prompt, block_tokens=block_tokens, blocks_max=blocks_max).keys)
