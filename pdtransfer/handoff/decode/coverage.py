"""Whether the sources of a room send every plane of it, each exactly once: reckoned once for each set of sessions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...layout.layout import Component
from ..sharing import uncovered
from .records import Session


class Coverage:
    """What is known of the latest `kept_max` sets of sessions of one decode rank of `components`."""

    def __init__(self, components: Sequence[Component], kept_max: int) -> None:
        self._components, self._kept_max = components, kept_max
        self._known: dict[tuple[int, ...], str] = {}  # by ids, which no later session has again

    def gap(self, sessions: Iterable[Session]) -> str:
        """Empty where they cover the room, else a line that says what does not."""
        sessions = tuple(sessions)
        key = tuple([session.id for session in sessions])
        text = self._known.get(key)
        if text is None:
            text = uncovered(self._components, {session.peer: session.components for session in sessions})
            if len(self._known) >= self._kept_max:
                del self._known[next(iter(self._known))]
            self._known[key] = text
        return text
