"""What an inference engine embeds: a client for prefill, a client for decode, and every name that their calls take.

A prefill rank opens a room, pushes its KV as it is computed, and finishes the room. A decode rank expects the room, and
reads its slots once the room is ready. `AsyncPrefill` and `AsyncDecode` wrap both clients for asyncio. The same names
are importable from `pdtransfer`; examples/embed.py lands a room with them. No import of this package needs torch.
"""

from __future__ import annotations

from ..bus.keys import Address, AllowList, Endpoint, KeyPair
from ..bus.limits import BusLimits
from ..errors import (
    ArenaFullError,
    CapacityError,
    Cause,
    ConfigError,
    LayoutMismatchError,
    LocalProtocolError,
    PDTransferError,
    RemoteProtocolError,
    RoomFailedError,
    TransportError,
    WorldError,
)
from ..handoff.effects import (
    DecodeEvent,
    PrefillEvent,
    RoomAsked,
    RoomDrained,
    RoomFailed,
    RoomLanded,
    RoomLeased,
    RoomReady,
)
from ..handoff.events import Event
from ..handoff.sharing import Replicas
from ..layout.deepseek_v4 import deepseek_v4
from ..layout.engine_pools import GpuMemory
from ..layout.layout import Component, Layout, Plane, Span
from ..layout.layout_builders import (
    C4_PARTS,
    DSA_INDEX_PARTS,
    HOST_LAYOUTS,
    ITEM_LAYOUTS,
    PagePart,
    host_layout,
    item_layout,
    strided_layout,
)
from ..limits import Limits
from ..memory.arena_memory import ArenaMemory
from ..memory.hbm import Hbm
from ..memory.mapping import Mapping, allocate
from ..transports.base import Transport
from ..transports.options import ArenaOptions, Network, WriterOptions
from ..wire import Member, Ranks
from .aio import AsyncDecode, AsyncPrefill, DecodeRoomHandle, PrefillRoomHandle
from .clients import DecodeClient, KVPoll, PrefillClient
from .labels import room_id, weights_digest
from .settings import NodeSettings

__all__ = [
    "C4_PARTS", "DSA_INDEX_PARTS", "HOST_LAYOUTS", "ITEM_LAYOUTS", "Address", "AllowList", "ArenaFullError",
    "ArenaMemory", "ArenaOptions", "AsyncDecode", "AsyncPrefill", "BusLimits", "CapacityError", "Cause", "Component",
    "ConfigError", "DecodeClient", "DecodeEvent", "DecodeRoomHandle", "Endpoint", "Event", "GpuMemory", "Hbm", "KVPoll",
    "KeyPair", "Layout", "LayoutMismatchError", "Limits", "LocalProtocolError", "Mapping", "Member", "Network",
    "NodeSettings", "PDTransferError", "PagePart", "Plane", "PrefillClient", "PrefillEvent", "PrefillRoomHandle",
    "Ranks", "RemoteProtocolError", "Replicas", "RoomAsked", "RoomDrained", "RoomFailed", "RoomFailedError",
    "RoomLanded", "RoomLeased", "RoomReady", "Span", "Transport", "TransportError", "WorldError", "WriterOptions",
    "allocate", "deepseek_v4", "host_layout", "item_layout", "room_id", "strided_layout", "weights_digest",
]  # fmt: skip
