from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.library.adapters.sglang.sglang_ranks import World, world


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """The plugin logs as SGLang does in the same process."""
    logger = logging.getLogger("pdtransfer")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture
def engines(marked: Callable[..., AbstractContextManager[World]]) -> Iterator[World]:
    with marked(world) as engines:
        yield engines
