"""The router that a test is about, and its servers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.support.vllm_servers import ServerSite, server_site


@pytest.fixture
def site(marked: Callable[..., AbstractAsyncContextManager[ServerSite]]) -> AbstractAsyncContextManager[ServerSite]:
    return marked(server_site)
