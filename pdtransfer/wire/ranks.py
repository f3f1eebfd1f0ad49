"""The ranks of one worker: their numbers and names."""

from __future__ import annotations

from .messages import Ranks

SIZE_MAX = 64  # along one axis


def label(ranks: Ranks) -> str:
    """Returns a rank's numbers as part of a name."""
    return f"pp{ranks.pp_rank}-tp{ranks.tp_rank}" if ranks.pp_size > 1 else f"tp{ranks.tp_rank}"


def rank_index(ranks: Ranks) -> int:
    """Returns a rank's number in its group; 0 is the leader."""
    return ranks.pp_rank * ranks.tp_size + ranks.tp_rank


def ranks_of(tp_size: int, pp_size: int) -> list[Ranks]:
    """Returns all ranks of a group, by number."""
    return [Ranks(number % tp_size, tp_size, number // tp_size, pp_size) for number in range(tp_size * pp_size)]
