"""A client of either role that only reports: adapters poll it, and take what the test gives it for events."""

from __future__ import annotations

from typing import Any


class PolledClient:
    """A client whose events the test chooses."""

    copied_up_bytes = 0

    def __init__(self) -> None:
        self.events: list[Any] = []

    def open(self, *_: Any, **__: Any) -> None:
        """Takes the room, as prefill."""

    def expect(self, *_: Any, **__: Any) -> None:
        """Takes the room, as decode."""

    def poll(self) -> list[Any]:
        events, self.events = self.events, []
        return events
