"""A worker as its router knows it: connection, load, figures, status, and if two of them can work together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from .....handoff.liveness import Liveness
from .....limits import TOKENS_MAX, Limits
from .....wire import Identity, Load, WorkerFigures, split_key
from ...fleet.prefixes import KnownPrefixes
from ...fleet.roles import Departure, Role
from ...fleet.status import SlotsStatus, WorkerState, WorkerStatus

SAMPLES_MAX = 11  # one for each Pong: five seconds at the default of ping_ms

Total = Literal[
    "rooms_done", "rooms_failed", "tokens", "kv_bytes", "copy_us", "prefix_queried_tokens", "prefix_hit_tokens",
    "hot_hits", "hot_misses", "swapped_bytes",
]  # fmt: skip


class FigureWindow:
    """The figures of one process of a worker. Time is that process's own, so that no two clocks are compared."""

    def __init__(self) -> None:
        self._samples: deque[WorkerFigures] = deque(maxlen=SAMPLES_MAX)

    @property
    def latest(self) -> WorkerFigures | None:
        """The newest figures; None where the worker reported none."""
        return self._samples[-1] if self._samples else None

    def add(self, figures: WorkerFigures) -> None:
        """Takes the figures of a Pong. Those of an earlier moment, which came late, are dropped."""
        latest = self.latest
        if latest is None or figures.uptime_ms > latest.uptime_ms:
            self._samples.append(figures)

    def grown(self, total: Total) -> int | None:
        """By how much a total has grown within the window; None where that is not known."""
        if len(self._samples) < 2:
            return None
        grown: int = getattr(self._samples[-1], total) - getattr(self._samples[0], total)
        return grown if grown >= 0 else None

    def rate(self, total: Total) -> float | None:
        """By how much it grows in a second."""
        grown = self.grown(total)
        if grown is None:
            return None
        return grown * 1e3 / (self._samples[-1].uptime_ms - self._samples[0].uptime_ms)

    def share(self, part: Total, *whole: Total) -> float | None:
        """`part` of the sum of `whole`, from 0 to 1: within the window, or since the start where nothing of it grew
        in it; None where nothing has."""
        grown, rest = self.grown(part), [self.grown(field) for field in whole]
        if grown is not None and (total := sum(growth or 0 for growth in rest)):
            return min(1.0, grown / total)
        latest = self.latest
        total = sum(getattr(latest, field) for field in whole) if latest is not None else 0
        return min(1.0, getattr(latest, part) / total) if total else None


Model = tuple[str, bytes]  # name, and digest of the weights
NOT_ANSWERED = "has not answered yet"


@dataclass(slots=True, eq=False)
class Worker:
    """One dialled daemon. `rooms` holds the ids of the rooms that have not ended on it."""

    peer: str
    role: Role
    liveness: Liveness
    number: int  # its own while it is here: its bit in masks of workers
    known: KnownPrefixes  # prefixes of the prompts sent there
    identity: Identity | None = None
    load: Load | None = None
    ready_since: float = 0.0  # when its process reported so
    unusable: dict[str, str] = field(default_factory=dict[str, str])  # of decode: why, by endpoints of prefill ranks
    why: str = NOT_ANSWERED  # the reason why it is not connected, empty while it is
    departure: Departure = Departure.STAYS
    rooms: set[int] = field(default_factory=set[int])
    prompt_tokens: int = 0  # of its rooms
    promised: dict[int, int] = field(default_factory=dict[int, int])  # slots for rooms begun after its last Load
    computing: dict[int, int] = field(default_factory=dict[int, int])  # prompt tokens that decode has yet to compute
    full_until: float = 0.0  # from its last refusal as full
    sparse_full_until: float = 0.0  # the same, for rooms with HiSparse only
    figures: FigureWindow = field(default_factory=FigureWindow)  # of the process that is connected
    next_introduced: int = 0  # for a decode worker: the index of the next prefill rank to name in a Ping

    @property
    def name(self) -> str:
        """As the table of peers has it."""
        return self.peer

    @property
    def connected(self) -> bool:
        """True if it has answered Hello, and was not lost since; until then Hello repeats."""
        return not self.why

    @property
    def usable(self) -> bool:
        """True if it gets rooms."""
        ready = self.load is not None and self.load.ready and not self.load.draining
        return ready and self.connected and self.departure is Departure.STAYS

    @property
    def model(self) -> Model:
        """The model's name and its weights' digest; equal on both workers of a pair."""
        assert self.identity is not None
        return self.identity.model, self.identity.weights

    @property
    def context_tokens(self) -> int:
        """Tokens of a prompt and its answer at most; TOKENS_MAX where it reports no limit."""
        assert self.identity is not None
        return self.identity.context_tokens or TOKENS_MAX

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints for decode to dial, one for each rank. The leader's is the one that this router dials."""
        assert self.identity is not None
        return (self.peer, *(member.endpoint for member in self.identity.group[1:]))

    @property
    def names(self) -> tuple[str, ...]:
        """The peers that prefill must accept, one for each rank: by public key, or by node without keys."""
        assert self.identity is not None
        nodes = (self.identity.node, *(member.node for member in self.identity.group[1:]))
        return tuple(split_key(endpoint)[0] or node for endpoint, node in zip(self.endpoints, nodes, strict=True))

    @property
    def rest_max(self) -> int:
        """The tokens of a prompt that it may be asked to compute itself, by its Load."""
        return 0 if self.load is None else self.load.rest_max

    def loaded(self, load: Load) -> None:
        """A Load came: it shows all rooms that have begun."""
        self.load = load
        self.promised.clear()

    def slots_left(self, *, enable_hisparse: bool) -> int:
        """Free slots for requests of this kind, as far as known. Negative: the newest rooms will queue."""
        assert self.load is not None
        apart = enable_hisparse and self.load.sparse_slots_total > 0
        return (self.load.sparse_slots_free if apart else self.load.slots_free) - sum(self.promised.values())

    def mark_full(self, until: float, *, enable_hisparse: bool) -> None:
        """Marks it full until then. A decode worker that is full for HiSparse still accepts dense rooms."""
        if enable_hisparse and self.role == "decode":
            self.sparse_full_until = max(self.sparse_full_until, until)
        else:
            self.full_until = max(self.full_until, until)

    def full_ms(self, now: float, limits: Limits, *, enable_hisparse: bool) -> float:
        """Milliseconds until it accepts such a room, 0 for now. Rooms may wait for slots: only a full queue is full."""
        assert self.load is not None
        until = max(self.full_until, self.sparse_full_until) if enable_hisparse else self.full_until
        if now < until:
            return (until - now) * 1e3
        quarantined = 0 < self.load.slots_total <= self.load.slots_quarantined
        return 1e3 if quarantined or self.load.rooms_queued >= limits.queue_max else 0.0


