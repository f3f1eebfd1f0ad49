"""Tables of states as the pages show them."""

from __future__ import annotations

from collections.abc import Mapping

from pdtransfer.handoff.tables import Event, State


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
