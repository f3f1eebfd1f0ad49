"""Matches a writer's components with those of a session's Register, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ..errors import LayoutMismatchError, RemoteProtocolError
from ..handoff.effects import Write
from ..handoff.sharing import pair_share
from ..layout.checksum import Lines, lines_of
from ..layout.layout import Component
from ..layout.pairing import Pairing
from ..wire import Reach

Planes: TypeAlias = tuple[int, tuple[int, int]]  # a component of Register, and layers of it


def paired(
    ours: Mapping[str, Component], components: tuple[Component, ...], reach: Reach, *, hbm_direct: bool
) -> tuple[Pairing, ...]:
    """A pairing for each of `components`, the peer's, in order; with `hbm_direct` those in HBM are in that of `reach`.

    Raises LayoutMismatchError where one is of another model than ours, RemoteProtocolError where it leaves its memory.
    """
    pairings: list[Pairing] = []
    for index, theirs in enumerate(components):
        name = f"component {theirs.name!r}"
        if (component := ours.get(theirs.name)) is None:
            raise LayoutMismatchError([f"{name}: this pool holds {', '.join(ours)}"])
        in_hbm = hbm_direct and theirs.memory != "dram"
        try:
            theirs.layout.check_within(reach.hbm_base + reach.hbm_bytes if in_hbm else reach.arena_bytes, name)
        except ValueError as error:
            raise RemoteProtocolError(f"components[{index}].layout", str(error)) from None
        fields = [(field, getattr(theirs, field), getattr(component, field)) for field in ("tokens_per_row", "span")]
        if differences := [f"{name}.{field}: {a} there, {b} here" for field, a, b in fields if a != b]:
            raise LayoutMismatchError(differences)
        pairings.append(pair_share(component.layout, theirs.layout))
    return tuple(pairings)


def lines_for(
    order: Write, ours: Mapping[str, Component], components: tuple[Component, ...], kept: dict[Planes, Lines]
) -> Lines:
    """Where the heads of the order's rows lie in our pool; computed once for each key of `kept`."""
    key = order.component, order.layers
    if (lines := kept.get(key)) is None:
        theirs = components[order.component]
        lines = kept[key] = lines_of(theirs.name, ours[theirs.name].layout, layers=order.layers, like=theirs.layout)
    return lines
