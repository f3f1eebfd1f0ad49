"""What both sides of the adapter report to SGLang's schedulers of a request."""

from __future__ import annotations

from dataclasses import dataclass

from ...client.api import KVPoll


@dataclass(frozen=True, slots=True)
class Change:
    """A request, by its bootstrap_room, is in another state; `reason` is why it failed."""

    bootstrap_room: int
    state: KVPoll
    reason: str = ""
