"""Workers of several ranks in the simulated world: links carry actions in order, and no rank outlives another.

What a leader does with them is in services, as in the daemons; followers do what they are sent, and report how it
ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pdtransfer.wire import Member

from .process import Process

if TYPE_CHECKING:
    from .decodes import DecodeNode
    from .prefills import PrefillNode


class Group:
    """The ranks of one worker, its leader first."""

    def __init__(self, ranks: list[PrefillNode] | list[DecodeNode]) -> None:
        self.ranks = ranks
        self._latest: dict[tuple[str, int, str], float] = {}  # when what was sent last arrives
        for rank in ranks:
            rank.group = self
        ranks[0].awaits = list(ranks[1:])

    @property
    def leader(self) -> Process:
        return self.ranks[0]

    def send(self, source: Process, target: Process, action: Callable[[], None]) -> None:
        """Runs the action at the other end of a link, after what was sent before, unless one of them dies first."""
        if source is target:
            action()
            return
        world, link = source.world, (source.name, source.life, target.name)
        when = max(self._latest.get(link, 0.0), world.now + world.rng.expovariate(2_000.0))
        self._latest[link] = when
        lives = source.life, target.life
        world.at(when - world.now, lambda: target.act(lives[1], action) if source.life == lives[0] else None)

    def send_all(self, action: Callable[[Process], None]) -> None:
        """Has the followers and the leader do something; the leader last, since it may then go on at once."""
        for rank in (*self.ranks[1:], self.ranks[0]):
            self.send(self.leader, rank, lambda rank=rank: action(rank))


def members(node: PrefillNode | DecodeNode) -> tuple[Member, ...]:
    """Of an identity: who leads names all ranks, and where decode dials them."""
    assert node.group is not None
    ranks = node.group.ranks
    return tuple(Member(rank.name, rank.name) for rank in ranks) if len(ranks) > 1 and ranks[0] is node else ()
