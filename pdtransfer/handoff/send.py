"""The effects of every core that has peers: a message to one, and the report of one that does not fit."""

from __future__ import annotations

from msgspec import Struct

from ..wire import Message


class Send(Struct, frozen=True):
    """Send `message` to `peer`: a dialled endpoint, or the authenticated name of a peer that dialled. It may be
    lost."""

    peer: str
    message: Message


class PeerRefused(Struct, frozen=True):
    """The peer and this node cannot work together; `detail` names each field with both values."""

    peer: str
    detail: str
