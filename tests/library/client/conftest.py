"""Fixtures of the clients' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.library.client import copy_gate
from tests.support.client_pair import Pair, client_pair

gate = copy_gate.gate


@pytest.fixture
def pair(marked: Callable[..., AbstractContextManager[Pair]]) -> Iterator[Pair]:
    with marked(client_pair) as pair:
        yield pair
