"""What doctor tries for Mooncake: which wheel is installed, and whether it loads."""

from __future__ import annotations

import sys
from pathlib import Path

from ...environment import pip_install
from ...probe import Seen, ok, warn
from ..engines.probes import version_of, why_not_loaded
from .settings import why_not

_WHEELS = {  # wheels that provide the module `mooncake`, and what each is for
    "mooncake-transfer-engine-non-cuda": "TCP and RDMA",
    "mooncake-transfer-engine": "CUDA 12",
    "mooncake-transfer-engine-cuda13": "CUDA 13",
}
_INSTALL = pip_install("mooncake")


def wheel(_root: Path) -> Seen:
    """Which wheel of Mooncake is installed, and whether it loads.

    It is imported in a process of its own, because a wrong wheel may crash the process.
    """
    present = [name for name in _WHEELS if version_of(name)]
    if not present:
        return warn("none: KV reaches arenas of this host alone", _INSTALL)
    wheels = ", ".join(f"{name} {version_of(name)} ({_WHEELS[name]})" for name in present)
    if len(present) > 1:
        return warn(f"{wheels}: these replace each other, keep one", f"pip uninstall {' '.join(present[1:])}")
    if reason := why_not():
        problem, _, mend = reason.rpartition(": ")
        return warn(f"{wheels}: {problem}", mend)
    try:
        why = why_not_loaded("from mooncake.engine import TransferEngine")
    except TimeoutError as error:
        return warn(f"{wheels} {error}", f"{sys.executable} -X importtime -c 'import mooncake.engine'")
    if why:
        return warn(f"{wheels} {why}", f"pip uninstall {present[0]}; {pip_install('mooncake')}")
    return ok(wheels)
