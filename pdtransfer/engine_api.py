"""What a daemon asks of an inference engine: pure steps on one thread; the daemon does all the talking.

`--engine module:attribute` names a factory `(EngineConfig) -> PrefillEngine | DecodeEngine`; `config.role` says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from .layout.layout import Component
from .limits import Limits
from .wire import Ranks, Sampling


class Group(Protocol):
    """The ranks that are one worker, as one of them sees them: each a process with an engine of its own.

    All ranks hear the same calls in the same order, step for step; `admit`, `cancel` and `free` must not communicate,
    and every rank must make the same calls of `gather` in the same order.
    """

    @property
    def ranks(self) -> Ranks: ...

    def gather(self, part: NDArray[Any]) -> list[NDArray[Any]]:
        """The parts of all tensor-parallel ranks of this stage, by tp_rank, this one's own included. They have one
        shape and dtype."""
        ...

    def hand_on(self, hidden: NDArray[np.float32]) -> None:
        """To this rank's place in the next stage of the pipeline; copied before this returns."""
        ...

    def take_over(self, hidden: NDArray[np.float32]) -> None:
        """Waits for what the stage before hands on; C-contiguous, of the same shape there."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The Group of a worker that is one process."""

    ranks: Ranks = field(default_factory=Ranks)

    def gather(self, part: NDArray[Any]) -> list[NDArray[Any]]:
        return [part]

    def hand_on(self, hidden: NDArray[np.float32]) -> None:  # noqa: ARG002
        raise AssertionError("a pipeline of one stage hands nothing on")

    def take_over(self, hidden: NDArray[np.float32]) -> None:  # noqa: ARG002
        raise AssertionError("a pipeline of one stage takes nothing over")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiSparse:
    """What a decode daemon has for requests whose whole KV stays in the arena, and the hot tokens on the device."""

    device_slots: int  # tokens that the device holds of all of them
    hot_tokens: int  # of one request, where it has more; at least what a step reads
    dense_slots: int = 0  # tokens of requests that do not want it, which are there whole
    policy: Literal["longest", "shortest", "newest"] = "longest"  # who makes room for those that wait
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class HotFigures:
    """How HiSparse requests fare; counts are since the engine began."""

    running: int = 0  # requests that have a place on the device
    waiting: int = 0  # that have landed and have none
    retry_ms: int = 0  # when it is worth asking again where too many wait
    hits: int = 0  # tokens that a step read and found on the device, of requests that do not fit there
    misses: int = 0
    swapped_bytes: int = 0  # brought from the arena, for misses
    preloaded_bytes: int = 0  # for requests that fit
    retracts: int = 0
    staging_copies: int = 0  # of prompts, by way of anything


class Spans(Protocol):
    """Hears where the time went; from any thread."""

    def __call__(
        self, lane: str, name: str, begin_s: float, end_s: float, *, room: int, layer: int = -1, byte_count: int = 0
    ) -> None:
        """`lane` did `name` between these seconds of CLOCK_MONOTONIC; `layer` is the first that it is about, if any."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a daemon's flags say to its engine; an engine ignores what it has no use for."""

    role: Literal["prefill", "decode"]
    attention: Literal["mla", "gqa"] = "mla"
    slots: int  # tokens that the pool (prefill) or the arena (decode) holds
    page_size: int  # tokens; a power of two
    host_layout: str = (
        "page_first"  # the pool's or arena's layout: layer_first, page_first, page_first_direct, page_head
    )
    chunk_tokens: int = 512  # prefill computes, and may offer, this many tokens at a time
    batch_max: int = 64  # requests in one decode step
    hisparse: HiSparse | None = None  # none: requests that want it do not come
    device: str = "cpu"
    options: dict[str, str] = field(default_factory=dict[str, str])  # --engine-option name=value
    group: Group = field(default_factory=Alone)
    spans: Spans | None = None  # none: no event of the device is timed


