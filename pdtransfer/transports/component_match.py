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

Planes: TypeAlias = tuple[int, tuple[int, int]]  # a component of Register, and layers of it


def paired(
    ours: Mapping[str, Component], components: tuple[Component, ...], arena_bytes: int, *, hbm_end: int | None = None
) -> tuple[Pairing, ...]:
    """A pairing for each of `components`, the peer's, in order. Those in HBM end before `hbm_end`, where they are in a
    memory of their own.

    Raises LayoutMismatchError where one is of another model than ours, RemoteProtocolError where it leaves the arena.
    """
    ends = [arena_bytes if hbm_end is None or theirs.memory == "dram" else hbm_end for theirs in components]
    parts = zip(components, ends, strict=True)
    return tuple([_paired(ours, index, theirs, end) for index, (theirs, end) in enumerate(parts)])


def _paired(components: Mapping[str, Component], index: int, theirs: Component, arena_bytes: int) -> Pairing:
    named = f"component {theirs.name!r}"
    if (ours := components.get(theirs.name)) is None:
        raise LayoutMismatchError([f"{named}: this pool holds {', '.join(components)}"])
    try:
        theirs.layout.check_within(arena_bytes, named)
    except ValueError as error:
        raise RemoteProtocolError(f"components[{index}].layout", str(error)) from None
    fields = {"tokens_per_row": (theirs.tokens_per_row, ours.tokens_per_row), "span": (theirs.span, ours.span)}
    if differences := [f"{named}.{name}: {a} there, {b} here" for name, (a, b) in fields.items() if a != b]:
        raise LayoutMismatchError(differences)
    return pair_share(ours.layout, theirs.layout)


def lines_for(
    order: Write, ours: Mapping[str, Component], components: tuple[Component, ...], kept: dict[Planes, Lines]
) -> Lines:
    """Where the heads of the order's rows lie in our pool; computed once for each key of `kept`."""
    key = order.component, order.layers
    if (lines := kept.get(key)) is None:
        theirs = components[order.component]
        lines = kept[key] = lines_of(theirs.name, ours[theirs.name].layout, layers=order.layers, like=theirs.layout)
    return lines
