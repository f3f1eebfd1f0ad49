"""Places in a card's streams that one can ask about: what `after=` takes."""

from __future__ import annotations

from .card import Card


class Event:
    """A place in a stream that the card has passed, or not yet. One that was never recorded counts as passed."""

    __slots__ = ("_card", "_handle")

    def __init__(self, here: Card) -> None:
        self._card, self._handle = here, here.event()

    @property
    def cuda_event(self) -> int:
        """Its handle."""
        return int(self._handle)

    def record(self, stream: int) -> None:
        """Puts it behind all that is queued there so far, and nowhere else any more."""
        self._card.record(self._handle, stream)

    def query(self) -> bool:
        """Whether the card has passed it; returns at once. Raises WorldError where work before it failed."""
        return self._card.passed(self._handle)

    def wait(self) -> None:
        """Sleeps until the card has passed it; WorldError where work before it failed."""
        self._card.reach(self._handle)

    def hold(self, stream: int) -> None:
        """What is queued there from now on waits for it, on the card."""
        self._card.enter()
        self._card.follow(stream, self._handle)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._card.driver.cuEventDestroy(self._handle)  # one that fails has ended with its context
