"""An HTTP server of vLLM or SGLang as its router knows it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .prefixes import KnownPrefixes
from .roles import Departure, Role

# How decode reaches a prefill server's KV: fields that are equal for all requests of one process.
ServerIdentity: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class HandOffs:
    """Hand-offs of a decode server since its start, of all ranks together."""

    received: int = 0
    computed: int = 0  # their prompt was computed there
    kv_bytes: int = 0
    refusals: tuple[str, ...] = ()  # its facts, name=value, in which prefill engines differ


@dataclass(slots=True, eq=False)
class Server:
    """One server. `why` is the reason why it gets no requests, empty while it is healthy."""

    url: str
    role: Role
    known: KnownPrefixes  # blocks of the prompts sent there
    why: str = "has not answered yet"
    down_since: float = 0.0  # while `why` is set, in seconds
    identity: ServerIdentity | None = None  # of a prefill server, by what it last told
    departure: Departure = Departure.STAYS
    hand_offs: HandOffs | None = None  # of a decode server, by its metrics
    unfinished: int = 0  # answers of requests that it has not answered in full
    sent: int = 0  # requests since the start

    @property
    def usable(self) -> bool:
        """Whether it gets requests."""
        return not self.why_not

    @property
    def why_not(self) -> str:
        """Why it gets no requests, empty where it does."""
        return self.why or self.departure.value
