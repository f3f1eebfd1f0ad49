"""What a benchmark shows a person, and its figures by the end of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pdtransfer_lab.bench import report


def printed(
    lines: tuple[report.Line, ...],
    figures: report.Figures,
    measure: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What a person reads; KeyError where a line names a figure that is missing."""
    assert report.show(figures, lines, measure, json=False) == 0
    return capsys.readouterr().out


def sizes(figures: report.Figures, suffix: str) -> list[float]:
    return [float(value) for name, value in figures.items() if name.endswith(suffix)]
