"""What both roles check of a request, and what prefill hands to decode with it."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from ...engine_api import Request
from ...errors import RemoteProtocolError
from ...limits import TOKENS_MAX
from ...sampling import Picked, check_sampling
from ...wire import Sampling, unpack_logprobs
from .checkpoint import Checkpoint

DIGEST_BYTES = 16


def check_request(request: Request, checkpoint: Checkpoint) -> None:
    """Raises ValueError, with both values, for a request that this model cannot serve."""
    prompt, sampling = request.prompt, request.sampling
    if request.enable_hisparse:
        raise ValueError("enable_hisparse: only the reference model decodes with it")
    if prompt.ndim != 1 or prompt.dtype != np.int64:
        raise ValueError(f"prompt: {prompt.dtype} of shape {prompt.shape}, expected int64 (tokens,)")
    if len(prompt) == 0:
        raise ValueError("prompt: 0 tokens, at least 1 is needed")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= checkpoint.vocabulary:
        raise ValueError(f"prompt: id {low if low < 0 else high} is not within [0, {checkpoint.vocabulary})")
    check_sampling(sampling, checkpoint.vocabulary)
    total = len(prompt) + sampling.max_tokens
    if total > checkpoint.context_tokens:
        raise ValueError(
            f"prompt of {len(prompt)} tokens and max_tokens {sampling.max_tokens} are {total} tokens, "
            f"the context has {checkpoint.context_tokens}"
        )


class FirstToken(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What decode needs besides the KV: a room's aux, a msgpack array of these fields."""

    format: Literal["transformers/1"]
    prompt_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    id: Annotated[int, Meta(ge=0, lt=1 << 32)]
    logits_digest: Annotated[bytes, Meta(max_length=DIGEST_BYTES)]  # empty without digests
    logprobs: bytes  # of the first token, packed; empty unless they are asked for

    @classmethod
    def of(cls, *, prompt_tokens: int, first: Picked, logits_digest: bytes) -> FirstToken:
        """What prefill has picked."""
        logprobs = b"" if first.logprobs is None else first.logprobs.pack()
        return cls("transformers/1", prompt_tokens, first.id, logits_digest, logprobs)

    def picked(self, sampling: Sampling) -> Picked:
        """The first token. Raises ValueError for logprobs other than the request asks for."""
        try:
            logprobs = unpack_logprobs("logprobs", self.logprobs, sampling, 1)
        except RemoteProtocolError as error:
            raise ValueError(f"aux: {error}") from None
        return Picked(self.id, logprobs[0] if logprobs else None)

    def pack(self) -> bytes:
        """The aux."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, aux: bytes, *, prompt_tokens: int, vocabulary: int) -> FirstToken:
        """Raises ValueError unless prefill makes exactly these bytes for a prompt of this length."""
        try:
            first = msgspec.msgpack.decode(aux, type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"aux of {len(aux)} bytes: {error}") from None
        if first.prompt_tokens != prompt_tokens:
            raise ValueError(f"aux: for a prompt of {first.prompt_tokens} tokens, the room's has {prompt_tokens}")
        if first.id >= vocabulary:
            raise ValueError(f"aux: id {first.id} is not within [0, {vocabulary})")
        if first.pack() != aux:
            raise ValueError(f"aux of {len(aux)} bytes: its fields take {len(first.pack())} in the shortest form")
        return first


def chain(before: bytes, logits: NDArray[np.float32]) -> bytes:
    """The logits' digest after one more token."""
    return blake2b(before + logits.tobytes(), digest_size=DIGEST_BYTES).digest()


def tokens_digest(ids: list[int]) -> bytes:
    """The digest of generated ids, as little-endian u32."""
    return blake2b(np.array(ids, dtype="<u4").tobytes(), digest_size=DIGEST_BYTES).digest()
