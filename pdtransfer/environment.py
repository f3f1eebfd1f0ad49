"""The environment of this process. No other module reads or sets environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

PREFIX = "PDTRANSFER_"
SWITCH_INTERVAL_S = 0.0005


def socket_directory() -> Path:
    """Where a user's private sockets live: created with mode 0700 by whoever binds one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "pdtransfer" if runtime else Path(f"/tmp/pdtransfer-{os.getuid()}")  # noqa: S108 (0700, owner checked)


def cache_directory() -> Path:
    """Where compiled kernels are kept between runs."""
    if chosen := os.environ.get(PREFIX + "CACHE", ""):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "pdtransfer"


def child_environment() -> dict[str, str]:
    """The environment for processes that we start and configure by flags alone: ours, less every PDTRANSFER_*
    but the place of the cache."""
    return {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) or k == PREFIX + "CACHE"}


def enter_environment(variables: Mapping[str, str]) -> None:
    """Makes them this process's: for a child that is a library's own, before it is imported."""
    os.environ.update(variables)


def share_the_interpreter() -> None:
    """Short turns between this process's threads: a busy one otherwise delays the loop by 5 ms. Shorter ones that
    somebody has asked for stay."""
    if sys.getswitchinterval() > SWITCH_INTERVAL_S:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
