"""What an adapter warns of where hand-offs fail one after the other."""

from __future__ import annotations

import pytest


def in_a_row(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings."""
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [text for text in texts if text.startswith("the last 5 hand-offs have all failed")]
