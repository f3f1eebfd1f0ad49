"""The router that a test is about."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.serve.router import router_site
from tests.serve.router.router_site import Site


@pytest.fixture
def site(marked: Callable[..., AbstractAsyncContextManager[Site]]) -> AbstractAsyncContextManager[Site]:
    return marked(router_site.site)
