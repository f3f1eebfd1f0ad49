"""Which prefill and which decode worker serve a request: what is asked of a policy, and what it answers. No I/O.

A policy is one file here with one class, which a backend's pool of workers makes. The pool keeps up to date what the
policy looks at; it chooses, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Prefill = TypeVar("Prefill")
Decode = TypeVar("Decode")


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as placement sees it. `ids` are its prompt's, u32, and at most `growth` tokens follow. `keys` are those
    of the prompt's blocks, where they are known already. A `model` of None accepts any. `may_stay`: decode may compute
    the rest of a prompt that goes on from one that it has answered."""

    ids: bytes = b""
    growth: int = 0
    salt: bytes = b""
    keys: tuple[bytes, ...] | None = None
    model: str | None = None
    enable_hisparse: bool = False
    may_stay: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.ids) // 4

    @property
    def tokens(self) -> int:
        """Slots needed where nothing is cached."""
        return self.prompt_tokens + self.growth


@dataclass(frozen=True, slots=True)
class Pair(Generic[Prefill, Decode]):
    """The two workers of a request."""

    prefill: Prefill
    decode: Decode
    keys: tuple[bytes, ...] = ()  # of the prompt's blocks, where placement has a choice
    computed: int | None = None  # prompt tokens that decode computes itself though prefill could; None: prefill does


@dataclass(frozen=True, slots=True)
class NoPair:
    """No pair can take the request. `retry_ms` is when a full worker may have room, None if no ready workers match."""

    detail: str
    retry_ms: int | None


class PlacementPolicy(Protocol[Prefill, Decode]):
    """A router's policy."""

    def choose(
        self, request: RoutedRequest, avoid: Collection[Prefill | Decode], now: float
    ) -> Pair[Prefill, Decode] | NoPair:
        """Returns the best pair of workers that can take the request now; those in `avoid` come last."""
        ...
