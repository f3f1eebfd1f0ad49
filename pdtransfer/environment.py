"""The environment of this process. No other module reads or sets environment variables."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import cast
from urllib.parse import unquote

PREFIX = "PDTRANSFER_"
SWITCH_INTERVAL_S = 0.0005
_LED, _CACHE, _SGLANG = PREFIX + "LED", PREFIX + "CACHE", PREFIX + "SGLANG"  # what no flag stands for
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True": torchrun itself listens on MASTER_PORT
LAUNCHER_VARIABLES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", AGENT_STORE


def socket_directory() -> Path:
    """The directory of a user's private sockets; whoever binds a socket there creates it with mode 0700."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "pdtransfer" if runtime else Path(f"/tmp/pdtransfer-{os.getuid()}")  # noqa: S108 (0700, owner checked)


def cache_directory() -> Path:
    """The directory where compiled kernels are kept between runs."""
    if chosen := os.environ.get(_CACHE, ""):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "pdtransfer"


def launcher_variables() -> dict[str, str]:
    """What torchrun, or a launcher like it, sets for this process: those of LAUNCHER_VARIABLES that are set."""
    return {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ}


def child_environment() -> dict[str, str]:
    """The environment for child processes that are configured by flags alone: this process's, without a launcher's
    variables, and without PDTRANSFER_* except the cache directory."""
    left_out = {name for name in os.environ if name.startswith(PREFIX) and name != _CACHE}
    return {name: value for name, value in os.environ.items() if name not in left_out.union(LAUNCHER_VARIABLES)}


def rank_environment() -> dict[str, str]:
    """The same for a rank that its leader starts: `led` is true there."""
    return child_environment() | {_LED: "1"}


def led() -> bool:
    """True if a leader has started this rank, which then waits for it on standard input before it reports an error."""
    return os.environ.get(_LED) == "1"


def share_the_interpreter() -> None:
    """Shortens the interpreter's switch interval, since a busy thread otherwise delays the loop by 5 ms. A shorter
    interval is kept."""
    if sys.getswitchinterval() > SWITCH_INTERVAL_S:
        sys.setswitchinterval(SWITCH_INTERVAL_S)


@contextmanager
def without_collection() -> Generator[None]:
    """For imports: what they make stays, and looking for garbage among it takes a tenth of a daemon's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def pip_install(extra: str) -> str:
    """The command that installs an extra of this package from where the package came: a checkout, or a file. Where that
    is not here any more, from a clone: the package is on no index."""
    source = _source()
    return f"pip install '{source or '.'}[{extra}]'{'' if source else ' in a clone of pdtransfer'}"


def complete_environment() -> str:
    """The command that brings what every daemon needs into this process's environment."""
    checkout = _checkout()
    return "make venv" if checkout is not None and Path(sys.prefix) == checkout / ".venv" else pip_install("daemons")


def _checkout() -> Path | None:
    above = Path(__file__).resolve().parent.parent
    return above if (above / "pyproject.toml").is_file() else None


def _source() -> str:
    """The checkout that this process runs from, or what pip installed from if it is still there, a checkout or a wheel;
    else empty."""
    checkout = _checkout()
    if checkout is None:
        try:
            document = distribution("pdtransfer").read_text("direct_url.json") or "{}"
            url = str(cast("dict[str, object]", json.loads(document)).get("url", ""))
        except (PackageNotFoundError, ValueError):
            url = ""
        path = Path(unquote(url.removeprefix("file://")))
        is_source = (path / "pyproject.toml").is_file() or (path.suffix == ".whl" and path.is_file())
        checkout = path if path.is_absolute() and is_source else None
    if checkout is None:
        return ""
    return "." if checkout == Path.cwd() else str(checkout)


def sglang_settings() -> str:
    """The settings of SGLang's adapter, since SGLang's own configuration cannot hold them."""
    return os.environ.get(_SGLANG, "")


def other_variables() -> list[str]:
    """The names of variables of this package that are no business of this module: flags, and typing errors.

    What Kubernetes sets for a service is left out: NAME_SERVICE_HOST, and what begins as NAME_SERVICE_ and NAME_PORT.
    """
    names = sorted(name for name in os.environ if name.startswith(PREFIX))
    services = [name.removesuffix("SERVICE_HOST") for name in names if name.endswith("_SERVICE_HOST")]
    links = tuple(service + part for service in services for part in ("SERVICE_", "PORT"))
    return [name for name in names if name not in (_LED, _CACHE, _SGLANG) and not name.startswith(links)]
