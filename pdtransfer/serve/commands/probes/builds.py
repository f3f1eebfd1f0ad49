"""Probes of installed software: Python and its packages, torch, the native copy."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from ....environment import cache_directory, pip_install
from ....kernels import load
from ....probe import Seen, ok, warn, within


def python(_root: Path) -> Seen:
    """The version of Python."""
    return ok(f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


def torch(root: Path) -> Seen:
    """The build of torch and whether it sees the card; only an import proves that it loads."""
    if importlib.util.find_spec("torch") is None:
        return warn("none: checkpoints need it", pip_install("transformers"))
    module = importlib.import_module("torch")
    build = str(module.__version__)
    card = next((path for path in ("/dev/nvidia0", "/dev/kfd") if within(root, path).exists()), None)
    if module.cuda.is_available():
        return ok(f"{build}, {module.cuda.get_device_name(0)}")
    if card is not None:
        mend = f"pip install uv; uv pip install --python {sys.executable} --reinstall --torch-backend=auto torch"
        return warn(f"{build} does not see the GPU at {card}", mend)
    return ok(f"{build}, CPU (this host has no GPU)")


def copy(_root: Path) -> Seen:
    """Reports if the native copy compiles, or numpy replaces it."""
    native = load()
    if native.used:
        return ok(native.text)
    if shutil.which("apt-get") is None:
        return warn(native.text, "install gcc or clang with this host's packages")
    return warn(native.text, "apt-get install -y g++" if os.geteuid() == 0 else "sudo apt-get install -y g++")


def cache(_root: Path) -> Seen:
    """The directory for compiled code."""
    directory = cache_directory()
    above = next(path for path in (directory, *directory.parents) if path.exists())
    if os.access(above, os.W_OK | os.X_OK):
        return ok(str(directory))
    return warn(f"{above} cannot be written", "export PDTRANSFER_CACHE=<a directory of this user>")


def curve(_root: Path) -> Seen:
    """libzmq's support for keys, without which only loopback is allowed."""
    zmq = importlib.import_module("zmq")
    build = f"libzmq {zmq.zmq_version()}"
    if zmq.has("curve"):
        return ok(build)
    mend = f"{sys.executable} -m pip install --force-reinstall --only-binary pyzmq pyzmq"
    return warn(f"{build} without it: loopback only", mend)
