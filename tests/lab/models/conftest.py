"""Both kinds of attention that the reference model has."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", params=["mla", "gqa"])
def attention(request: pytest.FixtureRequest) -> str:
    return request.param
