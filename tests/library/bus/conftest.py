"""Nodes without keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from tests.support.bus_peers import Node

Given = Callable[..., AbstractAsyncContextManager[Node]]


@asynccontextmanager
async def opened(name: str, **more: Any) -> AsyncIterator[Node]:
    async with Node(name, **more) as node:  # its bus is made within a loop
        yield node


@pytest.fixture
def prefill(marked: Given) -> AbstractAsyncContextManager[Node]:
    return marked(partial(opened, "p"))


@pytest.fixture
def decode_node(marked: Given) -> AbstractAsyncContextManager[Node]:
    return marked(partial(opened, "d"))
