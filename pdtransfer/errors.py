"""Exceptions, by who caused them: the caller, a peer or the world. docs/troubleshooting.md has what to do."""

from __future__ import annotations

from enum import StrEnum


class PDTransferError(Exception):
    """Base class of every exception that this package raises on purpose."""


class LocalProtocolError(PDTransferError):
    """The caller asked for something invalid: a wrong page size, a cell twice, a push after finish."""


class LayoutMismatchError(LocalProtocolError):
    """Two layouts hold different models; `differences` names each field with both values."""

    def __init__(self, differences: list[str]) -> None:
        super().__init__("layouts do not pair: " + "; ".join(differences))
        self.differences = differences


class ConfigError(LocalProtocolError):
    """A setting is missing, unknown or out of bounds; the text is one line that names it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.add_note("What it means, and what to do: pdtransfer's docs/troubleshooting.md")  # of a traceback


_EXTRAS = {
    **dict.fromkeys(("aiohttp", "cyclopts", "prometheus_client", "pythonjsonlogger", "rich"), "daemons"),
    "torch": "transformers", "cuda": "cuda", "mooncake": "mooncake", "opentelemetry": "otel", "dns": "dns",
}  # fmt: skip


def missing_extra(error: BaseException) -> ConfigError | None:
    """The error for an import that lacks an optional package, with the command to install it; None for any other."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    name = (error.name or "").partition(".")[0]
    if name == "pdtransfer_lab":
        return ConfigError("comes with pdtransfer-lab: pip install ./lab")
    return ConfigError(f"{name} is not installed: pip install '.[{_EXTRAS[name]}]'") if name in _EXTRAS else None


class RemoteProtocolError(PDTransferError):
    """A peer broke the protocol; `field` names the offending field."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")
        self.field = field


class WorldError(PDTransferError):
    """Neither side's fault: a peer died, a deadline passed, memory ran out."""


class ArenaFullError(WorldError):
    """There is no room for the request now. `retry_ms` is when to try again; None means never."""

    def __init__(self, text: str, *, retry_ms: int | None) -> None:
        super().__init__(text)
        self.retry_ms = retry_ms


class CapacityError(WorldError):
    """A request needs more of one resource of a device than exists; `retry_ms` as in ArenaFullError."""

    def __init__(self, resource: str, *, wanted: int, available: int, retry_ms: int | None = None) -> None:
        super().__init__(f"{resource}: {wanted} wanted, {available} available")
        self.resource, self.wanted, self.available, self.retry_ms = resource, wanted, available, retry_ms


class TransportError(WorldError):
    """A transport could not map, reach or write its peer's memory."""


class Cause(StrEnum):
    """The root cause of a room's failure; on the wire as this string."""

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
    def of(cls, word: str, otherwise: Cause | None = None) -> Cause:
        """Returns the cause that a peer names, or `otherwise` for an unknown word of a newer peer. By default that
        counts as a failed transfer."""
        return next((cause for cause in cls if cause.value == word), otherwise or cls.TRANSFER)


class RoomFailedError(WorldError):
    """A room ended before READY; `cause` is its root cause, `detail` is for people."""

    def __init__(self, room: int, cause: Cause, detail: str) -> None:
        super().__init__(f"room {room:016x} failed ({cause.value}): {detail}")
        self.room, self.cause, self.detail = room, cause, detail


SUCCESSES = frozenset({"stop", "length", "done"})  # reasons of End that are no failure
