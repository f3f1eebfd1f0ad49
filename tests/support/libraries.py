"""The libraries of engines, each a case of a test: those that are not installed are skipped."""

from __future__ import annotations

import pytest

from pdtransfer.transports.engines.library import Library
from pdtransfer.transports.mooncake import MooncakeLibrary
from pdtransfer.transports.nixl import NixlLibrary

LIBRARIES: tuple[Library, ...] = MooncakeLibrary(), NixlLibrary()

on_each_library = pytest.mark.parametrize(
    "library",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.skipif(bool(each.why_not()), reason=each.why_not()))
        for each in LIBRARIES
    ],
)
