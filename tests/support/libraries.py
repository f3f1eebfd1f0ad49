"""The libraries of engines, each a case of a test: those that are not installed are skipped."""

from __future__ import annotations

import pytest

from pdtransfer.transports.engines import card_use, process
from pdtransfer.transports.engines.library import Library
from pdtransfer.transports.mooncake import MooncakeLibrary
from pdtransfer.transports.nixl import NixlLibrary
from tests.support.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def slow_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module or folder that imports it, an engine may take as long to start as a busy machine needs."""
    monkeypatch.setattr(process, "_READY_SECONDS", PATIENCE_S)
    monkeypatch.setattr(card_use, "_PROBE_SECONDS", PATIENCE_S)


LIBRARIES: tuple[Library, ...] = MooncakeLibrary(), NixlLibrary()


def _marks(library: Library) -> list[pytest.MarkDecorator]:
    skipped = pytest.mark.skipif(bool(library.why_not()), reason=library.why_not())
    return [skipped] if library is LIBRARIES[0] else [skipped, pytest.mark.full]  # what differs has tests of its own


on_each_library = pytest.mark.parametrize(
    "library", [pytest.param(library, id=library.name, marks=_marks(library)) for library in LIBRARIES]
)
