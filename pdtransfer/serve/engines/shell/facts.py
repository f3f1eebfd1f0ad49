"""What the shells of both roles have to know of a model."""

from __future__ import annotations

from dataclasses import dataclass

from ...engine_api import EngineDescription, Request
from ...sampling import check_asked

NOT_FINITE = "the logits are not finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's description for peers, and its limits."""

    description: EngineDescription
    aux_format: str  # of what prefill hands to decode, such as "stamp/1"
    vocabulary: int
    context_tokens: int  # of a prompt and its answer at most
    eos: tuple[int, ...]
    digests: bool = True  # whether the logits and the KV of each request are digested
    every_token: bool = False  # whether prefill keeps a row of each token where decode keeps those of a window

    def check(self, request: Request) -> None:
        """Raises ValueError, with both values, for a request that this model can never serve."""
        check_asked(
            request.prompt, request.sampling, vocabulary=self.vocabulary, context_tokens=self.context_tokens
        )  # fmt: skip
