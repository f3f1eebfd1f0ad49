"""What doctor tries for NIXL: which package is installed, and whether it loads with UCX."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ...environment import child_environment
from ...probe import Seen, ok, warn
from .driver import PACKAGES
from .settings import INSTALL, why_not

_IMPORT_S = 30.0
_TRY = """
import sys
from importlib import import_module
nixl = import_module(sys.argv[1] + "._bindings")
sys.exit("UCX" not in nixl.nixlAgent("doctor", nixl.nixlAgentConfig()).getAvailPlugins() and "it has no UCX plugin")
"""


def package(_root: Path) -> Seen:
    """Which package of NIXL is installed, and whether it loads, tried in a process of its own."""
    if why_not():
        return ok(f"not installed, and needed only for --transport nixl: {INSTALL}")
    present = [name for name in PACKAGES if _version(name)]
    found = ", ".join(f"{name.replace('_', '-')} {_version(name)}" for name in present) or "a package without a version"
    try:
        tried = subprocess.run(  # noqa: S603 (our own line)
            [sys.executable, "-c", _TRY, (present or PACKAGES)[0]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_S,
            env=child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return warn(f"{found} does not load within {_IMPORT_S:.0f} s", INSTALL)
    if tried.returncode:
        last = (tried.stderr.strip().splitlines() or [f"status {tried.returncode}"])[-1]
        return warn(f"{found} does not load: {last[:200]}", INSTALL)
    return ok(f"{found} (UCX)")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
