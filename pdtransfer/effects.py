"""What sessions and services ask of the shell around them; the shell performs effects in order and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from .wire import Message


@dataclass(frozen=True, slots=True)
class Send:
    """Hand `message` to `peer`: the endpoint that was dialled, or the authenticated name of who dialled. May be lost."""

    peer: str
    message: Message
