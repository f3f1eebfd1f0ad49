"""The reasons that End, Cancel and Goodbye carry: a success's own word, else a Cause, else a newer peer's word."""

from __future__ import annotations

from .errors import Cause

SUCCESSES = frozenset({"stop", "length", "done"})


def cause_of(reason: str, otherwise: Cause) -> Cause:
    """The Cause that a reason names; `otherwise` for a word that this version does not know."""
    try:
        return Cause(reason)
    except ValueError:
        return otherwise
