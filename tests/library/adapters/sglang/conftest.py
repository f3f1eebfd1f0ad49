from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """The plugin logs as SGLang does in the same process."""
    logger = logging.getLogger("pdtransfer")
    before = logger.level
    yield
    logger.setLevel(before)
