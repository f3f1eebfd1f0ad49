"""Works that threads do for a loop: who has begun them may stop them, and the loop gets the end of each once. And the
loop's own tasks, until they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ..handoff.effects import Outcome
from ..layout.checksum import MASK
from ..threads import LoopCalls

Turn: TypeAlias = tuple[int, int]  # session and grant: what takes turns, and is stopped


class Tasks(set[asyncio.Task[None]]):
    """Tasks of the loop whose thread this is, that are not done."""

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Begins one."""
        task = asyncio.get_running_loop().create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)


@dataclass(slots=True, eq=False, kw_only=True)
class Work:
    """A work for a grant, compared by identity. `report` gets it on the loop's thread, once nothing of it is under way
    any more; its outcome is final by then. FAILED is as quiet as LANDED, and after UNKNOWN bytes may still move."""

    turn: Turn
    report: Callable[[Any], None]
    outcome: Outcome = Outcome.LANDED
    text: str = ""  # why it has not landed
    checksum: int = 0  # of what was done, mod 2**64

    def stop(self) -> None:
        """Ends it early, from any thread; it is reported all the same."""
        raise NotImplementedError

    def add(self, checksum: int) -> None:
        """Adds the checksum of a part."""
        self.checksum = (self.checksum + checksum) & MASK

    def fail(self, text: str, outcome: Outcome = Outcome.FAILED) -> None:
        """UNKNOWN outweighs FAILED; of two texts the first is kept."""
        if self.outcome is not Outcome.UNKNOWN:
            self.outcome = outcome
        self.text = self.text or text


class OpenWorks:
    """The works that were not reported yet. Made and used on the loop's thread, but for `end` and `call`."""

    def __init__(self) -> None:
        self._calls = LoopCalls(asyncio.get_running_loop())
        self._works: dict[Turn, set[Work]] = {}

    def add(self, work: Work) -> None:
        """The work has begun."""
        self._works.setdefault(work.turn, set()).add(work)

    def stop(self, session: int, grant: int) -> None:
        """Stops this grant's works."""
        for work in self._works.get((session, grant), ()):
            work.stop()

    def stop_all(self) -> None:
        """Stops every work."""
        for turn in self._works:
            self.stop(*turn)

    def end(self, work: Work) -> None:
        """From any thread, once for each work: has it reported, never from within this call."""
        self._calls.post(partial(self._report, work))

    def call(self, work: Work, call: Callable[[], object]) -> None:
        """From any thread: makes the call on the loop, unless the work was reported before."""
        self._calls.post(lambda: call() if work in self._works.get(work.turn, ()) else None)

    def _report(self, work: Work) -> None:
        works = self._works[work.turn]
        works.remove(work)
        if not works:
            del self._works[work.turn]
        work.report(work)
