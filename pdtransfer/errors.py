"""The tree of exceptions, split by blame: our caller's misuse, the peer's breach, the world's failure."""

from __future__ import annotations

from enum import StrEnum


class PDTransferError(Exception):
    """Every exception that this package raises on purpose."""


class LocalProtocolError(PDTransferError):
    """Our own caller asked for what may not be: a wrong page size, a cell twice, a push after finish."""


class LayoutMismatchError(LocalProtocolError):
    """Two layouts do not hold the same model; `differences` names each field with both values."""

    def __init__(self, differences: list[str]) -> None:
        super().__init__("layouts do not pair: " + "; ".join(differences))
        self.differences = differences


class ConfigError(LocalProtocolError):
    """A setting is missing, unknown or out of bounds; the text is one line that names it."""


class RemoteProtocolError(PDTransferError):
    """A peer broke the protocol; `field` names what was wrong with it."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")
        self.field = field


class WorldError(PDTransferError):
    """Neither side's fault: a peer died, a deadline passed, memory ran out."""


class ArenaFullError(WorldError):
    """No room for the request now; `retry_ms` says when it is worth asking again, None that it never is."""

    def __init__(self, text: str, *, retry_ms: int | None) -> None:
        super().__init__(text)
        self.retry_ms = retry_ms


class CapacityError(WorldError):
    """A request wants more of one resource of a device than there is; `retry_ms` as of ArenaFullError."""

    def __init__(self, resource: str, *, wanted: int, available: int, retry_ms: int | None = None) -> None:
        super().__init__(f"{resource}: {wanted} wanted, there are {available}")
        self.resource, self.wanted, self.available, self.retry_ms = resource, wanted, available, retry_ms


class TransportError(WorldError):
    """A transport could not map, reach or write its peer's memory."""


class Cause(StrEnum):
    """Why a room failed: its one root cause, on the wire as this string."""

    ABORTED = "aborted"
    DEADLINE = "deadline"
    PEER_LOST = "peer_lost"
    PEER_RESTARTED = "peer_restarted"
    BREACH = "breach"
    REFUSED = "refused"
    FULL = "full"
    TRANSFER = "transfer"
    ENGINE = "engine"
    SHUTDOWN = "shutdown"

    @classmethod
    def of(cls, word: str) -> Cause:
        """The cause that a peer names; a newer peer's word that we do not know counts as a failed transfer."""
        return next((cause for cause in cls if cause.value == word), cls.TRANSFER)


class RoomFailedError(WorldError):
    """A room ended without READY; `cause` is its root cause, `detail` says more to a person."""

    def __init__(self, room: int, cause: Cause, detail: str) -> None:
        super().__init__(f"room {room:#x} failed ({cause.value}): {detail}")
        self.room, self.cause, self.detail = room, cause, detail
