"""The router that a test is about."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager

import pytest

from tests.serve.router import router_site
from tests.serve.router.router_site import Site


@pytest.fixture
def site(marked: Callable[..., AbstractAsyncContextManager[Site]]) -> AbstractAsyncContextManager[Site]:
    return marked(router_site.site)


@pytest.fixture
def young_heap() -> Iterator[None]:
    """A collection looks at what the test has made alone, and not at all that the tests before it have left."""
    gc.freeze()
    yield
    gc.unfreeze()
