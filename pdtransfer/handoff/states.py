"""Tables of states: one enum, one table, one step; the diagrams in proto/v1 are drawn from the same tables."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class Word(Enum):
    """A word of a table, a state or an event. Hashed by identity: by name, as other enums are, it costs a call."""

    __hash__ = object.__hash__


State = TypeVar("State", bound=Word)
Event = TypeVar("Event", bound=Word)


def step(table: Mapping[tuple[State, Event], State], state: State, event: Event) -> State:
    """The state after `event`; a pair that the table does not name is our own bug, whatever a peer has sent."""
    after = table.get((state, event))
    assert after is not None, f"{type(state).__name__}.{state.name} knows no {event.name}"
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
