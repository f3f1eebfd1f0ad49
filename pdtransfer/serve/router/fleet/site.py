"""Where a fleet's workers come and go: what a router's backend offers to code that changes the fleet."""

from __future__ import annotations

from typing import Protocol

from .roles import Role
from .status import WorkerStatus


class WorkerSite(Protocol):
    """A router that takes workers in and lets them go. Addresses are as in --prefill and --decode."""

    def roles(self) -> dict[str, Role]:
        """The workers that are here, by address."""
        ...

    def add_worker(self, role: Role, address: str) -> None:
        """Takes a worker in, or keeps one that was drained or removed. Raises ConfigError and WorldError."""
        ...

    def drain_worker(self, address: str) -> None:
        """Gives a worker nothing new."""
        ...

    def remove_worker(self, address: str) -> None:
        """Gives a worker nothing new, and forgets it once all of it has ended."""
        ...

    def workers_status(self) -> list[WorkerStatus]:
        """What is known of each worker."""
        ...
