"""The commands prefill, decode and demo, bound to flags."""

from __future__ import annotations

from typing import Annotated

from ...environment import without_collection
from ..process import logs
from ..settings.node import FLAT
from ..settings.worker import DecodeConfig, PrefillConfig
from .demo_config import DemoConfig
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

    logs.start(config)
    warn_of_unknown(config)
    return run(config)


def demo(config: Annotated[DemoConfig | None, FLAT] = None) -> int:
    """Runs the demo."""
    from .demo import run

    return run(config or DemoConfig())
