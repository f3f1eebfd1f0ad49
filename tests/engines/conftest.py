"""Tests with real engines of others. Each is skipped, with the reason, where their environment has not been made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support import sglang_engine, vllm_engine
from tests.support.vllm_engine import Checkpoints, StartEngine, VllmEngine
from tests.support.vllm_server import ServerPair, server_pair


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever stands in this folder has the mark, and is skipped where an engine in its module's name is missing."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.engines)
        for name, engine in (("vllm", vllm_engine), ("sglang", sglang_engine)):
            if name in item.path.stem and (reason := engine.why_not()):
                item.add_marker(pytest.mark.skip(reason=reason))
    # Ray's comes first: continuous integration ends tests that are not finished in its time, and has run this one then.
    items.sort(key=lambda item: item.path.name != "test_vllm_ray.py")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoints]:
    with Checkpoints(tmp_path_factory.mktemp("checkpoints")) as made:
        yield made


@pytest.fixture(scope="session")
def sglang_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoints]:
    folder = tmp_path_factory.mktemp("checkpoints")
    with Checkpoints(folder, sglang_engine.PYTHON, sglang_engine.ENVIRONMENT) as made:
        yield made


@pytest.fixture
def start_engine(checkpoints: Checkpoints, tmp_path: Path) -> Iterator[StartEngine]:
    """Starts engines, and ends them with the test."""
    with ExitStack() as stack:

        def start(family: str, name: str = "engine", **options: Any) -> VllmEngine:
            return stack.enter_context(VllmEngine(checkpoints.path(family), tmp_path / f"{name}.log", **options))

        yield start


@pytest.fixture(scope="session")
def vllm_servers(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPair]:
    """Two vLLM servers behind our router, for all tests that break neither."""
    with server_pair(checkpoints, tmp_path_factory.mktemp("servers")) as started:
        yield started
