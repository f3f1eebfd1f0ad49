"""What is true of every worker of a fleet, a daemon or an HTTP server: its role, and what an operator decided."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ....handoff.tables import Word

Role: TypeAlias = Literal["prefill", "decode"]


class Departure(Word):
    """What an operator has decided about a worker, as the reason why it gets no rooms."""

    STAYS = ""
    DRAINS = "drained by an operator"
    LEAVES = "removed by an operator; its rooms run to their end"
