"""What the kernels of the simulated world say about who is gone: a process that has died, a host that acknowledges
nothing, a connection that ended on the way. Some of it is never reported, and all of it may come late: correctness
cannot depend on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from .process import Process

if TYPE_CHECKING:
    from .world import World

AGAIN = 0.15  # seconds until evidence that still stands is reported again
UNACKNOWLEDGED = 0.3  # until a host that is cut off counts as one that acknowledges nothing


class Kernels:
    """Says to each process what its own kernel sees of the others. Draws of its own: worlds are as without it."""

    def __init__(self, world: World) -> None:
        self._world, self._rng = world, random.Random(f"kernels {world.seed}")
        self.share = self._rng.choice([0.0, 0.5, 1.0, 1.0])  # of the evidence that is reported at all
        self._reported: dict[
            str, dict[str, Callable[[], bool]]
        ] = {}  # by observer and process: whether it still stands

    def died(self, process: Process) -> None:
        """Its connections have ended, and none is accepted until it is started again."""
        life = process.life
        for other in self._world.processes.values():
            if other is not process and self._rng.random() < self.share:
                self._report(
                    other, process.name, "nothing listens there", self._rng.uniform(0.01, 0.2),
                    lambda: process.dead and process.life == life,
                )  # fmt: skip

    def parted(self, source: str, target: str) -> None:
        """Nothing comes from the source to the target: what either sends is not acknowledged."""
        for name, other in ((source, target), (target, source)):
            if self._rng.random() < self.share:
                self._report(
                    self._world.processes[name], other, "its host sends no acknowledgements", UNACKNOWLEDGED,
                    lambda: self._world.network.is_cut(source, target), host=True,
                )  # fmt: skip

    def blip(self) -> None:
        """A connection ends on the way, and is made again soon."""
        observer, process = self._rng.sample([*self._world.processes.values()], 2)
        until = self._world.now + self._rng.uniform(0.02, 0.25)
        self._world.seen["connections made again"] += 1
        self._report(observer, process.name, "its connection has ended", 0.0, lambda: self._world.now < until)

    def look_again(self, observer: Process) -> None:
        """It runs again. Its clock does not count the time in which it did not run: evidence is as it is by now."""
        for name, stands in list(self._reported.get(observer.name, {}).items()):
            if not stands():
                observer.gone(name, "", host=False)

    def _report(
        self, observer: Process, name: str, evidence: str, delay: float, stands: Callable[[], bool], *,
        host: bool = False,
    ) -> None:  # fmt: skip
        def report() -> None:
            if not stands():
                observer.gone(name, "", host=False)
                return
            self._world.seen["evidence that somebody is gone"] += 1
            self._reported.setdefault(observer.name, {})[name] = stands
            observer.lines.read(name)  # what it had sent counts before its end
            observer.gone(name, evidence, host=host)
            self._report(observer, name, evidence, AGAIN, stands, host=host)

        observer.later(delay, report)
