"""Components that describe the same KV: which of them a room uses, and which a writer.

Of two under one name in both memories a HiSparse request uses that in DRAM, any other that in HBM. A component that is
registered once serves both.

Two of unequal names may describe the same bytes by unequal rows, as whole blocks and as tokens. One of them stands in
for the other, with writers that do not have the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from ..layout.layout import Component

StandIns = Mapping[str, str]
"""By a component's name: the name of the one that it stands in for."""
NO_STAND_INS: StandIns = MappingProxyType({})


def used_with(components: Sequence[Component], names: Collection[str], stand_ins: StandIns) -> tuple[Component, ...]:
    """The components without those that are not used with a writer that has the `names`: of each pair one stays."""
    unused = {
        original if stand_in in names and original not in names else stand_in
        for stand_in, original in stand_ins.items()
    }
    return tuple(component for component in components if component.name not in unused)


def sent_by_both(shares: Mapping[str, Sequence[Component]], stand_ins: StandIns) -> str:
    """Empty if the shares, by source, have one of each pair at most; else a line that names both and their sources.
    These send the same rows, and no count of planes shows whether they send each once."""
    senders: dict[str, list[str]] = {}
    for source, share in shares.items():
        for component in share:
            senders.setdefault(component.name, []).append(source)
    for stand_in, original in stand_ins.items():
        if stand_in in senders and original in senders:
            first, second = ", ".join(senders[original]), ", ".join(senders[stand_in])
            return f"components {original!r} from {first} and {stand_in!r} from {second} are the same KV"
    return ""


def leased(components: Sequence[Component], *, enable_hisparse: bool) -> tuple[bool, ...]:
    """For each component, True if a room of this kind uses it."""
    repeated_names = _repeated_names(components)
    memory = "dram" if enable_hisparse else "hbm"
    return tuple(component.name not in repeated_names or component.memory == memory for component in components)


def shares_prefixes(components: Sequence[Component], *, enable_hisparse: bool) -> bool:
    """True if rooms of this kind share prompts. Where names are registered twice, only HiSparse rooms do."""
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
