"""What both roles check of a request, and what prefill hands to decode with it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ....limits import TOKENS_MAX
from ....wire import Sampling
from ...engine_api import Request
from ...sampling import DIGEST_BYTES, Picked, check_asked
from .checkpoint import Checkpoint


def check_request(request: Request, checkpoint: Checkpoint) -> None:
    """Raises ValueError, with both values, for a request that this model cannot serve."""
    check_asked(
        request.prompt, request.sampling, vocabulary=checkpoint.vocabulary, context_tokens=checkpoint.context_tokens
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
        return cls("transformers/1", prompt_tokens, first.id, logits_digest, first.pack_logprobs())

    def picked(self, sampling: Sampling) -> Picked:
        """The first token. Raises ValueError for logprobs other than the request asks for."""
        return Picked.of_aux(self.id, self.logprobs, sampling)

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
