"""A table of states: one enum of states, one of events, and the step from one state to the next."""

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
