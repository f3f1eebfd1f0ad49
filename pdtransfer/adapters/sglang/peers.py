"""What requests name: their room, and a bootstrap server that answers about a prefill server. All of it is hostile
until it was checked: what is wrong fails its requests alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...bus.keys import address_of
from ...limits import PEERS_MAX
from ...wire.ranks import SIZE_MAX
from ..reachable import Reachable, RequestError

SIZES = "attn_tp_size", "attn_cp_size", "dp_size", "pp_size"
ADDRESSES_MAX = 1_024  # of servers whose faults are remembered
_HOST_LENGTH_MAX = 512  # with a key in front
_PORT_MAX = 0xFFFF
_ROOM_MAX = 2**63 - 1


def check_room(bootstrap_room: int) -> None:
    """Raises RequestError for a number that SGLang cannot keep: it compares rooms in 64 bits, and takes 0 for none. A
    larger one would end the prefill engine."""
    if not 1 <= bootstrap_room <= _ROOM_MAX:
        raise RequestError(f"bootstrap_room: {bootstrap_room}, from 1 to {_ROOM_MAX} can be")


def check_sizes(info: Any) -> None:
    """Raises RequestError for a server of no ranks, or of more than a room can have."""
    for name in SIZES:
        if not 1 <= (size := getattr(info, name)) <= SIZE_MAX:
            raise RequestError(f"{name}: {size}, from 1 to {SIZE_MAX} can be")
    if (count := info.attn_tp_size * info.pp_size) > PEERS_MAX:
        raise RequestError(f"attn_tp_size: {count} ranks with those of pp_size, at most {PEERS_MAX} can be")


def sources_of(ranks: Sequence[Mapping[str, Any]], reachable: Reachable) -> list[str]:
    """The endpoints of prefill ranks, each by its rank_ip and rank_port. Raises RequestError for one that is malformed,
    or must not be dialled."""
    made: list[str] = []
    for rank in ranks:
        host, port = rank.get("rank_ip"), rank.get("rank_port")
        if not isinstance(host, str) or not 0 < len(host) <= _HOST_LENGTH_MAX:
            raise RequestError(f"rank_ip: {str(host)[:64]!r} is not a host, nor KEY@host")
        if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= _PORT_MAX:
            raise RequestError(f"rank_port: {str(port)[:64]!r} is not a port")
        key, at, host = host.rpartition("@")
        made.append(f"{key}{at}{address_of(host, port)}")
        reachable.check(made[-1])
    return made


class Refusals:
    """Why prefill servers were refused, by the address of their bootstrap server."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}  # the oldest first

    def add(self, address: str, reason: str) -> None:
        """A server does not fit."""
        self._reasons.pop(address, None)
        self._reasons[address] = reason
        if len(self._reasons) > ADDRESSES_MAX:
            del self._reasons[next(iter(self._reasons))]

    def discard(self, address: str) -> None:
        """It fits now. Idempotent."""
        self._reasons.pop(address, None)

    def reason(self, address: str) -> str:
        """Why a server was refused last; empty if it was not."""
        return self._reasons.get(address, "")
