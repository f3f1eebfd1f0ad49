"""What an engine of a version has: its number decides, and a name of the engine's proves it."""

from __future__ import annotations

import pytest

from pdtransfer.adapters.kit.versions import Since, capabilities

TABLE = {
    "old": Since("0.5.9", "logging:Logger.info"),
    "new": Since("0.5.20"),
    "wrong": Since("0.6", "logging:Log.x"),
}


@pytest.mark.parametrize(
    ("found", "expected"),
    [("0.5.8", set()), ("0.5.9", {"old"}), ("0.5.20+cpu", {"old", "new"}), ("0.5.100.post1", {"old", "new"})],
)
def test_the_number_decides(found: str, expected: set[str]) -> None:
    assert capabilities("an engine", TABLE, found) == expected


def test_a_name_that_the_number_promises_and_the_engine_lacks_ends_the_import() -> None:
    text = r"^an engine 0\.6\.1: has no logging:Log\.x, which 0\.6 is the first to have$"
    with pytest.raises(ImportError, match=text):
        capabilities("an engine", TABLE, "0.6.1")
