"""Gates at which the engines of a module's fleet wait, and what it has at rest."""

from __future__ import annotations

import pytest

from tests.support.fleets import Gates, Site
from tests.support.healing import Rest, met
from tests.support.waiting import Running


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Gates:
    return Gates(tmp_path_factory.mktemp("gates"))


@pytest.fixture(scope="module")
def before(site: Running[Site]) -> Rest:
    """What each of the module's processes has at rest."""
    return site.runner.run(met(site.value))
