"""Carries the KV cache of a prefill worker straight into a decode worker's host DRAM.

Every name that an engine needs to embed a client is importable from here. `pdtransfer.client`, where they come from, is
loaded at the first use of one, so that `import pdtransfer` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "C4_PARTS",
    "DSA_INDEX_PARTS",
    "HOST_LAYOUTS",
    "ITEM_LAYOUTS",
    "Address",
    "AllowList",
    "ArenaFullError",
    "ArenaMemory",
    "ArenaOptions",
    "AsyncDecode",
    "AsyncPrefill",
    "BusLimits",
    "CapacityError",
    "CardMemory",
    "Cause",
    "Component",
    "ConfigError",
    "DecodeClient",
    "DecodeEvent",
    "DecodeRoomHandle",
    "Endpoint",
    "Event",
    "Hbm",
    "KVPoll",
    "KeyPair",
    "Layout",
    "LayoutMismatchError",
    "Limits",
    "LocalProtocolError",
    "Mapping",
    "Member",
    "Network",
    "NodeSettings",
    "PDTransferError",
    "PagePart",
    "Plane",
    "PrefillClient",
    "PrefillEvent",
    "PrefillRoomHandle",
    "Ranks",
    "RemoteProtocolError",
    "Replicas",
    "RoomAsked",
    "RoomDrained",
    "RoomFailed",
    "RoomFailedError",
    "RoomLanded",
    "RoomLeased",
    "RoomReady",
    "Span",
    "Transport",
    "TransportError",
    "WorldError",
    "WriterOptions",
    "__version__",
    "allocate",
    "deepseek_v4",
    "host_layout",
    "item_layout",
    "room_id",
    "strided_layout",
    "weights_digest",
]

if TYPE_CHECKING:
    from .client import *
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import client

        return globals().setdefault(name, getattr(client, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
