"""What is true of every worker of a fleet, a daemon or an HTTP server: its role, and what an operator decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from ....handoff.tables import Word

Role: TypeAlias = Literal["prefill", "decode"]
Member = TypeVar("Member")


class Departure(Word):
    """What an operator has decided about a worker, as the reason why it gets no rooms."""

    STAYS = ""
    DRAINS = "drained by an operator"
    LEAVES = "removed by an operator; its rooms run to their end"


def longest_request(
    prefills: Iterable[Member],
    decodes: Iterable[Member],
    tokens: Callable[[Member], int],
    obstacle: Callable[[Member, Member], str] | None = None,
) -> int:
    """The tokens of a prompt and its answer that some pair takes, 0 where there is no pair: of each pair the fewer of
    the two. `obstacle` gives the reason why two cannot work together, if so."""
    longest, by_length = 0, sorted(decodes, key=tokens, reverse=True)
    for prefill in sorted(prefills, key=tokens, reverse=True):
        for decode in by_length:
            both = min(tokens(prefill), tokens(decode))
            if both <= longest:
                break
            if obstacle is None or not obstacle(prefill, decode):
                longest = both
    return longest


@dataclass(frozen=True, slots=True)
class Pair(Generic[Member]):
    """The two workers of a request; without a prefill worker decode computes the prompt, or the rest of it."""

    prefill: Member | None
    decode: Member
    keys: tuple[bytes, ...] = ()  # of the prompt's blocks, where placement has a choice
    computed: int | None = None  # prompt tokens that decode computes itself though prefill could; None: prefill does


@dataclass(frozen=True, slots=True)
class NoPair:
    """No pair can take the request. `retry_ms` is when a full worker may have room, None if no ready workers match."""

    detail: str
    retry_ms: int | None
