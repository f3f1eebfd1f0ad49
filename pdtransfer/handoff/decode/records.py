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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoomPiece:
    """Tokens [prefix, stop) of a room, which one Grant asks of a source."""

    prefix: int
    stop: int
    first_rows: tuple[int, ...]  # of each of the node's components: the row of the first slot in the extents below
    staged: Holding | None = None  # slots of the staging buffer, in place of the room's own in HBM


@dataclass(slots=True, eq=False)
class LeaseEntry:
    """The granted side of one Grant, until a proof ends it. A room knows its leases; a lease does not know its room."""

    session: SessionRecord
    message: Grant
    holding: Holding
    deadline: float
    staged: Holding | None = None  # slots of the staging buffer, in place of those in HBM
    state: Lease = Lease.GRANTED
    confirmed: bool = False  # Granted has come
    aborted: float = 0.0  # when Abort was first sent
    detail: str = ""  # and why
    repeat_ms: int = 0

    kv_bytes: int = field(init=False)  # that the writer has to write

    def __post_init__(self) -> None:
        components = self.session.components
        self.kv_bytes = sum([components[part.component].bytes_of(part.rows) for part in self.message.parts])

    def claim(self) -> None:
        """Adds a claim on its slots."""
        self.holding.claims += 1
        if self.staged is not None:
            self.staged.claims += 1

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
    landing: tuple[Component, ...]  # as a writer that does not reach HBM writes them; the same object where that is so
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

    @property
    def stages(self) -> bool:
        """True if rows of HBM components land in the staging buffer. Not known before its writer has the arena."""
        return not self.hbm_direct and self.landing is not self.components

    def stages_rows_of(self, holding: Holding) -> bool:
        """True if some rows of a room with these slots land in the staging buffer."""
        parts = zip(self.components, self.extents_of(holding), strict=True)
        return self.stages and any(component.memory == "hbm" and len(extents) for component, extents in parts)

    @property
    def targets(self) -> tuple[Component, ...]:
        """Its components where their rows land."""
        return self.landing if self.stages else self.components

    def extents_of(self, holding: Holding, staged: Holding | None = None) -> tuple[Extents, ...]:
        """The slots of its components, those in HBM of the staging buffer where `staged` has some."""
        parts = zip(self.component_indices, self.components, strict=True)
        return tuple(
            [
                (staged if staged is not None and component.memory == "hbm" else holding).extents[index]
                for index, component in parts
            ]
        )

    def covers(self, lease: LeaseEntry, arena_ready: int) -> bool:
        """True if the writer and this node are both ready where the rows of its components go.

        `arena_ready`: how many of the arena's first bytes this node has ready; its GPU may reach no others. Slots of
        the staging buffer may be leased before the writer has it ready.
        """
        assert self.reach is not None
        ready = min(self.bytes_ready, arena_ready)
        return ready >= self.reach.arena_bytes or all(
            (self.hbm_direct and component.memory == "hbm") or end_of(extents) <= slots_below(component.layout, ready)
            for component, extents in zip(self.targets, self.extents_of(lease.holding, lease.staged), strict=True)
        )

    @property
    def whole(self) -> bool:
        """True if its writer has the whole arena ready."""
        return self.reach is not None and self.bytes_ready == self.reach.arena_bytes

    @property
    def has_window_slot(self) -> bool:
        """True if one more grant would lie inside the window."""
        return len(self.leases) + self.reserved < self.window


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
    prefix: int  # tokens that are not sent; with keys, known once the cache was searched
    demand: Demand
    sources: tuple[str, ...]
    deadline: float
    enable_hisparse: bool
    leaders: tuple[str, ...] = ()  # whose groups the sources are; none where the caller named all sources
    first_rows: tuple[int, ...] = ()  # where the engine chose the slots: the first row of each component that has one
    rest_max: int = 0  # without sources: the tokens at most that the engine computes itself
    state: DecodeRoom = DecodeRoom.CONNECTING
    reserved: dict[str, SessionRecord] = field(default_factory=dict[str, SessionRecord])  # window slots, by source
    holding: Holding | None = None
    leases: list[LeaseEntry] = field(default_factory=list[LeaseEntry])
    staged: tuple[SessionRecord, ...] = ()  # that have further pieces to send, through the staging buffer
    stop: int = 0  # tokens of which these have had their Grants
    aux: bytes = b""
    post_landing_count: int = 0  # grants that are read back or copied to HBM

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys of its prompt's blocks."""
        return self.demand.keys

    @property
    def whole(self) -> RoomPiece:
        """All of it in one piece, in its own slots."""
        assert self.holding is not None
        first_rows = self.first_rows or (0,) * len(self.holding.extents)
        return RoomPiece(prefix=self.prefix, stop=self.tokens, first_rows=first_rows)

    def slots_of(self, components: Sequence[Component]) -> dict[str, NDArray[np.int64]]:
        """The slots of each component by name, one a row, growth included. A room has slots of one component of each
        name."""
        assert self.holding is not None
        parts = zip(components, self.holding.extents, self.demand.rows, strict=True)
        return {component.name: slots_of(extents, count=rows) for component, extents, rows in parts if rows}

    def uses(self, session: SessionRecord) -> bool:
        """True if the room fails when the session does."""
        granted = any(lease.session is session and lease.state is not Lease.ENDED for lease in self.leases)
        return granted or session in self.staged or self.reserved.get(session.peer) is session

    def rename(self, source: str, into: str) -> bool:
        """A source is known by another name from now on; returns True where that is a source already."""
        if source in self.sources and into in self.sources:
            return True
        self.sources = tuple([into if name == source else name for name in self.sources])
        self.leaders = tuple([into if name == source else name for name in self.leaders])
        return False

    def reserve(self, session: SessionRecord) -> None:
        """Takes a slot of a session's window."""
        session.reserved += 1
        self.reserved[session.peer] = session

    def unreserve(self) -> None:
        """Gives its window slots back."""
        for session in self.reserved.values():
            session.reserved -= 1
        self.reserved.clear()