HBM_ALIGNMENT = 64 << 10  # of where HBM components begin in an arena: a page of any host


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCard:
    """What two engines must agree on, and the tables of what each holds.

    The bases of `components` are offsets into `PrefillEngine.pool`, whatever their memory; or on the decode side into
    one of its two memories: the arena's `memory_bytes` for those of "dram", `hbm_bytes` beside it for those of "hbm".
    A name that is there twice, once in each, has its rows in DRAM for a request that wants HiSparse, in HBM for others.

    In a group each rank's components have its own planes only; where n ranks hold the same rows of a component,
    `replicas` has it as {name: (which of them this is, n)}.
    """

    model: str
    weights: bytes  # digest; equal weights, equal digest
    components: tuple[Component, ...]
    memory_bytes: int
    hbm_bytes: int = 0
    eos: int | None = None
    replicas: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    @property
    def hbm_base(self) -> int:
        """Where in the arena the bytes of HBM components begin, behind all of DRAM's."""
        return -(-self.memory_bytes // HBM_ALIGNMENT) * HBM_ALIGNMENT

    @property
    def arena_bytes(self) -> int:
        """The arena's, of both memories."""
        return self.hbm_base + self.hbm_bytes if self.hbm_bytes else self.memory_bytes

    @property
    def arena_components(self) -> tuple[Component, ...]:
        """`components` as peers hear of them: every base is an offset into the arena."""
        return tuple(
            msgspec.structs.replace(each, layout=each.layout.rebase(self.hbm_base)) if each.memory == "hbm" else each
            for each in self.components
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMemory:
    """A pool in the memory of card `card` of this host, at the card's `address`, as long as its engine lives."""

    card: int
    address: int
    byte_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """A pool in memory that other processes may map: `view` is the bytes of the memfd `fd` from its first on, and both
    stay as long as the engine lives. What sends to other hosts reads it there, with no copy on the way."""

    fd: int
    view: memoryview


class Event(Protocol):
    """What `after=` takes: torch.cuda.Event, or anything that can be asked."""

    def query(self) -> bool:
        """Whether everything before it is done; returns at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One room's work. `prompt` is int64 token ids."""

    room: int  # a number of this worker's own, the same on all its ranks and never used again; not the router's label
    prompt: NDArray[np.int64]
    sampling: Sampling
    enable_hisparse: bool = False
    salt: bytes = b""  # rooms of different salts may share no prefix that an engine keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Prefill: rows [rows) of layers [layers) of one component are in the pool, once `after` has fired if there is one.

    `pages` names the pages of rows [0, rows[1]) in order: row r of the room is in slot
    pages[at // page_size] * page_size + at % page_size, where `at` is skip + r: a sliding window may begin within a
    page. Its row 0 is the first of the prompt's last tokens.
    """

    room: int
    component: str
    rows: tuple[int, int]
    layers: tuple[int, int]
    pages: NDArray[np.int64]
    after: Event | None = None
    skip: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """Prefill: all cells of the room were computed; `aux` is what decode needs to go on. In a pipeline only the last
    stage knows it, the others' is empty."""

    room: int
    aux: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Decode: the token at `index` (0 is the first generated one, which prefill picked)."""

    room: int
    index: int
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Decode: the room needs its slots no more. Digests of tokens, of their logits, of the KV by (position, plane)."""

    room: int
    reason: Literal["stop", "length"]
    tokens_digest: bytes = b""
    logits_digest: bytes = b""
    kv_digest: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Either: this request failed inside the engine; others go on."""

    room: int
    detail: str


class PrefillEngine(Protocol):
    """Prefill on one thread. Every method is called on the engine thread, `card` and `pool` from anywhere.

    An engine of either kind may have a method `warm_up()` besides: called first of all on that thread, before the
    daemon says that it is ready, to have made there what its first request would wait for. It must not communicate.
    """

    @property
    def card(self) -> EngineCard: ...

    @property
    def pool(self) -> memoryview | SharedMemory | CardMemory:
        """The pool's bytes in this process, in a memfd if others may read it, or where they are on a card; component
        bases are offsets into it."""
        ...

    def admit(self, request: Request) -> bool:
        """Takes the request if pages for its whole prompt are free, else returns False: ask again after `free`.
        Raises ValueError for one that can never fit or makes no sense."""
        ...

    def step(self) -> list[Computed | Prefilled | Broken]:
        """Computes one chunk; an empty list when there is nothing to do."""
        ...

    def cancel(self, room: int) -> None:
        """Stops computing; the pages stay until `free`. Unknown rooms are ignored."""
        ...

    def free(self, room: int) -> None:
        """The room's pages may be reused: nothing reads them any more."""
        ...

    @property
    def idle(self) -> bool:
        """Whether step() would do nothing."""
        ...


class DecodeEngine(Protocol):
    """Decode on one thread, out of the arena. Same threading as PrefillEngine."""

    @property
    def card(self) -> EngineCard: ...

    def attach(self, arena: memoryview, *, device_address: int = 0, hbm: memoryview | CardMemory | None = None) -> None:
        """The arena's bytes in this process, `card.memory_bytes` of them; called once, before the first admit. For an
        engine whose config names a card, `device_address` is where that card sees them; else it is not given.

        `hbm` is given where the card has HBM components: `card.hbm_bytes` of that card's memory, or without a card of
        this process's.
        """
        ...

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that this engine can never serve; cheap, called before slots are leased."""
        ...

    def admit(self, request: Request, slots: dict[str, NDArray[np.int64]], aux: bytes) -> None:
        """The room has landed: `slots` holds, per component, the int64 slot of each row, growth included
        (len(prompt) + max_tokens rows for a component with one token a row), in DRAM or in HBM, wherever the request
        has that component. No copy is made. The prompt's rows may
        be other rooms' as well: they are not to be written.
        Raises ValueError where aux is not what this engine's prefill side makes."""
        ...

    def step(self) -> list[Token | Finished | Broken]:
        """One decode step for up to batch_max rooms; after Finished or Broken it touches no slot of the room."""
        ...

    def cancel(self, room: int) -> None:
        """Drops the room at once: when this returns the engine touches no slot of it. Unknown rooms are ignored."""
        ...

    @property
    def figures(self) -> HotFigures:
        """Of the moment, from any thread. Asked only where `EngineConfig.hisparse` was given."""
        ...

    @property
    def idle(self) -> bool: ...