def model_text(model: Model) -> str:
    """Returns a model's name with the start of its weights' digest, for people."""
    return f"{model[0]}/{model[1].hex()[:8]}"


def reasons(load: Load, workers: Iterable[Worker], since: float) -> dict[str, str]:
    """Why decode cannot use prefill ranks, by their endpoints. Only those that were ready before are meant. A prefill
    that has just started gets its time to be found, and meanwhile rooms of the two wait for their session."""
    late = {
        endpoint
        for worker in workers
        if worker.role == "prefill" and worker.connected and worker.ready_since > since
        for endpoint in worker.endpoints
    }
    return {unusable.endpoint: unusable.why for unusable in load.unusable if unusable.endpoint not in late}


def obstacle(prefill: Worker, decode: Worker) -> str:
    """Why rooms of these two usable workers of one model cannot land; empty where they can, as far as is known."""
    assert prefill.identity is not None
    assert decode.identity is not None
    names = f"{decode.identity.node} cannot use {prefill.identity.node}"
    for endpoint in prefill.endpoints if decode.unusable else ():
        if endpoint in decode.unusable:
            return f"{names}: {decode.unusable[endpoint]}"
    theirs, ours = prefill.identity.transports, decode.identity.transports
    if any(name in ours for name in theirs):
        return ""
    return f"{names}: transport: {', '.join(theirs)} there, {', '.join(ours)} here"


def worker_status(worker: Worker, why: str = "") -> WorkerStatus:
    """Returns what is known of a daemon. Of one that is not connected, only its name and the reason. `why` is a better
    one than its own."""
    load, figures, window = worker.load, worker.figures.latest, worker.figures
    kv_bytes_s = window.rate("kv_bytes")
    is_decode = worker.role == "decode"
    known: dict[str, Any] = {}
    if load is not None:
        slots = SlotsStatus(free=load.slots_free, total=load.slots_total, quarantined=load.slots_quarantined)
        known |= {"rooms_running": load.rooms_running, "rooms_queued": load.rooms_queued, "slots": slots}
        if load.sparse_slots_total:
            known["sparse_slots"] = SlotsStatus(free=load.sparse_slots_free, total=load.sparse_slots_total)
    if figures is not None:
        rooms, sessions = ({tally.name: tally.count for tally in of} for of in (figures.rooms, figures.sessions))
        known |= {"uptime_s": figures.uptime_ms / 1e3, "rooms": rooms, "sessions": sessions}
        names = ["rooms_done", "rooms_failed", "rooms_cancelled", "kv_bytes"]
        if is_decode:
            names.append("quarantined_bytes")
        if is_decode and load is not None and load.enable_hisparse:
            names += ["hisparse_running", "hisparse_waiting"]
            known["hot_hit_ratio"] = window.share("hot_hits", "hot_hits", "hot_misses")
        known |= {name: getattr(figures, name) for name in names}
    return WorkerStatus(
        role=worker.role,
        address=split_key(worker.peer)[1],
        node=None if worker.identity is None else worker.identity.node,
        model=None if worker.identity is None else model_text(worker.model),
        state=_state(worker, load),
        why=why or worker.why or worker.departure.value or None,
        leaves=worker.departure is Departure.LEAVES,
        rooms_here=len(worker.rooms),
        kv_gb_s=None if kv_bytes_s is None else kv_bytes_s / 1e9,
        tokens_s=window.rate("tokens"),
        prefix_hit_ratio=window.share("prefix_hit_tokens", "prefix_queried_tokens") if is_decode else None,
        **known,
    )


def _state(worker: Worker, load: Load | None) -> WorkerState:
    if not worker.connected:
        return "connecting"
    if load is None or not load.ready:
        return "starting"
    return "ready" if worker.usable else "draining"
