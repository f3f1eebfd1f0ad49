"""How a bench is told: a few lines for people, one JSON object for programs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from json import dumps
from typing import NamedTuple, TypeAlias

from rich.console import Console
from rich.table import Table

Figures: TypeAlias = dict[str, float | int | str]
"""By name, which ends with the unit."""


class Line(NamedTuple):
    """What was measured, its figures as a format string over their names, and what there is to compare them with."""

    what: str
    figure: str
    beside: str = ""


def show(figures: Figures, lines: Sequence[Line], *, json: bool) -> int:
    """Prints them, with how busy the host was; 0, a command's status."""
    load = round(os.getloadavg()[0], 2)
    if json:
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
        print(dumps(rounded | {"load_1min": load}))
        return 0
    table = Table(box=None, pad_edge=False, show_header=False, caption=f"load {load}", caption_justify="left")
    for line in lines:
        table.add_row(line.what, line.figure.format(**figures), line.beside.format(**figures))
    Console(highlight=False).print(table)
    return 0
