"""What this host is reached by: addresses, ports, RDMA devices, and the transports that KV would take."""

from __future__ import annotations

import errno
import fcntl
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...bus.keys import Address
from ...config.bounds import PORT_MAX, port_range
from ...config.config import DecodeConfig, PrefillConfig, RouterConfig
from ...limits import ENGINES_A_SESSION, ENGINES_MAX, Limits
from ...probe import Seen, names, ok, read, warn, within
from ...transports.mooncake import why_not

_SIOCGIFADDR = 0x8915
_LISTEN = "0A"
_RDMA = "/sys/class/infiniband"
_WHO = "ss -ltnp says who has it; or name another port"


def addresses(_root: Path) -> Seen:
    """What may be bound, and advertised to peers: a container's is of no use to another host."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _number, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # without an IPv4 address
                continue
            found.append(f"{name} {socket.inet_ntoa(answer[20:24])}")
    beyond = [each for each in found if not each.endswith(" 127.0.0.1")]
    if beyond:
        return ok(f"{', '.join(found)}: of 0.0.0.0 peers are told none, --advertise says which")
    return warn(
        f"{', '.join(found) or 'none'}: no peer on another host reaches this one", "ip link; docker run --network"
    )


def ports(root: Path) -> Seen:
    """Whether the ports that daemons take by default can be bound, and who listens there on what."""
    prefill, decode, router = PrefillConfig(), DecodeConfig(), RouterConfig()
    listening = _listening(root)
    taken: list[str] = []
    for name, address in (
        ("prefill --bind", prefill.bind),
        ("prefill --http", prefill.http),
        ("decode --bind", decode.bind),
        ("decode --http", decode.http),
        ("router --listen", router.listen),
    ):
        at = Address.parse("tcp://" + address.removeprefix("tcp://"))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((at.host, at.port_first))
            except OSError as error:
                bound = ", bound to " + " and ".join(listening[at.port_first]) if at.port_first in listening else ""
                taken.append(f"{at.port_first} ({name}, {errno.errorcode.get(error.errno or 0, error)}{bound})")
    if taken:
        return warn(f"not free: {', '.join(taken)}", _WHO)
    return ok("those that daemons take by default are free")


def engine_ports(root: Path, given: Sequence[str] = ()) -> Seen:
    """Mooncake's, in each range that daemons of this host are told: two an engine, which stay taken for a minute after
    its end, and none that the kernel gives to connections of others."""
    ranges = sorted({port_range("transport_ports", each) for each in given} or {PrefillConfig().network.ports})
    taken = {port for _state, _host, port in _sockets(root)}
    found = "; ".join(_fits(first, last, taken) for first, last in ranges)
    amiss = [each for each in (_narrow(ranges), _shared(root, ranges)) if each is not None]
    if amiss:
        return warn("; ".join((found, *(text for text, _ in amiss))), "; ".join(mend for _, mend in amiss))
    return ok(f"{found}; whoever reaches them reaches arenas: deploy/firewall.nft")


def _fits(first: int, last: int, taken: Iterable[int]) -> str:
    used = sum(first <= port <= last for port in taken)
    return (
        f"{first} to {last}, {used} of them taken: room for {(last - first + 1 - used) // 2:,} engines, "
        f"{(last - first + 1) // 2:,} in any minute"
    )


def _narrow(ranges: Sequence[tuple[int, int]]) -> tuple[str, str] | None:
    """What is wrong with a range that engines which have just ended may fill, and its mend."""
    minute = 60_000 // Limits().resend_ms_max * ENGINES_A_SESSION
    narrow = [each for each in ranges if (each[1] - each[0] + 1) // 2 < minute]
    if not narrow:
        return None
    first = min(narrow[0][0], PORT_MAX + 1 - 2 * ENGINES_MAX)
    text = (
        f"a port stays taken for a minute after its engine's end, and a peer that cannot be reached takes up to "
        f"{minute} engines a minute: with room for less, sessions may get fewer engines or none"
    )
    return text, f"--transport-ports {first}-{first + 2 * ENGINES_MAX - 1} for prefill and decode, and in the firewall"


def _shared(root: Path, ranges: Sequence[tuple[int, int]]) -> tuple[str, str] | None:
    """The same of ranges of which the kernel gives ports to connections."""
    given = read(within(root, "/proc/sys/net/ipv4/ip_local_port_range")).split()
    if len(given) != 2 or not all(each.isdecimal() for each in given):
        return None
    low, high = map(int, given)
    kept = read(within(root, "/proc/sys/net/ipv4/ip_local_reserved_ports"))
    found = (re.fullmatch(r"(\d+)(?:-(\d+))?", each) for each in kept.split(","))
    spared = [(int(each[1]), int(each[2] or each[1])) for each in found if each]
    shared = [
        f"{first}-{last}"
        for first, last in ranges
        if low <= last and first <= high and not any(a <= first and last <= b for a, b in spared)
    ]
    if not shared:
        return None
    text = f"the kernel gives {low} to {high} to connections, which may take one of them"
    # What is written there takes the place of what was.
    return text, f"sysctl -w net.ipv4.ip_local_reserved_ports={','.join(filter(None, (kept, *shared)))}"


def _listening(root: Path) -> dict[int, list[str]]:
    """The addresses that somebody listens on, by port."""
    found: dict[int, list[str]] = {}
    for state, host, port in _sockets(root):
        if state == _LISTEN:
            found.setdefault(port, []).append(host)
    return found


def _sockets(root: Path) -> Iterator[tuple[str, str, int]]:
    """State, address and port of this host's end of every one, those included that only time is left of."""
    for name in ("tcp", "tcp6"):
        for line in read(within(root, f"/proc/net/{name}")).splitlines()[1:]:
            words = line.split()
            if len(words) < 4 or ":" not in words[1]:
                continue
            host, _, port = words[1].partition(":")
            try:
                packed = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
                text = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
                yield words[3], text, int(port, 16)
            except ValueError:
                continue


def rdma(root: Path) -> Seen:
    """Devices whose ports are up, and whether a process may open them."""
    devices = names(within(root, _RDMA))
    if not devices:
        return ok("none: KV goes to other hosts over TCP")
    found: list[str] = []
    down: list[str] = []
    for device in devices:
        for port in names(within(root, f"{_RDMA}/{device}/ports")):
            at = within(root, f"{_RDMA}/{device}/ports/{port}")
            state = re.sub(r"^\d+: ", "", read(at / "state")) or "unknown"
            words = (f"{device} port {port} {state}", read(at / "rate"), read(at / "link_layer"))
            found.append(", ".join(word for word in words if word))
            if state != "ACTIVE":
                down.append(device)
    if not found:
        return warn(f"{', '.join(devices)} without a port", f"ibv_devinfo -d {devices[0]}")
    if not any(name.startswith("uverbs") for name in names(within(root, "/dev/infiniband"))):
        text = f"{'; '.join(found)}, and no /dev/infiniband/uverbs* to open them by"
        return warn(text, "modprobe ib_uverbs; docker run --device /dev/infiniband")
    if len(down) == len(found):
        return warn(f"{'; '.join(found)}: none is up", f"ibv_devinfo -d {down[0]}; ip link set <its interface> up")
    return ok("; ".join(found))


def transport(root: Path) -> Seen:
    """What a session would take by itself, and why."""
    if reason := why_not():
        what, _, mend = reason.rpartition(": ")
        return warn(f"on this host shm; to other hosts none ({what})", mend)
    asked = ", unless RDMA is asked for" if names(within(root, _RDMA)) else ""
    return ok(f"on this host shm; to other hosts mooncake over TCP{asked}")
