"""How much of what could be tested is: a part of grids, seeds and examples by default; all of it with --full.

Continuous integration runs everything. --fast is a glance: few cases of each test, no slow ones, no whole processes.
"""

from __future__ import annotations

import inspect
import os
import zlib
from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import pytest

from tests.support.paths import REPO

VARIABLE = "TESTS_EFFORT"  # set before tests are imported, for workers and programs of tests, too
CASES_MAX = 2  # of a test, with --fast
SLOW_FOLDERS = {REPO / "tests" / name for name in ("lab", "house", "serve/integration", "library/sim", "tools")}
FLEET_FOLDERS = {REPO / "tests" / "serve" / name for name in ("integration", "stranger")}
ENGINES_FOLDER = REPO / "tests" / "engines"  # in no effort: they need an environment of their own


class Effort(StrEnum):
    """Named as pytest's options."""

    FULL = "full"
    FAST = "fast"


SHARES = {Effort.FULL: 1, Effort.FAST: 16, None: 4}


def chosen() -> Effort | None:
    return Effort(value) if (value := os.environ.get(VARIABLE)) else None


def some(count: int) -> int:
    """This many seeds or examples: `count` with --full, or else a part of them."""
    return max(1, count // SHARES[chosen()])


def is_picked(case: str) -> bool:
    """Whether this case of a grid is in the part that runs: the same ones each time, and of every value some."""
    return zlib.crc32(case.encode()) % SHARES[chosen()] == 0


def is_in_part(item: pytest.Item) -> bool:
    """Whether the test is in the part that runs without --full."""
    if item.get_closest_marker("full") is not None:
        return False
    return item.get_closest_marker("grid") is None or is_picked(item.nodeid)


def expects_assertion(item: pytest.Item) -> bool:
    """Whether the test has one of our own bugs found by an assertion, which -O leaves out."""
    return isinstance(item, pytest.Function) and "raises(AssertionError" in inspect.getsource(item.obj)


def dealt(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """In an order of which each of xdist's workers gets as large a share, to begin with.

    Each begins with modules of slow tests: half of the workers with fleets, which wait much, the others with what
    computes much. What is left at the end, of which one worker takes some from another, is short, and shares no fleet.
    """
    modules, short = defaultdict[Path, list[pytest.Item]](list), list[pytest.Item]()
    slow, half = SLOW_FOLDERS | FLEET_FOLDERS, workers // 2
    for item in items:
        (short if slow.isdisjoint(item.path.parents) else modules[item.path]).append(item)
    shares = [list[pytest.Item]() for _ in range(workers)]
    for path, module in sorted(modules.items(), key=lambda each: len(each[1]), reverse=True):
        among = shares[half:] if FLEET_FOLDERS.isdisjoint(path.parents) else shares[:half]
        min(among or shares, key=len).extend(module)
    order = list[pytest.Item]()
    for place, share in enumerate(shares):
        missing = (len(items) - len(order)) // (workers - place) - len(share)
        order += share + short[: max(0, missing)]
        del short[: max(0, missing)]
    return order + short
