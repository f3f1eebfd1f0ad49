"""The commands prefill, decode and demo, bound to flags."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ...bounds import match
from ...environment import without_collection
from ...errors import ConfigError
from ..process import logs
from ..settings.worker import DecodeConfig, PrefillConfig
from .demo_config import DemoConfig
from .flags import FLAT
from .settings_sources import warn_of_unknown


def prefill(config: Annotated[PrefillConfig | None, FLAT] = None) -> int:
    """Runs a prefill daemon."""
    return _run(config or PrefillConfig())


def decode(config: Annotated[DecodeConfig | None, FLAT] = None) -> int:
    """Runs a decode daemon."""
    return _run(config or DecodeConfig())


def _run(config: PrefillConfig | DecodeConfig) -> int:
    with without_collection():
        from ..worker.daemon import run

    logs.start_for(config)
    warn_of_unknown(config)
    return run(config)


def demo(
    config: Annotated[DemoConfig | None, FLAT] = None,
    *,
    router: Annotated[str, Parameter(help="Use the running router at this URL, and start nothing.")] = "",
    metrics: Annotated[tuple[str, ...], Parameter(help="host:port of a decode daemon there; may be repeated.")] = (),
) -> int:
    """Runs the demo."""
    from .demo import run

    config = config or DemoConfig()
    if metrics and not router:
        raise ConfigError(f"metrics = {metrics[0]!r}: needs --router, the URL of a running fleet")
    if router:
        match("router", router, r"https?://[^/\s]+/?", "the URL of a running router, http://host:port")
    for address in metrics:
        match("metrics", address, r"[^/\s]+:\d{1,5}", "host:port of a decode daemon's /metrics")
    return run(config, router=router, metrics=metrics) if router else run(config)
