"""What a writer keeps of one arena: its process, its ring, and the writes on their way."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from ...layout.checksum import Lines
from ...layout.layout import Component
from ...layout.pairing import Pairing
from ...wire import Reach
from ..component_match import Planes
from .gather import Gatherer
from .jobs import Job
from .process import EngineProcess
from .ring import Cut, Ring


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """One arena, and the process that writes there."""

    id: int
    reach: Reach
    components: tuple[Component, ...]
    pairings: tuple[Pairing, ...]
    ring: Ring
    gatherer: Gatherer
    process: EngineProcess | None = None
    cuts: dict[Planes, Cut] = field(default_factory=dict[Planes, Cut])
    lines: dict[Planes, Lines] = field(default_factory=dict[Planes, Lines])
    grants: dict[int, deque[Job]] = field(default_factory=dict[int, deque[Job]])  # that are not exhausted
    waiting: deque[int] = field(default_factory=deque[int])  # the same, in the order of their turns
    jobs: dict[int, set[Job]] = field(default_factory=dict[int, set[Job]])  # not yet reported, by grant
    straight: bool = False  # its process reads the pool
    held: dict[int, int] = field(default_factory=dict[int, int])  # slots, by grant
    batches: dict[int, Job] = field(default_factory=dict[int, Job])  # what was sent, by slot
    up: bool = False  # its process has been ready
    busy: int = 0  # slots that are being filled, and threads that prepare or close the ring
    dropped: bool = False  # the ring
    lost: bool = False  # nobody can say that its ring is written no more
    heard: float = 0.0  # when something of it was known to be under way
    watch: asyncio.TimerHandle | None = None
    broken: str = ""  # nothing more is sent, and the ends of what was are unknown: why
    leaving: bool = False
    quiet: asyncio.Event = field(default_factory=asyncio.Event)  # dead, and its ring dropped

    @property
    def gone(self) -> bool:
        """Whether neither its process nor a thread knows of its ring any more."""
        return (self.process is None or self.process.dead) and not self.busy

    @property
    def known(self) -> bool:
        """Whether each write will be known to have ended, or if not, at least that the pool is read no more."""
        return not self.broken or (self.straight and self.process is not None and not self.process.dead)

    def cut(self, component: int, layers: tuple[int, int]) -> Cut:
        """The component's planes of these layers, as they pass through the ring."""
        if (found := self.cuts.get((component, layers))) is None:
            pairing = self.pairings[component].within_layers(*layers).fused()
            found = self.cuts[component, layers] = self.gatherer.cut(pairing)
        return found

    def release(self, slot: int, grant: int) -> None:
        """The slot is free again."""
        self.ring.free.append(slot)
        self.held[grant] -= 1
        if not self.held[grant]:
            del self.held[grant]
