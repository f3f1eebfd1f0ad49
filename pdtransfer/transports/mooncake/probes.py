"""What doctor tries for Mooncake: which wheel is installed, and whether it loads."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ...environment import child_environment, pip_install
from ...probe import Seen, ok, warn
from .settings import why_not

_WHEELS = {  # wheels that provide the module `mooncake`, and what each is for
    "mooncake-transfer-engine-non-cuda": "TCP and RDMA",
    "mooncake-transfer-engine": "CUDA 12",
    "mooncake-transfer-engine-cuda13": "CUDA 13",
}
_INSTALL = pip_install("mooncake")
_IMPORT_S = 30.0


def wheel(_root: Path) -> Seen:
    """Which wheel of Mooncake is installed, and whether it loads.

    It is imported in a process of its own, because a wrong wheel may crash the process.
    """
    present = [name for name in _WHEELS if _version(name)]
    if not present:
        return warn("none: KV reaches arenas of this host alone", _INSTALL)
    found = ", ".join(f"{name} {_version(name)} ({_WHEELS[name]})" for name in present)
    if len(present) > 1:
        return warn(f"{found}: these replace each other, keep one", f"pip uninstall {' '.join(present[1:])}")
    if reason := why_not():
        what, _, mend = reason.rpartition(": ")
        return warn(f"{found}: {what}", mend)
    command = [sys.executable, "-c", "from mooncake.engine import TransferEngine"]
    try:
        tried = subprocess.run(  # noqa: S603 (our own line)
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_S,
            env=child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return warn(
            f"{found} does not load within {_IMPORT_S:.0f} s",
            f"{sys.executable} -X importtime -c 'import mooncake.engine'",
        )
    if tried.returncode:
        last = (tried.stderr.strip().splitlines() or [f"status {tried.returncode}"])[-1]
        return warn(f"{found} does not load: {last[:200]}", f"pip uninstall {present[0]}; {pip_install('mooncake')}")
    return ok(found)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
