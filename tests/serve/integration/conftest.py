"""Gates at which the engines of a module's fleet wait."""

from __future__ import annotations

import pytest

from tests.support.fleets import Gates


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Gates:
    return Gates(tmp_path_factory.mktemp("gates"))
