"""Mooncake's transport without one of its defences, on a host of kv_host: what the checkers there have to see."""

from __future__ import annotations

from collections.abc import Callable

from pdtransfer.transports.engines.arena import EngineArena
from pdtransfer.transports.engines.gather import RingJob
from pdtransfer.transports.engines.writer import EngineSession, EngineWriter


def fence_without_a_death() -> None:
    """Decode takes a session for quiet that it has revoked, and lets the engine live."""

    def revoke(self: EngineArena, session: int) -> None:
        if (offered := self._sessions.get(session)) is not None:
            offered.revoked = True

    def quiet(self: EngineArena, session: int) -> bool:
        offered = self._sessions.get(session)
        return offered is None or offered.revoked

    EngineArena.revoke = revoke
    EngineArena.quiet = quiet
    EngineArena.forget = lambda self, session: None  # its process is still spoken to


def unknown_is_failed() -> None:
    """Prefill says of a write whose end nobody knows that it has failed and is over, and of its dead engine nothing."""

    def died(self: EngineWriter, mapped: EngineSession) -> None:
        self._drop(mapped)

    _know_every_outcome()
    EngineWriter._died = died


def landed_when_submitted() -> None:
    """Prefill says that a write has landed once its engine has been told of all of it."""
    RingJob.over = lambda self, *, known: self.exhausted and not self.gathering
    _know_every_outcome()


def _know_every_outcome() -> None:
    fail = RingJob.fail
    RingJob.fail = lambda self, text, outcome: fail(self, text) if text else None


DEFENCES: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (fence_without_a_death, unknown_is_failed, landed_when_submitted)
}


def plant(name: str) -> None:
    """Takes that defence away, for the rest of this process's life."""
    DEFENCES[name]()
