"""What prefill hands to decode besides the KV."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ....limits import TOKENS_MAX, TOP_LOGPROBS_MAX
from ....wire import Sampling
from ...sampling import DIGEST_BYTES, Picked
from .facts import ModelFacts

_LOGPROBS_BYTES_MAX = 4 + 8 * TOP_LOGPROBS_MAX


class FirstToken(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A room's aux, a msgpack array of these fields."""

    format: Annotated[str, Meta(max_length=32)]  # the engine's own, such as "reference/1"
    prompt_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]  # the length of Begin's prompt
    id: Annotated[int, Meta(ge=0, lt=1 << 32)]  # the first generated token, index 0 of Tokens
    logits_digest: Annotated[bytes, Meta(max_length=DIGEST_BYTES)]  # of its logits; empty of an engine without digests
    logprobs: Annotated[bytes, Meta(max_length=_LOGPROBS_BYTES_MAX)]  # of it, as in Tokens; empty unless asked for
    rows_digest: Annotated[bytes, Meta(max_length=1_024)]  # of the prompt's rows; empty of an engine that compares none

    def picked(self, sampling: Sampling) -> Picked:
        """The first token. Raises ValueError for logprobs other than the request asks for."""
        return Picked.of_aux(self.id, self.logprobs, sampling)

    def pack(self) -> bytes:
        """The aux."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, aux: bytes, *, prompt_tokens: int, facts: ModelFacts) -> FirstToken:
        """Raises ValueError unless prefill makes exactly these bytes for a prompt of this length."""
        try:
            first = msgspec.msgpack.decode(aux, type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"aux of {len(aux)} bytes: {error}") from None
        if first.format != facts.aux_format:
            raise ValueError(f"aux: format {first.format!r}, expected {facts.aux_format!r}")
        if first.prompt_tokens != prompt_tokens:
            raise ValueError(f"aux: for a prompt of {first.prompt_tokens} tokens, the room's has {prompt_tokens}")
        if first.id >= facts.vocabulary:
            raise ValueError(f"aux: id {first.id} is not within [0, {facts.vocabulary})")
        if len(first.logits_digest) != DIGEST_BYTES and (facts.digests or first.logits_digest):
            raise ValueError(f"aux: a digest of {len(first.logits_digest)} bytes, expected {DIGEST_BYTES}")
        if first.pack() != aux:
            raise ValueError(f"aux of {len(aux)} bytes: its fields take {len(first.pack())} in the shortest form")
        return first
