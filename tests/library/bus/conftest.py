"""Nodes without keys, and one that raw peers dial."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from pdtransfer.bus.keys import KeyPair
from pdtransfer.wire import Ping, Pong
from tests.support.bus_peers import ANY_PORT, Context, Node, Raw, context, hello, pair

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


@dataclass
class Listening:
    """A node that listens, and how raw peers dial it: with the keys of a name that it lists, or all without keys."""

    node: Node
    endpoint: str
    own: KeyPair | None
    keys: dict[str, KeyPair]
    context: Context

    def raw(self, name: str = "", **more: Any) -> Raw:
        if self.own is not None:
            more = {"keys": self.keys[name], "server": self.own.public, **more}
        return Raw(self.context, self.endpoint, **more)

    async def met(self, name: str, **more: Any) -> Raw:
        """One that has said Hello, and been answered."""
        raw = self.raw(name, **more)
        raw.send(hello(name), Ping(1))
        assert await raw.receive() == Pong(1)
        return raw


@asynccontextmanager
async def listening(context: Context, *names: str, **more: Any) -> AsyncIterator[Listening]:
    own, keys = pair() if names else None, {name: pair() for name in names}
    async with Node("p", own, keys if names else None, **more) as node:
        yield Listening(node, await node.bus.bind(ANY_PORT), own, keys, context)


@pytest.fixture
def it(marked: Callable[..., AbstractAsyncContextManager[Listening]], context: Context) -> Any:
    return marked(partial(listening, context))
