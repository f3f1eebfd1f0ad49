"""The command demo, bound to flags."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ...bounds import match
from ...errors import ConfigError
from .demo_config import DemoConfig
from .flags import FLAT


def demo(
    config: Annotated[DemoConfig | None, FLAT] = None,
    *,
    router: Annotated[str, Parameter(help="Use the running router at this URL, and start nothing.")] = "",
    metrics: Annotated[
        tuple[str, ...], Parameter(help="host:port of a decode daemon behind it; may be repeated.")
    ] = (),
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
