"""What a daemon needs of an inference engine: plain calls on one thread. The daemon does all the communication.

`--engine module:attribute` names a factory `(EngineConfig) -> PrefillEngine | DecodeEngine`; `config.role` selects
which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..handoff.events import Event, Spans
from ..hisparse.settings import HiSparse, HotFigures
from ..layout.engine_pools import GpuMemory, SharedMemory
from ..layout.layout import Component
from ..wire import Logprobs, Ranks, Sampling


class Group(Protocol):
    """The ranks of one worker, as one rank sees them. Each rank is a process with an engine of its own.

    All ranks get the same calls in the same order, step by step. `admit`, `cancel` and `free` must not communicate.
    Every rank must make the same calls of `gather` in the same order.
    """

    @property
    def ranks(self) -> Ranks: ...

    def gather(self, part: NDArray[Any]) -> list[NDArray[Any]]:
        """Returns the parts of all tensor-parallel ranks of this stage in the order of tp_rank, this rank's own
        included. All parts have the same shape and dtype."""
        ...

    def hand_on(self, hidden: NDArray[np.float32]) -> None:
        """Sends to this rank's peer in the next stage of the pipeline; copied before this returns."""
        ...

    def take_over(self, hidden: NDArray[np.float32]) -> None:
        """Waits for the result of the stage before and copies it into `hidden`, C-contiguous and of its shape."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The Group of a worker with one process."""

    ranks: Ranks = field(default_factory=Ranks)

    def gather(self, part: NDArray[Any]) -> list[NDArray[Any]]:
        return [part]

    def hand_on(self, hidden: NDArray[np.float32]) -> None:  # noqa: ARG002
        raise AssertionError("a pipeline of one stage hands nothing on")

    def take_over(self, hidden: NDArray[np.float32]) -> None:  # noqa: ARG002
        raise AssertionError("a pipeline of one stage takes nothing over")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """A daemon's flags for its engine; an engine ignores what it does not use."""

    role: Literal["prefill", "decode"]
    slots: int  # tokens in the pool (prefill) or the arena (decode)
    page_size: int  # tokens; a power of two
    host_layout: str = (
        "page_first"  # the pool's or arena's layout: layer_first, page_first, page_first_direct, page_head
    )
    chunk_tokens: int = 512  # tokens that prefill computes, and may offer, at a time
    batch_max: int = 64  # requests in one decode step
    hisparse: HiSparse | None = None  # None: no HiSparse request comes
    device: str = "cpu"
    options: dict[str, str] = field(default_factory=dict[str, str])  # --engine-option name=value
    group: Group = field(default_factory=Alone)
    spans: Spans | None = None  # None: no device event is timed

    def context_tokens(self, model: int) -> int:
        """Tokens of a prompt and its answer at most, with a model of `model` positions. Decode has a slot for each of
        them. So has prefill, though the answer alone needs none there: a resumed answer is part of a prompt."""
        return min(model, max(self.slots, 0 if self.hisparse is None else self.hisparse.dense_slots))


