"""What a probe says, and how it reads files that may not be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "warn", "missing"]

MIB = 1 << 20
VENV = "make venv"
KERNEL = "a Linux kernel from 5.10 on, and a container that lets its calls through"


@dataclass(frozen=True, slots=True)
class Seen:
    """What one probe saw: ok, a warning (slower, or for fewer), or missing (pdtransfer does not run without it)."""

    state: State
    found: str
    mend: str = ""  # the command that changes it


@dataclass(frozen=True, slots=True)
class Probe:
    """One look at the host whose files lie below the path that it is given: everywhere but in tests, /."""

    name: str
    look: Callable[[Path], Seen]
    mend: str = ""  # where it cannot even be tried
    required: bool = False  # where it cannot be tried, nothing runs


def ok(found: str) -> Seen:
    """Nothing is amiss."""
    return Seen("ok", found)


def warn(found: str, mend: str) -> Seen:
    """It works all the same."""
    return Seen("warn", found, mend)


def missing(found: str, mend: str) -> Seen:
    """It is required."""
    return Seen("missing", found, mend)


def read(path: Path) -> str:
    """A small file's text without the white space around it; empty where there is none that may be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def names(directory: Path) -> list[str]:
    """What lies in a directory, in order; nothing where there is none that may be read."""
    try:
        return sorted(each.name for each in directory.iterdir())
    except OSError:
        return []


def within(root: Path, path: str | Path) -> Path:
    """An absolute path of the host as one below `root`."""
    return root / str(path).lstrip("/")
