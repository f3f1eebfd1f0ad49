"""The settings of an adapter, as an engine's configuration holds them: checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args, get_origin, get_type_hints

from ...bounds import bound, match, port_range
from ...bus.keys import Address, AllowList, KeyPair, address_of, check_dialled, check_exposure, is_loopback, key_of
from ...errors import ConfigError
from ...limits import HOST_BUFFER_GIB, HOST_BUFFER_GIB_MAX, HOST_BUFFER_GIB_MIN, Limits
from ...threads import AUTO, cpus_of
from ...transports.options import Network, Protocol
from ...transports.registry import check
from ...wire import Ranks

TIME_LEFT_S_MAX = 86_400.0
SILENCE_S_MIN, SILENCE_S_MAX = 1.0, 3_600.0  # several Pings at least
PORT_MAX = 0xFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of hand-offs in an engine's configuration; each field is a setting of the same name.

    A wrong value, and an unknown name, is a ConfigError of one line that names it.
    """

    bind: str = "tcp://127.0.0.1:0"  # prefill: worker rank r listens on the port + r; port 0: on any
    advertise: str = ""  # the host that decode engines dial, if it is not the one in bind
    key: Path | None = None  # this engine's secret key; those of further ranks lie beside it, as keygen names them
    allow: Path | None = None  # the list of peers: their names and public keys
    insecure: bool = False  # let other hosts connect without keys
    model: str = ""  # the name under which peers know the weights; by default the model's name or path
    time_left_s: float = 120.0  # after which a hand-off that has not ended fails
    silence_s: float = Limits().silence_ms / 1e3  # after which a peer that does not answer counts as lost
    client_cpus: str = AUTO  # of its threads: auto undoes the engine's binding, inherit leaves it; or 0-3,6
    transport: str = "auto"  # how KV travels: auto, or a transport's name
    transport_ports: str = "21000-21999"  # of transports between hosts
    transport_protocol: Protocol = "tcp"
    copy_threads: int = 2  # prefill: threads that copy rows in host memory
    # Decode: host memory for rows of prefill engines that do not reach its GPU; backed when the first of them comes.
    host_buffer_gib: float = HOST_BUFFER_GIB
    verify: bool = False  # decode: read back what has landed, and compare its checksum with prefill's

    def __post_init__(self) -> None:
        named = f"bind = {self.bind!r}"
        try:
            address = Address.parse(self.bind)
        except ConfigError:
            raise ConfigError(f"{named}: must be tcp://host:port, IPv6 as tcp://[::1]:port, port below 65536") from None
        if address.port_first != address.port_last:
            raise ConfigError(f"{named}: must be tcp://host:port, with one port")
        if (self.key is None) is not (self.allow is None):
            useless, other = ("allow", "key") if self.key is None else ("key", "allow")
            raise ConfigError(f"{useless} = '{getattr(self, useless)}': useless without {other}")
        check_exposure(self.bind, named=named, keyed=self.key is not None, insecure=self.insecure)
        if address.wildcard and not self.advertise:
            raise ConfigError(f"{named}: peers cannot dial that: set advertise to a host that they can")
        if self.advertise:
            check_dialled("advertise", self.advertise)
        match("model", self.model, r"[ -~]{0,128}", "at most 128 printable ASCII characters")
        bound("time_left_s", self.time_left_s, 1.0, TIME_LEFT_S_MAX)
        bound("silence_s", self.silence_s, SILENCE_S_MIN, SILENCE_S_MAX)
        cpus_of(self.client_cpus, named="client_cpus")
        bound("copy_threads", self.copy_threads, 1, 64)
        bound("host_buffer_gib", self.host_buffer_gib, HOST_BUFFER_GIB_MIN, HOST_BUFFER_GIB_MAX)
        port_range("transport_ports", self.transport_ports)
        check(self.transport, self.network)

    @classmethod
    def of(cls, extra: Mapping[str, Any], where: str) -> Self:
        """The settings in `extra`, which the user wrote at `where`. Raises ConfigError."""
        hints = get_type_hints(cls)
        types = {setting.name: hints[setting.name] for setting in fields(cls)}
        if unknown := sorted(extra.keys() - types.keys()):
            raise ConfigError(f"{where}: {unknown[0]!r} must be one of {', '.join(sorted(types))}")
        return cls(**{name: _checked(name, value, types[name]) for name, value in extra.items()})

    @property
    def host(self) -> str:
        """The host that decode engines dial."""
        return self.advertise or Address.parse(self.bind).host

    @property
    def limits(self) -> Limits:
        """What this engine allows its peers."""
        return Limits(silence_ms=int(self.silence_s * 1e3))

    @property
    def network(self) -> Network:
        """How peers on other hosts reach this engine's transports."""
        ports = port_range("transport_ports", self.transport_ports)
        return Network(
            host=self.advertise, ports=ports, protocol=self.transport_protocol, bind=self.bind,
            loopback=is_loopback(self.bind),
        )  # fmt: skip

    def bind_of(self, rank: int) -> str:
        """Where a rank listens, by its number among the ranks of all engines that share this setting."""
        address = Address.parse(self.bind)
        if address.port_first == 0:
            return self.bind
        port = address.port_first + rank
        if port > PORT_MAX:
            raise ConfigError(f"bind = {self.bind!r}: rank {rank} has no port, the last one is {PORT_MAX}")
        return address_of(address.host, port)

    def keys_of(self, ranks: Ranks) -> tuple[KeyPair | None, AllowList | None]:
        """The key pair of a rank, and the list of its peers. Raises ConfigError."""
        if self.key is None or self.allow is None:
            return None, None
        leads = ranks.tp_rank == ranks.pp_rank == 0
        return KeyPair.read(self.key if leads else key_of(self.key, ranks)), AllowList.read(self.allow)


def _checked(name: str, value: Any, hint: object) -> Any:
    """The value as its field's type. JSON has no paths, and may write 120.0 as 120."""
    if hint == Path | None:
        fits, wanted = value is None or (isinstance(value, str) and value), "a path"
    elif get_origin(hint) is Literal:
        fits, wanted = value in get_args(hint), f"one of {', '.join(get_args(hint))}"
    else:
        value = float(value) if hint is float and type(value) is int else value
        words = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
        fits, wanted = type(value) is hint, words[cast("type", hint)]
    if not fits:
        raise ConfigError(f"{name} = {value!r}: must be {wanted}")
    return Path(value) if value and hint == Path | None else value
