"""What doctor tries for NIXL: which package is installed, and whether it loads with UCX."""

from __future__ import annotations

from pathlib import Path

from ...probe import Seen, ok, warn
from ..engines.probes import version_of, why_not_loaded
from .driver import PACKAGES
from .settings import INSTALL, why_not

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
    present = [name for name in PACKAGES if version_of(name)]
    versions = (
        ", ".join(f"{name.replace('_', '-')} {version_of(name)}" for name in present) or "a package without a version"
    )
    try:
        why = why_not_loaded(_TRY, (present or PACKAGES)[0])
    except TimeoutError as error:
        why = str(error)
    return warn(f"{versions} {why}", INSTALL) if why else ok(f"{versions} (UCX)")
