"""Probes of the network: addresses, ports, RDMA devices, and the transports available for KV."""

from __future__ import annotations

import errno
import fcntl
import re
import socket
import struct
from pathlib import Path

from ....bus.keys import Address
from ....errors import ConfigError
from ....probe import Seen, names, ok, read, sockets, warn, within
from ....transports.base import Transport
from ....transports.options import Network
from ....transports.registry import TRANSPORTS
from ....transports.select import needs_no_guard
from ...firewall import why_no_table
from ...settings.router import RouterConfig
from ...settings.worker import DecodeConfig, PrefillConfig

_SIOCGIFADDR = 0x8915
_LISTEN = "0A"
_RULES = "nft -f deploy/firewall.nft"
_RDMA = "/sys/class/infiniband"
_OWNER = "ss -ltnp shows the owner; or set another port"


def addresses(_root: Path) -> Seen:
    """Addresses that may be bound and advertised; a container's own is useless to another host."""
    interfaces: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _number, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # no IPv4 address
                continue
            interfaces.append(f"{name} {socket.inet_ntoa(answer[20:24])}")
    beyond = [interface for interface in interfaces if not interface.endswith(" 127.0.0.1")]
    if beyond:
        return ok(f"{', '.join(interfaces)}: peers cannot dial 0.0.0.0, set --advertise to one of these")
    return warn(
        f"{', '.join(interfaces) or 'none'}: no peer on another host reaches this one", "ip link; docker run --network"
    )


def ports(root: Path) -> Seen:
    """Reports if the default ports of daemons can be bound, and which addresses listen on them."""
    prefill, decode, router = PrefillConfig(), DecodeConfig(), RouterConfig()
    listening = _listening(root)
    taken: list[str] = []
    for name, address in (
        ("prefill --bind", prefill.bind),
        ("prefill --listen", prefill.listen),
        ("decode --bind", decode.bind),
        ("decode --listen", decode.listen),
        ("router --listen", router.listen),
    ):
        endpoint = Address.parse("tcp://" + address.removeprefix("tcp://"))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((endpoint.host, endpoint.port_first))
            except OSError as error:
                port, code = endpoint.port_first, errno.errorcode.get(error.errno or 0, error)
                bound = f", bound to {' and '.join(listening[port])}" if port in listening else ""
                taken.append(f"{port} ({name}, {code}{bound})")
    if taken:
        return warn(f"not free: {', '.join(taken)}", _OWNER)
    return ok("the default ports of daemons are free")


def _listening(root: Path) -> dict[int, list[str]]:
    """Returns the addresses with a listener, by port."""
    hosts: dict[int, list[str]] = {}
    for state, host, port in sockets(root):
        if state == _LISTEN:
            hosts.setdefault(port, []).append(host)
    return hosts


def rdma(root: Path) -> Seen:
    """RDMA devices with an active port, and whether a process may open them."""
    devices = names(within(root, _RDMA))
    if not devices:
        return ok("none: KV goes to other hosts over TCP")
    ports: list[str] = []
    down: list[str] = []
    for device in devices:
        for port in names(within(root, f"{_RDMA}/{device}/ports")):
            folder = within(root, f"{_RDMA}/{device}/ports/{port}")
            state = re.sub(r"^\d+: ", "", read(folder / "state")) or "unknown"
            words = (f"{device} port {port} {state}", read(folder / "rate"), read(folder / "link_layer"))
            ports.append(", ".join(word for word in words if word))
            if state != "ACTIVE":
                down.append(device)
    if not ports:
        return warn(f"{', '.join(devices)} without a port", f"ibv_devinfo -d {devices[0]}")
    if not any(name.startswith("uverbs") for name in names(within(root, "/dev/infiniband"))):
        text = f"{'; '.join(ports)}, and no /dev/infiniband/uverbs* to open them by"
        return warn(text, "modprobe ib_uverbs; docker run --device /dev/infiniband")
    if len(down) == len(ports):
        return warn(f"{'; '.join(ports)}: none is up", f"ibv_devinfo -d {down[0]}; ip link set <its interface> up")
    return ok("; ".join(ports))


def transport(root: Path, *, asked: Network | None = None) -> Seen:
    """The transports that a session would choose, and why, for a daemon of this network."""
    local = next(registered.name for registered in TRANSPORTS.values() if not registered.why_not())
    beyond = [registered for registered in TRANSPORTS.values() if registered.any_host and not registered.by_name_alone]
    reasons = {way.name: way.why_not() or _why_not(way, asked or Network()) for way in beyond}
    far = next((name for name, reason in reasons.items() if not reason), "")
    if not far:
        problem, _, mend = next(iter(reasons.values())).rpartition(": ")
        return warn(f"on this host {local}; to other hosts none ({problem})", mend)
    note = ", unless RDMA is requested" if names(within(root, _RDMA)) else ""
    return ok(f"on this host {local}; to other hosts {far} over TCP{note}")


def _why_not(transport: Transport, network: Network) -> str:
    try:
        transport.check(network)
    except ConfigError as error:
        return str(error)
    return ""


def firewall(_root: Path) -> Seen:
    """Reports if this user's daemons can close their transports' ports to all but peers, tried with an empty table."""
    if reason := needs_no_guard("auto", loopback=False):
        return ok(f"not needed: {reason}")
    if reason := why_no_table():
        mends = "apt-get" in reason or "CAP_NET_ADMIN" in reason
        text, mend = reason.rsplit(": ", 1) if mends else (reason, _RULES)
        return warn(f"none by this user, so every host that reaches the ports reaches arenas: {text}", mend)
    return ok("daemons of this user admit only peers with a session to their engines' ports")
