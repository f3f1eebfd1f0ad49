"""Logs of this process go to a file for one test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pdtransfer.serve.process import logs
from pdtransfer.serve.settings.router import RouterConfig


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Starts them as a daemon does, and returns their file."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level

    def start(**more: Any) -> Path:
        logs.start(RouterConfig(**{"node": "router", "log_file": tmp_path / "log"} | more))
        return tmp_path / "log"

    yield start
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        with suppress(OSError):  # of /dev/full
            handler.close()
    root.handlers[:] = before
    root.setLevel(level)
