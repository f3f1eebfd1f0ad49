"""Components registered under one name in both memories: which of the two a room uses.

A HiSparse request keeps its rows in DRAM, any other in HBM. A component that is registered once serves both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..layout.layout import Component


def leased(components: Sequence[Component], *, enable_hisparse: bool) -> tuple[bool, ...]:
    """Whether a room of this kind uses each component."""
    repeated_names = _repeated_names(components)
    memory = "dram" if enable_hisparse else "hbm"
    return tuple(component.name not in repeated_names or component.memory == memory for component in components)


def shares_prefixes(components: Sequence[Component], *, enable_hisparse: bool) -> bool:
    """Whether rooms of this kind share prompts. Where names are registered twice, only HiSparse rooms do."""
    return enable_hisparse or not _repeated_names(components)


def labels(components: Sequence[Component]) -> tuple[str, ...]:
    """Names for people: with the memory, where a name is registered twice."""
    repeated_names = _repeated_names(components)
    named = [(component.name, component.memory) for component in components]
    return tuple(f"{name} in {memory}" if name in repeated_names else name for name, memory in named)


def repeated(components: Sequence[Component]) -> str:
    """A name that is registered twice in one memory; empty without one."""
    counts = Counter((component.name, component.memory) for component in components)
    return next((name for (name, _), count in counts.items() if count > 1), "")


def _repeated_names(components: Sequence[Component]) -> frozenset[str]:
    memories: dict[str, set[str]] = {}
    for component in components:
        memories.setdefault(component.name, set()).add(component.memory)
    return frozenset(name for name, registered in memories.items() if len(registered) > 1)
