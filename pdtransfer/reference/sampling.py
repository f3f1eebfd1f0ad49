"""Picks tokens reproducibly from logits, and packs the data that prefill hands to decode."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from ..limits import TOKENS_MAX
from ..wire import Sampling
from .architecture import DIGEST_BYTES
from .tokens import VOCABULARY


def pick(logits: NDArray[np.float32], sampling: Sampling, index: int) -> int:
    """The generated id at `index`: the first highest logit at temperature 0, else a draw by (seed, index)."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    shares = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    order = np.argsort(-shares, kind="stable")
    running: NDArray[np.float64] = np.cumsum(shares[order])
    # The nucleus is the fewest tokens that reach top_p; the most likely token is always in it.
    nucleus = running[: 1 + np.count_nonzero(running < sampling.top_p * running[-1])]
    drawn = _uniform(sampling.seed, index) * nucleus[-1]
    return int(order[min(np.count_nonzero(nucleus <= drawn), len(nucleus) - 1)])


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 bits, from a hash of seed and index, so that no state goes from prefill to decode."""
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def chain(before: bytes, logits: NDArray[np.float32]) -> bytes:
    """The logits' digest after one more token. Prefill begins with b""; decode continues."""
    return blake2b(before + logits.tobytes(), digest_size=DIGEST_BYTES).digest()


def tokens_digest(ids: list[int]) -> bytes:
    """The digest of generated ids, as little-endian u32."""
    return blake2b(np.array(ids, dtype="<u4").tobytes(), digest_size=DIGEST_BYTES).digest()


class Handoff(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The data that decode needs besides the KV: a room's aux, a msgpack array of these fields."""

    format: Literal["reference/1"]
    prompt_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    first_token: Annotated[int, Meta(ge=0, lt=VOCABULARY)]
    logits_digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]

    @classmethod
    def of(cls, *, prompt_tokens: int, first_token: int, logits_digest: bytes) -> Handoff:
        return cls("reference/1", prompt_tokens, first_token, logits_digest)

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, aux: bytes, prompt_tokens: int) -> Handoff:
        """Raises ValueError unless `pack` produces exactly these bytes for a prompt of this length."""
        try:
            handoff = msgspec.msgpack.decode(aux, type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"aux of {len(aux)} bytes: {error}") from None
        if handoff.prompt_tokens != prompt_tokens:
            raise ValueError(f"aux: for a prompt of {handoff.prompt_tokens} tokens, the room's has {prompt_tokens}")
        if handoff.pack() != aux:
            raise ValueError(f"aux of {len(aux)} bytes: its fields take {len(handoff.pack())} in the shortest form")
        return handoff
