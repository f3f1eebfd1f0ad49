"""The one effect that every core has: a message to a peer."""

from __future__ import annotations

from msgspec import Struct

from ..wire import Message


class Send(Struct, frozen=True):
    """Send `message` to `peer`: a dialled endpoint, or the authenticated name of a peer that dialled. It may be
    lost."""

    peer: str
    message: Message
