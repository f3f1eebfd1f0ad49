"""An HTTP server of vLLM or SGLang as its router knows it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from .prefixes import KnownPrefixes
from .roles import Departure, Role

# How decode reaches a prefill server's KV: fields that are equal for all requests of one process.
ServerIdentity: TypeAlias = dict[str, object]

RANK_HEADER = "X-data-parallel-rank"  # vLLM's: which of a server's engines gets a request


@dataclass(frozen=True, slots=True)
class HandOffs:
    """Hand-offs of a decode server since its start, of all ranks together."""

    received: int = 0
    computed: int = 0  # their prompt was computed there
    kv_bytes: int = 0
    refusals: tuple[str, ...] = ()  # its facts, name=value, in which prefill engines differ


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests that a decode server has no memory for now, of all ranks together, and what they wait for."""

    requests: int = 0
    why: str = ""

    def __str__(self) -> str:
        return f"{self.requests} requests wait for its memory: {self.why}"


@dataclass(slots=True, eq=False)
class Server:
    """One server, or one data parallel rank of it: an engine with a cache of its own behind the same URL. `why` is the
    reason why it gets no requests, empty while it is healthy."""

    url: str
    role: Role
    known: KnownPrefixes  # blocks of the prompts sent there
    why: str = "has not answered yet"
    down_since: float = 0.0  # while `why` is set, in seconds
    identity: ServerIdentity | None = None  # of a prefill server, by what it last reported
    departure: Departure = Departure.STAYS
    hand_offs: HandOffs | None = None  # of a decode server, by its metrics
    waiting: Waiting | None = None  # of a decode server, by what it last reported
    waits_seen: int = 0  # times in a row that some request waited
    longest: int | None = None  # tokens of a prompt and its answer that it takes, where it reports them
    is_shorter: bool = False  # whether another server of its role takes more
    unfinished: int = 0  # answers of requests that it has not answered in full
    sent: int = 0  # requests since the start
    computing: int = 0  # tokens of prompts that a decode server computes itself, up to its first tokens
    # Of a decode server: whether its chats of a kind begin as those of a prefill engine do (early_token.py).
    begins_alike: dict[tuple[object, bytes], bool] = field(default_factory=dict[tuple[object, bytes], bool])
    twin: Server | None = None  # the same server in its other role
    rank: int | None = None  # None where the server has only one
    gone: bool = False  # a rank that the server had, and has no more

    @property
    def name(self) -> str:
        """For people."""
        return self.url if self.rank is None else f"{self.url} (rank {self.rank})"

    @property
    def headers(self) -> dict[str, str]:
        """What a request for it has, so that this engine gets it."""
        return {} if self.rank is None else {RANK_HEADER: str(self.rank)}

    @property
    def load(self) -> int:
        """Open answers, in both roles."""
        return self.unfinished + (0 if self.twin is None else self.twin.unfinished)

    @property
    def usable(self) -> bool:
        """Whether it gets requests."""
        return not self.why_not

    @property
    def why_not(self) -> str:
        """Why it gets no requests, empty where it does."""
        return self.why or self.departure.value
