"""The text of the nftables rules: one table of a process, with a set of ports and the peers that reach each.

The table covers the very ports that this process's engines have opened. So daemons that share a port range do not close
each other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from ...errors import ConfigError

ADMIT_MAX = 64  # networks that an operator may admit

STRANGERS_MAX = 64  # addresses that the kernel keeps of those that were refused lately
_STRANGERS_MINUTES = 10

Host = IPv4Address | IPv6Address
HostNetwork = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class Admitted:
    """The ports of one session's engines, and the host that reaches them."""

    host: Host
    ports: tuple[int, ...]


def host_of(address: str) -> Host:
    """An address as packets have it: IPv4 where it is mapped into IPv6, and without a zone. Raises ValueError."""
    host = ip_address(address.partition("%")[0])
    return host.ipv4_mapped or host if isinstance(host, IPv6Address) else host


def admit_networks(named: str, values: Sequence[str]) -> tuple[HostNetwork, ...]:
    """The networks that an operator admits besides. Raises ConfigError."""
    if len(values) > ADMIT_MAX:
        raise ConfigError(f"{named}: {len(values)} networks, the limit is {ADMIT_MAX}")
    networks: list[HostNetwork] = []
    for value in values:
        try:
            networks.append(ip_network(value))
        except ValueError as error:
            raise ConfigError(f"{named} = {value!r}: must be an address or a network, 10.0.0.0/24: {error}") from None
    return tuple(networks)


def table_text(table: str, networks: Iterable[HostNetwork] = ()) -> str:
    """The whole table, empty. The kernel removes it with the process that has made it (`owner`)."""
    also = "".join(f"    {_family(network)} saddr {network} tcp dport @ports accept\n" for network in networks)
    kept = f"size {STRANGERS_MAX}; flags dynamic,timeout; timeout {_STRANGERS_MINUTES}m;"
    return (
        f"table inet {table} {{\n"
        "  flags owner\n"
        "  set ports { type inet_service; }\n"
        "  map own { type inet_service : verdict; }\n"
        "  set peers { type ipv4_addr . inet_service; }\n"
        "  set peers6 { type ipv6_addr . inet_service; }\n"
        f"  set strangers {{ type ipv4_addr; {kept} }}\n"
        f"  set strangers6 {{ type ipv6_addr; {kept} }}\n"
        "  chain refuse {\n"
        "    reject with tcp reset\n"
        "  }\n"
        "  chain input {\n"
        "    type filter hook input priority filter; policy accept;\n"
        "    ip saddr . tcp dport @peers accept\n"
        "    ip6 saddr . tcp dport @peers6 accept\n"
        f"{also}"
        '    iifname "lo" tcp dport vmap @own\n'
        "    tcp dport @ports add @strangers { ip saddr }\n"
        "    tcp dport @ports add @strangers6 { ip6 saddr }\n"
        "    tcp dport @ports counter reject with tcp reset\n"
        "  }\n"
        "}\n"
    )


def opening_text(table: str, ports: Iterable[int]) -> str:
    """From here on this host itself reaches these ports as well."""
    return f"add element inet {table} own {{ {', '.join(f'{port} : accept' for port in ports)} }}\n"


def opened_text(table: str, ports: Sequence[int]) -> str:
    """It does so no more: what its engines still send to themselves is refused, and they are no strangers."""
    refused = ", ".join(f"{port} : goto refuse" for port in ports)
    return closed_text(table, ports) + f"add element inet {table} own {{ {refused} }}\n"


def closed_text(table: str, ports: Iterable[int]) -> str:
    """The engines behind these ports, which have dialled themselves, are dead."""
    return f"delete element inet {table} own {{ {', '.join(map(str, ports))} }}\n"


def change_text(table: str, *, ended: Admitted | None = None, begun: Admitted | None = None) -> str:
    """One transaction: what a session had is taken away, and it gets what it has from now on."""
    lines: list[str] = []
    for verb, entry in (("delete", ended), ("add", begun)):
        if entry is not None and entry.ports:
            peers = ", ".join(f"{entry.host} . {port}" for port in entry.ports)
            lines.append(f"{verb} element inet {table} {_peers(entry.host)} {{ {peers} }}\n")
            lines.append(f"{verb} element inet {table} ports {{ {', '.join(map(str, entry.ports))} }}\n")
    return "".join(lines)


def removal_text(table: str) -> str:
    """The table goes."""
    return f"delete table inet {table}\n"


def strangers_texts(table: str) -> tuple[str, str]:
    """Two questions, for answers in JSON: which hosts were refused lately."""
    return f"list set inet {table} strangers\n", f"list set inet {table} strangers6\n"


def _peers(host: Host) -> str:
    return "peers" if host.version == 4 else "peers6"


def _family(network: HostNetwork) -> str:
    return "ip" if network.version == 4 else "ip6"
