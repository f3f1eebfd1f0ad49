from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """The plugin logs as SGLang does in the same process."""
    logger = logging.getLogger("pdtransfer")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture
def engines(marked: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    from tests.library.adapters.sglang.sglang_ranks import world  # needs torch

    with marked(world) as engines:
        yield engines
