"""A request's kv_transfer_params, in the shape of vLLM's nixl push connector: those that come, and those returned.

Clients and proxies write them, so all of it is hostile until `parse` has made TransferParams of it. A wrong field fails
its request alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from ...bus.keys import Endpoint, address_of
from ...client.api import room_id
from ...limits import PEERS_MAX
from ...wire.ranks import SIZE_MAX, label, ranks_of
from ..kit.peers import Reachable, RequestError, checked, room_of
from . import bootstrap

TEXT_LENGTH_MAX = 256
Text = Annotated[str, Meta(min_length=1, max_length=TEXT_LENGTH_MAX, pattern=r"\A[!-~]+\Z")]
# Some proxies have no integers: a float counts that is one.
Port = Annotated[int, Meta(ge=1, le=0xFFFF)] | Annotated[float, Meta(ge=1, le=0xFFFF)]
Size = Annotated[int, Meta(ge=1, le=SIZE_MAX)] | Annotated[float, Meta(ge=1, le=SIZE_MAX)]
Value = TypeVar("Value")
_UUID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}", re.IGNORECASE)
_ENGINES_OWN = re.compile(r"-[0-9a-f]{8}$")  # what each vLLM engine adds to the id that a request came with


class TransferParams(Struct, frozen=True):
    """The fields that this package reads. null is as good as no field; others may stand there."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: Text | None = None
    abort_transfer_id: Text | None = None
    identify: bool | None = None
    transfer_mode: Text | None = None
    remote_engine_id: Text | None = None
    remote_bootstrap_addr: Text | None = None  # where a proxy has got remote_engine_id from; see bootstrap
    remote_request_id: Text | None = None
    remote_host: Text | None = None
    remote_port: Port | None = None
    tp_size: Size | None = None
    pp_size: Size | None = None
    remote_endpoints: Annotated[list[Text], Meta(min_length=1, max_length=PEERS_MAX)] | None = None
    # SGLang's number of the request, or its digits: proxies lose the low bits of large numbers.
    bootstrap_room: Annotated[int, Meta(ge=0)] | Annotated[str, Meta(pattern=r"\A[0-9]{1,20}\Z")] | None = None


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
        return room_of(self.bootstrap_room, room_id(request_id))


@dataclass(frozen=True, slots=True)
class Identify:
    """The answer tells what peers compare of this engine. The request itself is not handed over."""


Wanted = SendTo | ReceiveFrom | GiveUp | Identify


def parse(params: object, reachable: Reachable, request_id: str = "") -> Wanted | None:
    """The hand-off that the request of this engine asks for; None for one without. Raises RequestError."""
    if params is None:
        return None
    asked = checked(params, TransferParams, "kv_transfer_params: ")
    if asked.do_remote_decode and asked.do_remote_prefill:
        raise RequestError("do_remote_prefill, do_remote_decode: both are true, one must be false")
    if asked.do_remote_decode:
        return SendTo(asked.transfer_id)
    if not asked.do_remote_prefill:
        if asked.abort_transfer_id is not None:
            return GiveUp(asked.abort_transfer_id)
        return Identify() if asked.identify else None
    client_id = asked.remote_request_id or ""
    if asked.remote_bootstrap_addr is not None:
        named = bootstrap.params_of(_required("remote_engine_id", asked.remote_engine_id))
        named["transfer_id"] = _required("transfer_id", asked.transfer_id)
        asked = checked(named, TransferParams, "kv_transfer_params: ")
    if asked.transfer_mode not in (None, "push"):
        text = f"{asked.transfer_mode!r}, not 'push': the prefill engine has a different connector"
        raise RequestError(f"transfer_mode: {text}")
    if asked.bootstrap_room is not None:
        number = int(asked.bootstrap_room)
        if number >= 1 << 64:
            raise RequestError("bootstrap_room: not an integer of 64 bits")
        return ReceiveFrom(f"bootstrap_room {number}", _sources(asked, reachable), number, client_id)
    label = asked.transfer_id
    if label is None:
        engine_id = _required("remote_engine_id", asked.remote_engine_id)
        remote = _required("remote_request_id", asked.remote_request_id)
        label = own_label(engine_id, _known_to_both(remote, request_id))
    return ReceiveFrom(label, _sources(asked, reachable), client_id=client_id)


def own_label(engine_id: str, request_id: str) -> str:
    """The label of a room that has no transfer_id."""
    return f"{engine_id}/{request_id}"


def shared_id(request_id: str) -> str | None:
    """The id that another engine gives to a request with the same X-Request-Id. None unless that has a UUID, since
    another id may come again, as after a restart."""
    without_suffix = _ENGINES_OWN.sub("", request_id)
    return without_suffix if _UUID.search(without_suffix) else None


def answer(
    endpoints: Sequence[str],
    *,
    tp_size: int,
    engine_id: str,
    request_id: str,
    transfer_id: str | None,
    facts: Mapping[str, str] | None = None,
    first_token: bool = True,
) -> dict[str, Any]:
    """What a prefill engine returns of a request, which decode takes as it is: the address of its first rank, and of
    each of its ranks. For a router are `facts`, which it shows, and `first_token`: whether what this engine generates
    is the token behind the prompt."""
    first = Endpoint.parse(endpoints[0])
    host, _, port = first.address.removeprefix("tcp://").rpartition(":")
    params: dict[str, Any] = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": engine_id,
        "remote_request_id": request_id, "remote_host": host.strip("[]"), "remote_port": int(port),
        "tp_size": tp_size, "pp_size": len(endpoints) // tp_size, "transfer_mode": "push",
        "remote_endpoints": list(endpoints),
    }  # fmt: skip
    params |= {"facts": dict(facts)} if facts else {}
    params |= {} if first_token else {"first_token": False}
    return params if transfer_id is None else params | {"transfer_id": transfer_id}


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


def _sources(asked: TransferParams, reachable: Reachable) -> tuple[str, ...]:
    sources = _derived(asked, reachable) if asked.remote_endpoints is None else asked.remote_endpoints
    for source in sources:
        reachable.check(source)
    if len(set(sources)) != len(sources):
        raise RequestError("remote_endpoints: one is there twice")
    return tuple(sources)


def _derived(asked: TransferParams, reachable: Reachable) -> list[str]:
    """The endpoint of each rank, by vLLM's own fields: rank r listens on the port + r, and its key has its name."""
    host, port = _required("remote_host", asked.remote_host), _whole("remote_port", asked.remote_port)
    ranks = ranks_of(_whole("tp_size", asked.tp_size, default=1), _whole("pp_size", asked.pp_size, default=1))
    if len(ranks) > PEERS_MAX or port + len(ranks) - 1 > 0xFFFF:
        raise RequestError(f"tp_size: {len(ranks)} ranks, from port {port} on")
    name = _required("remote_engine_id", asked.remote_engine_id) if reachable.allowed is not None else ""
    return [
        f"{reachable.key_of(name if index == 0 else f'{name}-{label(rank)}')}{address_of(host, port + index)}"
        for index, rank in enumerate(ranks)
    ]


def _required(name: str, value: Value | None) -> Value:
    if value is None:
        raise RequestError(f"{name}: missing")
    return value


def _whole(name: str, number: float | None, *, default: int | None = None) -> int:
    number = _required(name, default if number is None else number)
    if number != int(number):
        raise RequestError(f"{name}: {number}, expected an integer")
    return int(number)
