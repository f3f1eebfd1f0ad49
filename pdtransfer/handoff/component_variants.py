"""Components that are registered twice under one name, once in each memory: which of the two a room has rows of.

A request that wants HiSparse keeps its rows in DRAM, any other has them in HBM. What is registered once serves both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..layout.layout import Component


def leased(components: Sequence[Component], *, enable_hisparse: bool) -> tuple[bool, ...]:
    """Of each, whether a room of either kind has rows of it."""
    twins = _twins(components)
    memory = "dram" if enable_hisparse else "hbm"
    return tuple(each.name not in twins or each.memory == memory for each in components)


def shares_prefixes(components: Sequence[Component], *, enable_hisparse: bool) -> bool:
    """Whether rooms of this kind share the prompts that others have left: only one kind can, and that is the sparse."""
    return enable_hisparse or not _twins(components)


def labels(components: Sequence[Component]) -> tuple[str, ...]:
    """What people know each by: its name, and where that is not enough its memory."""
    twins = _twins(components)
    return tuple(f"{each.name} in {each.memory}" if each.name in twins else each.name for each in components)


def repeated(components: Sequence[Component]) -> str:
    """A name that is there twice in one memory, or empty."""
    counts = Counter((each.name, each.memory) for each in components)
    return next((name for (name, _), count in counts.items() if count > 1), "")


def _twins(components: Sequence[Component]) -> frozenset[str]:
    memories: dict[str, set[str]] = {}
    for each in components:
        memories.setdefault(each.name, set()).add(each.memory)
    return frozenset(name for name, found in memories.items() if len(found) > 1)
