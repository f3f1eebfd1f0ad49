"""How a benchmark is printed: a few lines for people, one JSON object for programs."""

from __future__ import annotations

import inspect
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import NamedTuple, TypeAlias

from rich.console import Console
from rich.table import Table

from pdtransfer import __version__
from pdtransfer.kernels.driver import count, driver

Figures: TypeAlias = dict[str, float | int | str]
"""By name, which ends with the unit."""


class Line(NamedTuple):
    """What was measured, its figures as a format string over their names, and what to compare them with."""

    what: str
    figure: str
    beside: str = ""


def show(figures: Figures, lines: Sequence[Line], *measures: Callable[..., object], json: bool) -> int:
    """Prints the figures that `measures` returned, with how busy the host was. Returns 0, a command's status."""
    table = [[column.format(**figures) for column in line] for line in lines]
    if json:
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
        print(dumps(rounded | about(*measures) | {"tables": [[["", "", ""], *table]]}))
        return 0
    shown = Table(box=None, pad_edge=False, show_header=False, caption=f"load {load()}", caption_justify="left")
    for row in table:
        shown.add_row(*row)
    Console(highlight=False).print(shown)
    return 0


def print_tables(
    tables: Iterable[Sequence[Sequence[str]]], *, width: int, title: str = "", names: Collection[str] | None = None
) -> None:
    """Prints tables, each with its head first, and `title` above the first. With `names`, only the columns with these
    heads are flush left."""
    for head, *rows in tables:
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in head:
            table.add_column(name, justify="left" if names is None or name in names else "right")
        for row in rows:
            table.add_row(*row)
        Console(highlight=False, width=width).print(table)
        title = ""


def about(*measures: Callable[..., object]) -> dict[str, object]:
    """What belongs to figures wherever they are shown. The docstrings of the functions that measured are the method."""
    module = measures[0].__module__
    return {
        "part": module.rpartition(".")[2],
        "title": (inspect.getdoc(sys.modules[module]) or "").partition("\n\n")[0],
        "method": "\n\n".join(inspect.getdoc(measure) or "" for measure in measures),
        "host": host(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "load_1min": load(),
    }


def load() -> float:
    """Processes that ran or waited to, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def host() -> str:
    """Processor, cores of this process, memory, GPUs, kernel and Python: what figures depend on, and no name."""
    models = [line.partition(":")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cards = Counter(driver().cuDeviceGetName(64, driver().cuDeviceGet(index)[1])[1] for index in range(count()))
    parts = [
        (models or [platform.machine()])[0].strip(),
        f"{len(os.sched_getaffinity(0))} cores",
        f"{memory_bytes / (1 << 30):.0f} GiB",
        *(f"{number} x {name.split(bytes(1))[0].decode()}" for name, number in cards.items()),
        f"Linux {platform.release().partition('-')[0]}",
        f"Python {platform.python_version()}",
    ]
    return ", ".join(parts)


def commit() -> str:
    """The commit of the checkout that this package runs from, else its version."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return f"version {__version__}"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return f"version {__version__}"
