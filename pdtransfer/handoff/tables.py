"""A table of states: one enum of states, one of events, and the step from one state to the next; and its
diagram."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class Word(Enum):
    """A state or an event of a table. Hashed by identity, which saves the call that an enum's own hash costs."""

    __hash__ = object.__hash__


State = TypeVar("State", bound=Word)
Event = TypeVar("Event", bound=Word)


def step(table: Mapping[tuple[State, Event], State], state: State, event: Event) -> State:
    """The state after `event`. A pair that the table lacks is a bug in this package, whatever a peer has sent."""
    after = table.get((state, event))
    assert after is not None, f"{type(state).__name__}.{state.name} has no transition for {event.name}"
    return after


def diagram(table: Mapping[tuple[State, Event], State], start: State) -> str:
    """The table as a Mermaid state diagram; events that change nothing are left out."""
    lines = ["stateDiagram-v2", f"    [*] --> {start.name}"]
    arrows: dict[tuple[str, str], list[str]] = {}
    for (before, event), after in table.items():
        if before is not after:
            arrows.setdefault((before.name, after.name), []).append(event.name.lower())
    lines += [f"    {before} --> {after}: {', '.join(events)}" for (before, after), events in arrows.items()]
    left = {before for before, _ in arrows}
    lines += [f"    {state.name} --> [*]" for state in type(start) if state.name not in left]
    return "\n".join(lines)
