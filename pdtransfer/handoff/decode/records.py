"""Decode's records: its peers, the sessions with them, the leases of each that have not ended, and the rooms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...errors import Cause, RemoteProtocolError
from ...layout.layout import Component
from ...wire import Grant, Identity, Landed, Reach, split_key
from ..admission import Demand
from ..liveness import Liveness
from ..slot_allocator import Extents, Holding, end_of, slots_below, slots_of
from ..states import DecodeRoom, Lease, SessionState


@dataclass(slots=True, eq=False)
class LeaseEntry:
    """The granted side of one Grant, until a proof ends it. A room knows its leases; a lease does not know its room."""

    session: SessionRecord
    message: Grant
    holding: Holding
    deadline: float
    state: Lease = Lease.GRANTED
    granted: bool = False
    aborted: float = 0.0  # when Abort was first sent
    detail: str = ""  # and why
    repeat_ms: int = 0

    kv_bytes: int = field(init=False)  # that the writer has to write

    def __post_init__(self) -> None:
        components = self.session.components
        self.kv_bytes = sum([components[part.component].bytes_of(part.rows) for part in self.message.parts])

    def check(self, message: Landed) -> None:
        """Raises RemoteProtocolError where Landed contradicts the Grant."""
        if message.kv_bytes != self.kv_bytes:
            raise RemoteProtocolError("Landed.kv_bytes", f"{message.kv_bytes}, the grant is {self.kv_bytes}")
        if message.aux and not self.message.send_aux:
            raise RemoteProtocolError("Landed.aux", f"{len(message.aux)} bytes, but the Grant does not ask for aux")


@dataclass(slots=True, eq=False)
class SessionRecord:
    """One prefill rank's right to write. `leases` holds the grants that have not ended, oldest first."""

    id: int
    peer: str
    components: tuple[Component, ...]  # that this rank sends: its share of the node's own
    component_indices: tuple[int, ...]  # of each of them among the node's own
    window: int
    frame_bytes_max: int  # that its peer accepts
    state: SessionState = SessionState.OFFERING
    reach: Reach | None = None
    bytes_ready: int = 0  # of the arena, as the writer reported
    hbm_direct: bool = False  # the writer reported (Registered) that it writes HBM directly
    next_grant: int = 1
    reserved: int = 0  # window slots that queued rooms will use
    leases: dict[int, LeaseEntry] = field(default_factory=dict[int, LeaseEntry])
    repeat_ms: int = 0
    fence_ms: int = 0
    verdict: tuple[Cause, str] = Cause.PEER_LOST, ""  # why it was condemned
    parted: bool = False  # its peer said Goodbye

    def extents_of(self, holding: Holding) -> tuple[Extents, ...]:
        """Where the rows of its components go."""
        return tuple([holding.extents[index] for index in self.component_indices])

    def covers(self, holding: Holding, arena_ready: int) -> bool:
        """Whether the writer and this node are both ready where the rows of its components go.

        `arena_ready`: how many of the arena's first bytes this node has ready; its GPU may reach no others. Slots of
        HBM may be leased before the arena's range for them is ready.
        """
        assert self.reach is not None
        ready = min(self.bytes_ready, arena_ready)
        return ready >= self.reach.arena_bytes or all(
            (self.hbm_direct and component.memory == "hbm") or end_of(extents) <= slots_below(component.layout, ready)
            for component, extents in zip(self.components, self.extents_of(holding), strict=True)
        )

    @property
    def whole(self) -> bool:
        """Whether its writer has the whole arena ready."""
        return self.reach is not None and self.bytes_ready == self.reach.arena_bytes

    @property
    def has_window_slot(self) -> bool:
        """Whether one more grant would lie inside the window."""
        oldest = next(iter(self.leases), self.next_grant)
        return self.next_grant + self.reserved - oldest < self.window


@dataclass(slots=True, eq=False)
class PeerRecord:
    """One prefill rank, by the endpoint that is dialled of those that lead to it."""

    name: str
    liveness: Liveness
    identity: Identity | None = None
    refusal: tuple[Cause, str] | None = None  # with which its rooms fail while it stands
    session: SessionRecord | None = None
    quarantined_bytes: int = 0

    @property
    def owner(self) -> str:
        """Who answers there: its key, or without keys its node's name; empty while that is unknown."""
        return split_key(self.name)[0] or (self.identity.node if self.identity is not None else "")

    @property
    def up(self) -> SessionRecord | None:
        """The session that may be granted on; None if there is none."""
        return self.session if self.session is not None and self.session.state is SessionState.UP else None


@dataclass(slots=True, eq=False)
class RoomRecord:
    """One request's hand-off on the decode side."""

    id: int
    tokens: int
    prefix: int  # tokens that do not cross; with keys, known once the cache was searched
    demand: Demand
    sources: tuple[str, ...]
    deadline: float
    enable_hisparse: bool
    leaders: tuple[str, ...] = ()  # whose groups the sources are; none where the caller named all sources
    first_rows: tuple[int, ...] = ()  # where the engine chose the slots: the first row of each component that has one
    state: DecodeRoom = DecodeRoom.CONNECTING
    reserved: dict[str, SessionRecord] = field(default_factory=dict[str, SessionRecord])  # window slots, by source
    holding: Holding | None = None
    leases: list[LeaseEntry] = field(default_factory=list[LeaseEntry])
    aux: bytes = b""
    post_landing_count: int = 0  # grants that are read back or copied to HBM

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys of its prompt's blocks."""
        return self.demand.keys

    def slots_of(self, components: Sequence[Component]) -> dict[str, NDArray[np.int64]]:
        """The slots of each component by name, one a row, growth included. A room has slots of one component of each
        name."""
        assert self.holding is not None
        parts = zip(components, self.holding.extents, self.demand.rows, strict=True)
        return {component.name: slots_of(extents, count=rows) for component, extents, rows in parts if rows}

    def uses(self, session: SessionRecord) -> bool:
        """Whether the room fails when the session does."""
        granted = any(lease.session is session and lease.state is not Lease.ENDED for lease in self.leases)
        return granted or self.reserved.get(session.peer) is session

    def rename(self, source: str, into: str) -> bool:
        """A source is known by another name from now on; returns True where that is a source already."""
        if source in self.sources and into in self.sources:
            return True
        self.sources = tuple([into if name == source else name for name in self.sources])
        self.leaders = tuple([into if name == source else name for name in self.leaders])
        return False

    def unreserve(self) -> None:
        """Gives its window slots back."""
        for session in self.reserved.values():
            session.reserved -= 1
        self.reserved.clear()