HBM_ALIGNMENT = 64 << 10  # alignment of HBM components in an arena: the largest page of any host


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What two engines must agree on, and the layout of each component.

    On prefill, the bases of `components` are offsets into `PrefillEngine.pool`. On decode, they are offsets into one of
    two memories: the arena's `memory_bytes` for "dram" components, `hbm_bytes` beside it for "hbm" ones. A name may
    stand once in each memory: HiSparse requests have their rows in DRAM, others in HBM.

    In a group, each rank's components have its own planes only. Where n ranks hold the same rows of a component,
    `replicas` maps its name to (index of this rank, n).
    """

    model: str
    weights: bytes  # digest of the weights: equal weights have an equal digest
    components: tuple[Component, ...]
    memory_bytes: int
    hbm_bytes: int = 0
    eos: int | None = None
    context_tokens: int = 0  # of a prompt and its answer at most, by the model and the memory; 0: not known
    full_sampling: bool = False  # whether it follows every field of Sampling, as `pdtransfer.serve.sampling.pick` does
    replicas: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    @property
    def hbm_base(self) -> int:
        """The offset where HBM components begin, after all DRAM components: in the arena, or of a GPU's memory."""
        return -(-self.memory_bytes // HBM_ALIGNMENT) * HBM_ALIGNMENT

    @property
    def arena_bytes(self) -> int:
        """Size of an arena that holds both memories, as without a GPU."""
        return self.hbm_base + self.hbm_bytes if self.hbm_bytes else self.memory_bytes

    @property
    def arena_components(self) -> tuple[Component, ...]:
        """`components` as peers get them: every base is an offset into the arena."""
        return tuple(
            msgspec.structs.replace(component, layout=component.layout.rebase(self.hbm_base))
            if component.memory == "hbm"
            else component
            for component in self.components
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """The work of one room. `prompt` holds token ids, int64 (n,)."""

    room: int  # a local id: the same on all ranks of the worker, never used again, not the room id of the router
    prompt: NDArray[np.int64]
    sampling: Sampling
    enable_hisparse: bool = False
    salt: bytes = b""  # rooms with different salts must not share a prefix that an engine keeps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computed:
    """Prefill: rows [rows) of layers [layers) of one component are in the pool, after the event `after` if one is
    given.

    `pages` holds the page indices of rows [0, rows[1]) in order. Row r of the room is in slot pages[at // page_size] *
    page_size + at % page_size. There `at` is skip + r, since a sliding window may begin inside a page. Row 0 of a
    window is the first of the prompt's last tokens.
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
    """Prefill: all cells of the room were reported. `aux` is what decode needs to continue; in a pipeline it is empty
    on all stages but the last. `first` is the token in it, which a router may pass on before decode does; an engine may
    leave it out."""

    room: int
    aux: bytes
    first: Token | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Decode: the token at `index`. Index 0 is the first generated token, which prefill picked; what decode reports of
    it travels in `aux`. `logprobs` are there where the request asks for them."""

    room: int
    index: int
    id: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Decode: the room needs its slots no more. Digests cover the tokens, their logits, and the KV by (position,
    plane)."""

    room: int
    reason: Literal["stop", "length"]
    tokens_digest: bytes = b""
    logits_digest: bytes = b""
    kv_digest: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Prefill or decode: this request failed inside the engine; other requests continue."""

    room: int
    detail: str


class PrefillEngine(Protocol):
    """Prefill on one thread. Every method is called on the engine thread; `description` and `pool` are read from any
    thread.

    An engine whose step takes long may be a ReportsEarly as well.

    An engine of either kind may have a method `warm_up()`. It is called first on that thread, before the daemon reports
    ready, so that the first request does not pay for one-time work. It must not communicate.
    """

    @property
    def description(self) -> EngineDescription: ...

    @property
    def pool(self) -> memoryview | SharedMemory | GpuMemory:
        """The pool's memory: bytes of this process, a memfd if other processes may map it, or a GPU's memory.
        Component bases are offsets into it."""
        ...

    def admit(self, request: Request) -> bool:
        """Takes the request if pages for its whole prompt are free; else returns False, to be tried again after `free`.
        Raises ValueError for a request that can never fit or is invalid."""
        ...

    def step(self) -> list[Computed | Prefilled | Broken]:
        """Computes one chunk; returns an empty list if there is nothing to do."""
        ...

    def cancel(self, room: int) -> None:
        """Stops computing the room; its pages stay taken until `free`. Unknown rooms are ignored."""
        ...

    def free(self, room: int) -> None:
        """The room's pages may be reused: nothing reads them any more."""
        ...

    @property
    def idle(self) -> bool:
        """True if step() would do nothing."""
        ...


@runtime_checkable
class ReportsEarly(Protocol):
    """A prefill engine whose step takes long: what it would return it passes to `report`, in order, as soon as it is
    queued on the GPU or known. The daemon sets `report` before the first step; while it is None step() returns all."""

    report: Callable[[list[Computed | Prefilled | Broken]], None] | None


class DecodeEngine(Protocol):
    """Decode on one thread, reading KV from the arena. Threads as in PrefillEngine."""

    @property
    def description(self) -> EngineDescription: ...

    def attach(self, arena: memoryview, *, device_address: int = 0, hbm: memoryview | GpuMemory | None = None) -> None:
        """Takes the arena: `description.memory_bytes` bytes of this process. Called once, before the first admit. For
        an engine whose config names a GPU, `device_address` is the arena's address there.

        `hbm` is given if the description has HBM components: `description.hbm_bytes` of that GPU's memory, or of this
        process's memory without a GPU.
        """
        ...

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that this engine can never serve. Cheap: called before slots are leased."""
        ...

    def admit(self, request: Request, slots: dict[str, NDArray[np.int64]], aux: bytes) -> None:
        """The room has landed. `slots` maps each component to the int64 slot of each row, growth included: len(prompt)
        + max_tokens rows for a component with one token a row. The rows are in DRAM or HBM, wherever the request has
        that component; nothing is copied. Rows of the prompt may be shared with other rooms and must not be written.
        Raises ValueError if `aux` is not what this engine's prefill side makes."""
        ...

    def step(self) -> list[Token | Finished | Broken]:
        """Runs one decode step for up to batch_max rooms. After Finished or Broken it touches no slot of the room."""
        ...

    def cancel(self, room: int) -> None:
        """Drops the room. After the return the engine touches none of its slots. Unknown rooms are ignored."""
        ...

    @property
    def figures(self) -> HotFigures:
        """The current figures, from any thread; called only if `EngineConfig.hisparse` was given."""
        ...

    @property
    def idle(self) -> bool: ...


@runtime_checkable
class ComputesRests(Protocol):
    """A decode engine that can compute the rest of a prompt whose beginning is in the arena, as prefill would.

    When it has returned the Token of an index, the rows of all tokens before that one are in the room's slots. So the
    blocks of an answer are shared as those of a prompt are, and the next turn of a chat is computed from them.
    """

    @property
    def computes_rests(self) -> bool:
        """True if it can compute the rest of a prompt with its model and memory. Read once, from any thread."""
        ...

    def admit_rest(self, request: Request, slots: dict[str, NDArray[np.int64]], done: int) -> None:
        """As `DecodeEngine.admit`, of a room whose first `done` tokens have their rows in their slots, at least one
        less than the prompt has. The engine writes those of the others, and picks the first token itself. Between two
        steps nothing of it is written, so that `cancel` may end it. `done` is the same on all ranks of a worker."""
        ...
