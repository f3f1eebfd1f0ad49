"""A request's kv_transfer_params, in the shape of vLLM's nixl push connector: those that come, and those returned.

Clients and proxies write them, so each field is hostile until it was checked. A wrong one fails its request alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ...bus.keys import Endpoint, address_of
from ...client import room_id
from ...limits import PEERS_MAX
from ...wire.ranks import SIZE_MAX, label, ranks_of
from .. import bootstrap_rooms
from ..reachable import Reachable, RequestError

Params = dict[object, object]  # as a client sent them

TEXT_LENGTH_MAX = 256
_TEXT = re.compile(r"[!-~]+")
_UUID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}", re.IGNORECASE)
_ENGINES_OWN = re.compile(r"-[0-9a-f]{8}$")  # what each vLLM engine adds to the id that a request came with


@dataclass(frozen=True, slots=True)
class SendTo:
    """Prefill: the request's KV goes to a decode engine, in the room of `transfer_id`, or of the request's own id."""

    transfer_id: str | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Prefill: an earlier request's KV will not be asked for. This request itself is not handed over."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class ReceiveFrom:
    """Decode: the request's KV comes from the prefill ranks at `sources`, in the room of `label`, or of a number that
    SGLang knows the request by. `client_id` is what its proxy calls it, empty if not known."""

    label: str
    sources: tuple[str, ...]
    bootstrap_room: int | None = None
    client_id: str = field(default="", compare=False)  # for logs

    def room(self, request_id: str) -> int:
        """The room of the request of this engine."""
        if self.bootstrap_room is None:
            return room_id(self.label)
        return bootstrap_rooms.room_of(self.bootstrap_room, room_id(request_id))


def parse(params: Any, reachable: Reachable, request_id: str = "") -> SendTo | ReceiveFrom | GiveUp | None:
    """The hand-off that the request of this engine asks for; None for one without. Raises RequestError."""
    if params is None:
        return None
    if not isinstance(params, dict):
        raise RequestError(f"kv_transfer_params: a {type(params).__name__}, not an object")
    params = cast("Params", params)
    sends, receives = (_flag(params, name) for name in ("do_remote_decode", "do_remote_prefill"))
    if sends and receives:
        raise RequestError("do_remote_prefill: true, and do_remote_decode as well")
    transfer_id = _text(params, "transfer_id")
    if sends:
        return SendTo(transfer_id)
    if not receives:
        given_up = _text(params, "abort_transfer_id")
        return None if given_up is None else GiveUp(given_up)
    client_id = _text(params, "remote_request_id") or ""
    mode = _text(params, "transfer_mode")
    if mode not in (None, "push"):
        raise RequestError(f"transfer_mode: {mode!r}, not 'push': the prefill engine has another connector")
    if params.get("bootstrap_room") is not None:
        number = _bootstrap_room(params["bootstrap_room"])
        return ReceiveFrom(f"bootstrap_room {number}", _sources(params, reachable), number, client_id)
    if transfer_id is None:
        engine_id, remote = _required_text(params, "remote_engine_id"), _required_text(params, "remote_request_id")
        transfer_id = own_label(engine_id, _known_to_both(remote, request_id))
    return ReceiveFrom(transfer_id, _sources(params, reachable), client_id=client_id)


def own_label(engine_id: str, request_id: str) -> str:
    """The label of a room that has no transfer_id."""
    return f"{engine_id}/{request_id}"


def shared_id(request_id: str) -> str | None:
    """The id that another engine gives to a request with the same X-Request-Id; None unless that has a UUID, since
    another id may come again, as after a restart."""
    found = _ENGINES_OWN.sub("", request_id)
    return found if _UUID.search(found) else None


def answer(
    endpoints: Sequence[str], *, tp_size: int, engine_id: str, request_id: str, transfer_id: str | None
) -> dict[str, Any]:
    """What a prefill engine returns of a request, which decode takes as it is: the address of its first rank, and of
    each of its ranks."""
    first = Endpoint.parse(endpoints[0])
    host, _, port = first.address.removeprefix("tcp://").rpartition(":")
    made: dict[str, Any] = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": engine_id,
        "remote_request_id": request_id, "remote_host": host.strip("[]"), "remote_port": int(port),
        "tp_size": tp_size, "pp_size": len(endpoints) // tp_size, "transfer_mode": "push",
        "remote_endpoints": list(endpoints),
    }  # fmt: skip
    return made if transfer_id is None else made | {"transfer_id": transfer_id}


def _known_to_both(remote: str, request_id: str) -> str:
    """The id by which prefill knows the request that this engine knows by `request_id`.

    That is what prefill has returned. A proxy that asks both at once has nothing from prefill yet: `remote` is the
    X-Request-Id of both requests, of which each engine makes its own id.
    """
    shared = shared_id(request_id)
    if shared is None or not _UUID.search(remote):
        return remote
    # vLLM's servers write the number of a choice, the kind of the request and the number of its prompt around it.
    return shared if re.fullmatch(rf"(\d+_)?[a-z]+[-_]{re.escape(remote)}(-\d+)?", shared) else remote


def _sources(params: Params, reachable: Reachable) -> tuple[str, ...]:
    listed = params.get("remote_endpoints")
    if listed is not None:
        if not isinstance(listed, list) or not 1 <= len(found := cast("list[object]", listed)) <= PEERS_MAX:
            raise RequestError(f"remote_endpoints: not a list of 1 to {PEERS_MAX} endpoints")
        sources = [_checked_text(f"remote_endpoints[{at}]", each) for at, each in enumerate(found)]
    else:
        sources = _derived(params, reachable)
    for source in sources:
        reachable.check(source)
    if len(set(sources)) != len(sources):
        raise RequestError("remote_endpoints: one is there twice")
    return tuple(sources)


def _derived(params: Params, reachable: Reachable) -> list[str]:
    """The endpoint of each rank, by vLLM's own fields: rank r listens on the port + r, and its key has its name."""
    host = _required_text(params, "remote_host")
    port, tp_size = _count(params, "remote_port", 0xFFFF), _count(params, "tp_size", SIZE_MAX, default=1)
    ranks = ranks_of(tp_size, _count(params, "pp_size", SIZE_MAX, default=1))
    if len(ranks) > PEERS_MAX or port + len(ranks) - 1 > 0xFFFF:
        raise RequestError(f"tp_size: {len(ranks)} ranks, from port {port} on")
    name = _required_text(params, "remote_engine_id") if reachable.allowed is not None else ""
    return [
        f"{reachable.key_of(name if at == 0 else f'{name}-{label(each)}')}{address_of(host, port + at)}"
        for at, each in enumerate(ranks)
    ]


