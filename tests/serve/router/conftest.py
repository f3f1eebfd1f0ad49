"""The router that a test is about."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.router import router_site
from tests.serve.router.client_keys import A, written
from tests.serve.router.router_site import Site
from tests.support.vllm_servers import ServerSite, server_site


@pytest.fixture
def site(marked: Callable[..., AbstractAsyncContextManager[Site]]) -> AbstractAsyncContextManager[Site]:
    return marked(router_site.site)


@pytest.fixture
def young_heap() -> Iterator[None]:
    """A collection looks at what the test has made alone, and not at all that the tests before it have left."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["pdtransfer", "vllm"])
def either(
    request: pytest.FixtureRequest, marked: Callable[..., Any], tmp_path: Path
) -> AbstractAsyncContextManager[Site | ServerSite]:
    """A router of each kind of backend. `keys` are the limits of A, the one API key that it takes then."""

    def made(*, keys: str | None = None, **more: Any) -> AbstractAsyncContextManager[Site | ServerSite]:
        if keys is not None:
            more["api_keys"] = written(tmp_path / "keys", f"{A} a {keys}".strip())
        return (server_site if request.param == "vllm" else router_site.site)(**more)

    return marked(made)
