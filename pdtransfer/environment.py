"""The environment of this process. No other module reads or sets environment variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PREFIX = "PDTRANSFER_"
SWITCH_INTERVAL_S = 0.0005
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True": torchrun itself listens on MASTER_PORT
LAUNCHER_VARIABLES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", AGENT_STORE


def socket_directory() -> Path:
    """The directory of a user's private sockets; whoever binds a socket there creates it with mode 0700."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "pdtransfer" if runtime else Path(f"/tmp/pdtransfer-{os.getuid()}")  # noqa: S108 (0700, owner checked)


def cache_directory() -> Path:
    """The directory where compiled kernels are kept between runs."""
    if chosen := os.environ.get(PREFIX + "CACHE", ""):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "pdtransfer"


def launcher_variables() -> dict[str, str]:
    """What torchrun, or a launcher like it, says of this process: those of LAUNCHER_VARIABLES that are set."""
    return {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ}


def child_environment() -> dict[str, str]:
    """The environment for child processes that are configured by flags alone: this process's, without a launcher's
    variables, and without PDTRANSFER_* except the cache directory."""
    left_out = {name for name in os.environ if name.startswith(PREFIX) and name != PREFIX + "CACHE"}
    return {name: value for name, value in os.environ.items() if name not in left_out.union(LAUNCHER_VARIABLES)}


def share_the_interpreter() -> None:
    """Shortens the interpreter's switch interval, since a busy thread otherwise delays the loop by 5 ms. A shorter
    interval is kept."""
    if sys.getswitchinterval() > SWITCH_INTERVAL_S:
        sys.setswitchinterval(SWITCH_INTERVAL_S)


def adapter_settings(engine: str) -> str:
    """What PDTRANSFER_<ENGINE> holds: the settings of an adapter, for engines whose own configuration cannot hold
    them."""
    return os.environ.get(PREFIX + engine.upper(), "")
