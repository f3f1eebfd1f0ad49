"""Decode's ledger: its peers, the sessions with them, the unended grants of each, and the rooms that they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import Cause, RemoteProtocolError
from ...layout.layout import Component
from ...wire import Grant, Identity, Landed, Reach
from ..admission import Demand
from ..lease import Lease
from ..liveness import Lives
from ..room import DecodeRoom
from ..slot_allocator import Extents, Holding, end_of, slots_below, slots_of
from ..states import Word


class SessionState(Word):
    """A session on the decode side; only UP may be granted on."""

    OFFERING = "offering"  # the shell prepares the hand-over
    REGISTERING = "registering"
    UP = "up"
    SILENT = "silent"  # unheard of for silence_ms: nothing is granted, its leases are quarantined
    FENCING = "fencing"  # condemned: waits for the proof that its writer is quiet
    CLOSED = "closed"


class SessionEvent(Word):
    """What happens to a session."""

    OFFER = "offer"
    REGISTER = "register"
    SILENCE = "silence"
    HEAR = "hear"
    CONDEMN = "condemn"
    FENCE = "fence"


_S, _SE = SessionState, SessionEvent

SESSION: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (_S.OFFERING, _SE.OFFER): _S.REGISTERING,
    (_S.OFFERING, _SE.CONDEMN): _S.FENCING,
    (_S.REGISTERING, _SE.REGISTER): _S.UP,
    (_S.REGISTERING, _SE.CONDEMN): _S.FENCING,
    (_S.UP, _SE.SILENCE): _S.SILENT,
    (_S.UP, _SE.CONDEMN): _S.FENCING,
    (_S.SILENT, _SE.HEAR): _S.UP,
    (_S.SILENT, _SE.CONDEMN): _S.FENCING,
    (_S.SILENT, _SE.FENCE): _S.CLOSED,
    (_S.FENCING, _SE.FENCE): _S.CLOSED,
}

TimerKey: TypeAlias = tuple[str, str | int, int]
"""What is due: hello and alive of a peer, register and fence of a session, lease of a session's grant, room."""


@dataclass(slots=True, eq=False)
class LeaseEntry:
    """One grant as decode keeps it until a proof ends it; the room finds its leases, not they their room."""

    session: Session
    message: Grant
    holding: Holding
    deadline: float
    state: Lease = Lease.GRANTED
    granted: bool = False
    aborted: float = 0.0  # when Abort first went out
    repeat_ms: int = 0

    kv_bytes: int = field(init=False)  # what the writer has to write

    def __post_init__(self) -> None:
        components = self.session.components
        self.kv_bytes = sum([components[part.component].bytes_of(part.rows) for part in self.message.parts])

    def check(self, message: Landed) -> None:
        """RemoteProtocolError where the writer says something else than what was granted."""
        if message.kv_bytes != self.kv_bytes:
            raise RemoteProtocolError("Landed.kv_bytes", f"{message.kv_bytes}, the grant is {self.kv_bytes}")
        if message.aux and not self.message.send_aux:
            raise RemoteProtocolError("Landed.aux", f"{len(message.aux)} bytes, 0 from a rank that sends none")


@dataclass(slots=True, eq=False)
class Session:
    """One prefill rank's right to write. `leases` holds the unended grants, oldest first."""

    id: int
    peer: str
    components: tuple[Component, ...]  # what this rank sends: its share of the node's own
    places: tuple[int, ...]  # of each of them among the node's own
    window: int
    frame_bytes_max: int  # that its peer takes
    state: SessionState = SessionState.OFFERING
    reach: Reach | None = None
    bytes_ready: int = 0  # of the arena, as the writer has said
    hbm_direct: bool = False  # it writes HBM itself, and not the arena's range for it: as it has said, too
    next_grant: int = 1
    reserved: int = 0  # places in the window that queued rooms will take
    leases: dict[int, LeaseEntry] = field(default_factory=dict[int, LeaseEntry])
    repeat_ms: int = 0
    fence_ms: int = 0
    verdict: tuple[Cause, str] = Cause.PEER_LOST, ""  # why it was condemned

    def extents_of(self, holding: Holding) -> tuple[Extents, ...]:
        """Where the rows of its components go."""
        return tuple([holding.extents[place] for place in self.places])

    def covers(self, holding: Holding, arena_ready: int) -> bool:
        """Whether both sides have ready where the rows of its components go: the writer, and of the arena's first bytes
        this node, whose card may reach no others. Slots of HBM are leased before the range is ready where they land."""
        assert self.reach is not None
        ready = min(self.bytes_ready, arena_ready)
        return ready >= self.reach.arena_bytes or all(
            (self.hbm_direct and component.memory == "hbm") or end_of(extents) <= slots_below(component.layout, ready)
            for component, extents in zip(self.components, self.extents_of(holding), strict=True)
        )

    @property
    def whole(self) -> bool:
        """Whether its writer has all of the arena ready."""
        return self.reach is not None and self.bytes_ready == self.reach.arena_bytes

    @property
    def has_place(self) -> bool:
        """Whether one more grant would lie inside the window."""
        oldest = next(iter(self.leases), self.next_grant)
        return self.next_grant + self.reserved - oldest < self.window


@dataclass(slots=True, eq=False)
class Peer:
    """One dialled prefill rank."""

    name: str
    heard: float
    lives: Lives
    greeted: float = float("-inf")  # when Hello last went out
    welcomed: float = float("-inf")  # when it last answered one
    identity: Identity | None = None
    refusal: tuple[Cause, str] | None = None  # what its rooms fail with as long as it stands
    session: Session | None = None
    repeat_ms: int = 0
    quarantined_bytes: int = 0

    @property
    def up(self) -> Session | None:
        """The session that may be granted on, if there is one."""
        return self.session if self.session is not None and self.session.state is SessionState.UP else None


@dataclass(slots=True, eq=False)
class Room:
    """One request's hand-off on the decode side."""

    id: int
    tokens: int
    prefix: int  # tokens that do not cross: known from the start, or once the cache was looked at
    demand: Demand
    sources: tuple[str, ...]
    deadline: float
    enable_hisparse: bool
    state: DecodeRoom = DecodeRoom.CONNECTING
    places: dict[str, Session] = field(default_factory=dict[str, Session])  # reserved in windows, by source
    holding: Holding | None = None
    leases: list[LeaseEntry] = field(default_factory=list[LeaseEntry])
    aux: bytes = b""
    settling: int = 0  # grants that are being read back, or copied up

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Of its prompt's blocks."""
        return self.demand.keys

    def slots_of(self, components: Sequence[Component]) -> dict[str, NDArray[np.int64]]:
        """A slot for each row, growth included, by the component's name: each name is one of them, for this room."""
        assert self.holding is not None
        each = zip(components, self.holding.extents, self.demand.rows, strict=True)
        return {component.name: slots_of(extents, count=rows) for component, extents, rows in each if rows}

    def uses(self, session: Session) -> bool:
        """Whether an end of the session is one of the room."""
        granted = any(lease.session is session and lease.state is not Lease.ENDED for lease in self.leases)
        return granted or self.places.get(session.peer) is session

    def unreserve(self) -> None:
        """Leaves its places in the windows to others."""
        for session in self.places.values():
            session.reserved -= 1
        self.places.clear()
