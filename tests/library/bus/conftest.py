"""Nodes without keys, and one that raw peers dial."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from tests.support.bus_peers import Context, Listening, Node, context, listening

__all__ = ["context"]  # a fixture

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


@pytest.fixture
def it(marked: Callable[..., AbstractAsyncContextManager[Listening]], context: Context) -> Any:
    return marked(partial(listening, context))
