"""Probes of `pdtransfer doctor`: their results, and how they read files of the host that may not exist."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "warn", "missing"]

MIB = 1 << 20
KERNEL = "a Linux kernel from 5.10 on, and a container that lets its calls through"


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of a probe: ok, a warning (slower, or limited), or missing (pdtransfer does not run without it)."""

    state: State
    found: str
    mend: str = ""  # the command that fixes it
    name: str = ""  # of the probe


@dataclass(frozen=True, slots=True)
class Probe:
    """One check of the host whose files lie below a given root, which is / outside tests."""

    name: str
    look: Callable[[Path], Seen]
    mend: str = ""  # the advice if the probe itself fails
    required: bool = False  # a failed probe counts as missing


def ok(text: str) -> Seen:
    """No problem."""
    return Seen("ok", text)


def warn(text: str, mend: str) -> Seen:
    """A problem that pdtransfer works around."""
    return Seen("warn", text, mend)


def missing(text: str, mend: str) -> Seen:
    """A required feature is missing."""
    return Seen("missing", text, mend)


def read(path: Path) -> str:
    """Returns a small file's stripped text; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def names(directory: Path) -> list[str]:
    """Returns the sorted names in a directory; none where it cannot be read."""
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return []


def within(root: Path, path: str | Path) -> Path:
    """Returns the host's absolute path as one below `root`."""
    return root / str(path).lstrip("/")


def sockets(root: Path) -> Iterator[tuple[str, str, int]]:
    """Yields state, address and port of every local socket, those in TIME_WAIT included."""
    for name in ("tcp", "tcp6"):
        for line in read(within(root, f"/proc/net/{name}")).splitlines()[1:]:
            words = line.split()
            try:
                host, _, port = words[1].partition(":")
                packed = b"".join(bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8))
                text = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
                yield words[3], text, int(port, 16)
            except (IndexError, ValueError):
                continue
