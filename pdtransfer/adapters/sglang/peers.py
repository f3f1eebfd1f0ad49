"""What requests name: their room, and a bootstrap server that answers about a prefill server. All of it is hostile
until it is checked: a wrong value fails only its own requests.

Each of a bootstrap server's three answers is decoded into one of the structs here before SGLang reads it. So its
schedulers get the types that they expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import asdict, fields

from ...bus.keys import address_of
from ...limits import PEERS_MAX
from ...wire.ranks import SIZE_MAX
from ..kit.peers import Reachable, RequestError, checked

_TEXT_LENGTH_MAX = 256
_ROOM_MAX = 2**63 - 1

Size = Annotated[int, Meta(ge=1, le=SIZE_MAX)]
Port = Annotated[int, Meta(ge=1, le=0xFFFF)]
Text = Annotated[str, Meta(max_length=_TEXT_LENGTH_MAX)]
Host = Annotated[str, Meta(min_length=1, max_length=512)]  # with a key in front
DpRank = Annotated[int, Meta(ge=0, lt=SIZE_MAX)]


class ServerAnswer(Struct, frozen=True, kw_only=True):
    """What is known of a prefill server: SGLang's PrefillServerInfo, as far as a server may set it."""

    attn_tp_size: Size
    attn_cp_size: Size
    dp_size: Size
    pp_size: Size
    follow_bootstrap_room: bool
    page_size: Annotated[int, Meta(ge=1)] | None = None
    kv_cache_dtype: Text | None = None
    kv_layout: Text | None = None
    enable_dsa_cache_layer_split: bool = False
    enable_kv_cache_sharding: bool = False
    dsv41_spec_layout: dict[Text, Text | int | float | bool | None] | None = None
    decode_allocation_policy: Text = "early"
    prefill_http_port: Port | None = None


class RankAnswer(Struct, frozen=True):
    """Where one prefill rank listens."""

    rank_ip: Host
    rank_port: Port


class _Request(Struct, frozen=True):
    bootstrap_room: Annotated[int, Meta(ge=1, le=_ROOM_MAX)]


NO_SERVER = asdict(ServerAnswer(attn_tp_size=1, attn_cp_size=1, dp_size=1, pp_size=1, follow_bootstrap_room=True))


def check_room(bootstrap_room: object) -> None:
    """Raises RequestError for a number that SGLang cannot keep: it compares rooms in 64 bits, and takes 0 for none. A
    larger one would end the prefill engine."""
    checked({"bootstrap_room": bootstrap_room}, _Request)


def server_fields(answer: dict[str, Any]) -> dict[str, Any]:
    """The fields of a prefill server, those alone that ServerAnswer has. Raises RequestError, also for more ranks than
    a room can have."""
    server = checked(answer, ServerAnswer)
    if (count := server.attn_tp_size * server.pp_size) > PEERS_MAX:
        raise RequestError(f"attn_tp_size: {count} ranks together with pp_size, must be at most {PEERS_MAX}")
    return {field.name: getattr(server, field.name) for field in fields(server) if field.name in answer}


def rank_fields(answer: object) -> dict[str, Any]:
    """Where a prefill rank listens, as SGLang keeps it. Raises RequestError."""
    return asdict(checked(answer, RankAnswer))


def dp_ranks(answer: object) -> dict[str, int]:
    """The data parallel rank of each room. Raises RequestError."""
    return checked(answer, dict[str, DpRank], "query_dp_ranks: ")


def sources_of(ranks: Sequence[dict[str, Any]], reachable: Reachable) -> list[str]:
    """The endpoints of prefill ranks, of which each has passed `rank_fields`. Raises RequestError for one that is
    malformed, or must not be dialled."""
    sources: list[str] = []
    for rank in ranks:
        key, separator, host = rank["rank_ip"].rpartition("@")
        sources.append(f"{key}{separator}{address_of(host, rank['rank_port'])}")
        reachable.check(sources[-1])
    return sources
