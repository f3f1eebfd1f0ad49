"""The data that prefill hands to decode besides the KV: a room's aux, a msgpack array of these fields."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ....limits import TOKENS_MAX
from ....wire import Sampling
from ...sampling import DIGEST_BYTES, Picked
from .tokens import VOCABULARY


class StampHandoff(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`kv_digest` is of the rows of the prompt, in every component, on all ranks; `logprobs` are those of the first
    token, packed."""

    format: Literal["stamp/1"]
    prompt_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    first_token: Annotated[int, Meta(ge=0, lt=VOCABULARY)]
    logits_digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    kv_digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    logprobs: bytes

    @classmethod
    def of(cls, *, prompt_tokens: int, first: Picked, logits_digest: bytes, kv_digest: bytes) -> StampHandoff:
        return cls("stamp/1", prompt_tokens, first.id, logits_digest, kv_digest, first.pack_logprobs())

    def first(self, sampling: Sampling) -> Picked:
        """The first token, as prefill picked it. Raises ValueError for logprobs other than the request asks for."""
        return Picked.of_aux(self.first_token, self.logprobs, sampling)

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, aux: bytes, prompt_tokens: int) -> StampHandoff:
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
