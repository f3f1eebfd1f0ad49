"""What doctor tries for engines, whatever library they are of: their ports, and whether their package loads."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ...environment import child_environment
from ...limits import ENGINES_A_SESSION, ENGINES_MAX, Limits
from ...probe import Seen, ok, read, sockets, warn, within

_PORT_MAX = 0xFFFF
_IMPORT_S = 30.0


def version_of(package: str) -> str:
    """The version of a package, empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def why_not_loaded(code: str, *arguments: str) -> str:
    """Why `code`, which imports a package, fails in a process of its own, since a wrong package may crash the process;
    empty where it does not. Raises TimeoutError, with the reason."""
    try:
        tried = subprocess.run(  # noqa: S603 (our own line)
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, errors="replace",
            timeout=_IMPORT_S, env=child_environment(), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"does not load within {_IMPORT_S:.0f} s") from None
    if not tried.returncode:
        return ""
    last = (tried.stderr.strip().splitlines() or [f"status {tried.returncode}"])[-1]
    return f"does not load: {last[:200]}"


def engine_ports(root: Path, ranges: Sequence[tuple[int, int]]) -> Seen:
    """The engines' port ranges of this host's daemons.

    Each engine takes two ports, which stay in use for a minute after its end. The kernel must not give them to other
    connections.
    """
    taken = {port for _state, _host, port in sockets(root)}
    rooms = "; ".join(_room(first, last, taken) for first, last in ranges)
    amiss = [complaint for complaint in (_narrow(ranges), _shared(root, ranges)) if complaint is not None]
    if amiss:
        return warn("; ".join((rooms, *(text for text, _ in amiss))), "; ".join(mend for _, mend in amiss))
    return ok(rooms)


def _room(first: int, last: int, taken: Iterable[int]) -> str:
    used = sum(first <= port <= last for port in taken)
    return (
        f"{first} to {last}, {used} of them taken: room for {(last - first + 1 - used) // 2:,} engines, "
        f"{(last - first + 1) // 2:,} in any minute"
    )


def _narrow(ranges: Sequence[tuple[int, int]]) -> tuple[str, str] | None:
    """Checks for a range that recently ended engines may fill; returns the problem and its fix."""
    minute = 60_000 // Limits().resend_ms_max * ENGINES_A_SESSION
    narrow = [ports for ports in ranges if (ports[1] - ports[0] + 1) // 2 < minute]
    if not narrow:
        return None
    first = min(narrow[0][0], _PORT_MAX + 1 - 2 * ENGINES_MAX)
    text = (
        f"a port stays taken for a minute after its engine's end, and a peer that cannot be reached takes up to "
        f"{minute} engines a minute: with room for less, sessions may get fewer engines or none"
    )
    return text, f"--transport-ports {first}-{first + 2 * ENGINES_MAX - 1} for prefill and decode, and in the firewall"


def _shared(root: Path, ranges: Sequence[tuple[int, int]]) -> tuple[str, str] | None:
    """Checks for a range from which the kernel assigns ports; returns the problem and its fix."""
    given = read(within(root, "/proc/sys/net/ipv4/ip_local_port_range")).split()
    if len(given) != 2 or not all(bound.isdecimal() for bound in given):
        return None
    low, high = map(int, given)
    kept = read(within(root, "/proc/sys/net/ipv4/ip_local_reserved_ports"))
    matches = (re.fullmatch(r"(\d+)(?:-(\d+))?", text) for text in kept.split(","))
    spared = [(int(match[1]), int(match[2] or match[1])) for match in matches if match]
    shared = [
        f"{first}-{last}"
        for first, last in ranges
        if low <= last and first <= high and not any(a <= first and last <= b for a, b in spared)
    ]
    if not shared:
        return None
    text = f"the kernel gives {low} to {high} to connections, which may take one of them"
    # Writing replaces the reserved ports, so they are repeated.
    return text, f"sysctl -w net.ipv4.ip_local_reserved_ports={','.join(filter(None, (kept, *shared)))}"
