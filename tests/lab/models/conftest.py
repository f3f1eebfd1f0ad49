"""Both kinds of attention that the reference model has; without torch there is none."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")


@pytest.fixture(scope="module", params=["mla", "gqa"])
def attention(request: pytest.FixtureRequest) -> str:
    return request.param
