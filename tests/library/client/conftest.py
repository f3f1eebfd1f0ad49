"""Fixtures of the clients' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial

import pytest

from tests.library.client import copy_gate
from tests.library.client.async_pair import AsyncPair, started
from tests.support.client_pair import Pair, client_pair

gate = copy_gate.gate


@pytest.fixture
def pair(marked: Callable[..., AbstractContextManager[Pair]]) -> Iterator[Pair]:
    with marked(client_pair) as pair:
        yield pair


@pytest.fixture
def it(marked: Callable[..., AbstractContextManager[Pair]]) -> Iterator[AbstractAsyncContextManager[AsyncPair]]:
    """Entered on the test's loop."""
    with marked(partial(client_pair, start=False)) as pair:
        yield started(pair)
