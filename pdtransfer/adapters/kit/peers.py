"""Which peers a decode engine may dial, where a request names them, and the rooms of a request that SGLang numbers.

A room of ours is used once, and clients may use a bootstrap_room again: after a failure, or to have a prompt computed
anew. So decode numbers the uses. Its room has the hash of the bootstrap_room in the upper bits, and the use in the
lower ones. Prefill opens the room that decode asks for: it knows the request by the upper bits."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar

from ...bus.keys import AllowList, Endpoint, is_literal, is_loopback
from ...errors import ConfigError, RemoteProtocolError
from ...schema import convert


class RequestError(ValueError):
    """A field of a request is missing or wrong; the text is one line that names it. It fails its request alone."""


@dataclass(frozen=True, slots=True)
class Reachable:
    """The peers that a decode engine may dial: those on its list, or without one those of this host."""

    allowed: AllowList | None = None
    insecure: bool = False
    field: str = "remote_host"  # by which a request names the host

    def check(self, source: str) -> None:
        """Raises RequestError unless the endpoint is well-formed and may be dialled. No name is looked up."""
        try:
            endpoint = Endpoint.parse(source)
        except ConfigError as error:
            raise RequestError(str(error)) from None
        if self.allowed is not None:
            if why := self.allowed.why_not(endpoint.server_key or "", "prefill"):
                raise RequestError(f"endpoint {source!r}: its key: {why}")
            return
        if endpoint.server_key is not None:
            raise RequestError(f"endpoint {source!r}: has a key, this engine has none: set key and allow")
        host = endpoint.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if not self.insecure and host != "localhost" and not (is_literal(host) and is_loopback(endpoint.address)):
            raise RequestError(f"{self.field}: {host} is another host: set key and allow, or insecure, on both engines")

    def key_of(self, name: str) -> str:
        """KEY@ of the peer that the list has under this name; empty without a list."""
        if self.allowed is None:
            return ""
        key = next((key for key, listed in self.allowed.names.items() if listed == name), None)
        if key is None:
            raise RequestError(f"remote_engine_id: {name!r} is not on this engine's list of peers")
        return f"{key}@"


USE_BITS = 20

K = TypeVar("K")
V = TypeVar("V")


def checked(value: object, kind: type[V], named: str = "") -> V:
    """What others have written, as this type. Raises RequestError, which names the wrong field behind `named`."""
    try:
        return convert(value, kind)
    except RemoteProtocolError as error:
        raise RequestError(f"{named}{error}") from None


def tag_of(bootstrap_room: int) -> int:
    """The upper bits of the rooms of a bootstrap_room."""
    return int.from_bytes(sha256(b"%d" % bootstrap_room).digest()[:8], "little") >> USE_BITS or 1  # no room is 0


def room_of(bootstrap_room: int, use: int) -> int:
    """A room of a bootstrap_room, by the lower bits of the number of its use."""
    return tag_of(bootstrap_room) << USE_BITS | use % (1 << USE_BITS)


class Remembered(dict[K, V]):
    """Entries of which at most `count_max` are kept: the oldest one goes first."""

    def __init__(self, count_max: int) -> None:
        super().__init__()
        self._count_max = count_max

    def keep(self, key: K, value: V) -> None:
        """The newest entry from now on."""
        self.pop(key, None)
        self[key] = value
        if len(self) > self._count_max:
            del self[next(iter(self))]
