"""What is installed: Python and its packages, torch, the native copy, Mooncake and what it is linked to."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ...environment import cache_directory, child_environment
from ...kernels import load
from ...probe import VENV, Seen, missing, ok, warn, within
from ...transports.mooncake import why_not

_WHEELS = {  # of one module, `mooncake`; what each is for
    "mooncake-transfer-engine-non-cuda": "TCP and RDMA",
    "mooncake-transfer-engine": "CUDA 12",
    "mooncake-transfer-engine-cuda13": "CUDA 13",
}
_IMPORT_S = 30.0


def python(_root: Path) -> Seen:
    """Which one runs."""
    return ok(f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


def packages(_root: Path) -> Seen:
    """Those that every daemon imports."""
    lacking = [name for name in ("aiohttp", "prometheus_client", "uvloop") if importlib.util.find_spec(name) is None]
    if lacking:
        return missing(f"no {', '.join(lacking)}", VENV)
    return ok(f"all there; uvloop {importlib.import_module('uvloop').__version__}")


def torch(root: Path) -> Seen:
    """The build and the card; importing it is the only proof that it loads."""
    if importlib.util.find_spec("torch") is None:
        return missing("none: prefill and decode need it", VENV)
    module = importlib.import_module("torch")
    build = str(module.__version__)
    card = next((path for path in ("/dev/nvidia0", "/dev/kfd") if within(root, path).exists()), None)
    if module.cuda.is_available():
        return ok(f"{build}, {module.cuda.get_device_name(0)}")
    if card is not None:
        mend = f"{sys.executable} -m uv pip install --reinstall --torch-backend=auto torch"
        return warn(f"{build} does not see the card at {card}", mend)
    return ok(f"{build}, CPU (this host has no GPU)")


def copy(_root: Path) -> Seen:
    """The compiled copy, or numpy in its place."""
    native = load()
    if native.used:
        return ok(native.text)
    return warn(native.text, "apt-get install -y g++")


def cache(_root: Path) -> Seen:
    """Where compiled code is kept."""
    directory = cache_directory()
    above = next(path for path in (directory, *directory.parents) if path.exists())
    if os.access(above, os.W_OK | os.X_OK):
        return ok(str(directory))
    return warn(f"{above} cannot be written", "export PDTRANSFER_CACHE=<a directory of this user>")


def curve(_root: Path) -> Seen:
    """Keys, without which nothing beyond loopback is spoken to."""
    zmq = importlib.import_module("zmq")
    build = f"libzmq {zmq.zmq_version()}"
    if zmq.has("curve"):
        return ok(build)
    mend = f"{sys.executable} -m pip install --force-reinstall --only-binary pyzmq pyzmq"
    return warn(f"{build} without it: loopback only", mend)


def mooncake(_root: Path) -> Seen:
    """Which wheel it is, and whether it loads: in a process of its own, since a wrong one may end the process."""
    present = [name for name in _WHEELS if _version(name)]
    if not present:
        return warn("none: KV reaches arenas of this host alone", "pip install 'pdtransfer[mooncake]'")
    found = ", ".join(f"{name} {_version(name)} ({_WHEELS[name]})" for name in present)
    if len(present) > 1:
        return warn(
            f"{found}: of one module, and the last one installed is it", f"pip uninstall {' '.join(present[1:])}"
        )
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
        return warn(
            f"{found} does not load: {last[:200]}", f"pip uninstall {present[0]}; pip install {next(iter(_WHEELS))}"
        )
    return ok(found)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