def _bootstrap_room(value: object) -> int:
    """A number, or its digits: proxies lose the low bits of large numbers."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,20}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise RequestError(f"bootstrap_room: {str(value)[:64]!r} is not an integer of 64 bits, nor its digits")
    return value


def _flag(params: Params, name: str) -> bool:
    value = params.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RequestError(f"{name}: a {type(value).__name__}, not true or false")


def _text(params: Params, name: str) -> str | None:
    value = params.get(name)
    return None if value is None else _checked_text(name, value)


def _required_text(params: Params, name: str) -> str:
    return _checked_text(name, params.get(name))


def _checked_text(name: str, value: Any) -> str:
    if value is None:
        raise RequestError(f"{name}: missing")
    if not isinstance(value, str):
        raise RequestError(f"{name}: a {type(value).__name__}, not a text")
    if len(value) > TEXT_LENGTH_MAX or not _TEXT.fullmatch(value):
        raise RequestError(f"{name}: {value[:64]!r} is not 1 to {TEXT_LENGTH_MAX} printable characters without spaces")
    return value


def _count(params: Params, name: str, high: int, *, default: int | None = None) -> int:
    value = params.get(name, default)
    if value is None:
        raise RequestError(f"{name}: missing")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # some proxies have no integers
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise RequestError(f"{name}: {str(value)[:64]!r} is not an integer from 1 to {high}")
    return value
