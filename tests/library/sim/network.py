"""The network: real bytes, lost, repeated, late and cut off while the world is not healed."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from pdtransfer import wire
from pdtransfer.wire import Message, encode

if TYPE_CHECKING:
    from .process import Process
    from .world import World


decode = lru_cache(maxsize=4_096)(wire.decode)  # messages are frozen, and many are sent again


class Network:
    """Carries frames between processes by their names: what comes for one that was started again meets the new one,
    unless frames go by connections: who dialled takes its own along when it dies."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._cuts: dict[tuple[str, str], bool] = {}  # source, target -> whether what comes to the cut waits there
        self._latest: dict[tuple[str, int, str], float] = {}  # what is ordered arrives no sooner than the last
        self._held: list[tuple[str, str, bytes, object]] = []

    def send(self, source: Process, target: str, message: Message, way: object = None) -> None:
        """`way` is the connection, where there are any."""
        world, p = self.world, self.world.profile
        frame = encode(message)
        if world.trace is not None:
            world.log(f"{source.name} -> {target} {message}")
        copies = 1
        if not world.healed and (p.loss or p.duplicate):
            copies = 0 if world.rng.random() < p.loss else 2 if world.rng.random() < p.duplicate else 1
            world.seen["lost messages"] += copies == 0
            world.seen["repeated messages"] += copies == 2
        for copy in range(copies):
            delay = world.stretch(p.delay, 0.0 if world.healed else p.delay_tail)
            if copy and world.rng.random() < 0.7:
                delay += world.rng.expovariate(2.0)  # long after what it repeats has been answered
            when = world.now + min(delay, p.delay_max)
            if p.ordered:
                lives = source.name, source.life, target if way is None else repr(way)
                when = self._latest[lives] = max(when, self._latest.get(lives, 0.0))
            life = world.decodes[target].life if p.ordered and target in world.decodes else 0
            world.at(when - world.now, lambda life=life: self._arrive(source.name, target, frame, life, way))

    def cut(
        self, node: Process, *, others: list[str], inward: bool, outward: bool, holds: bool, seconds: float
    ) -> None:
        """No message between the node and the others, in one direction or both, until it heals."""
        world = self.world
        pairs = [pair for other in others for pair, wanted in (
            ((other, node.name), inward), ((node.name, other), outward)
        ) if wanted and pair not in self._cuts]  # fmt: skip
        if not pairs or world.healed:
            return
        world.log(f"{node.name} is cut off from {others}: in {inward}, out {outward}, for {seconds:.2f}")
        world.seen["partitions"] += 1
        world.seen["one-way partitions"] += inward != outward
        for name in {name for pair in pairs for name in pair}:
            world.processes[name].disturbed += 1
        self._cuts.update(dict.fromkeys(pairs, holds))
        for pair in pairs:
            world.kernels.parted(*pair)
        world.at(seconds, lambda: self._mend(pairs))

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cuts

    def heal(self) -> None:
        self._mend(list(self._cuts))

    def _mend(self, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            self._cuts.pop(pair, None)
        held, self._held = self._held, []
        for source, target, frame, way in held:
            self.world.at(0.0, lambda s=source, t=target, f=frame, w=way: self._arrive(s, t, f, way=w))

    def _arrive(self, source: str, target: str, frame: bytes, life: int = 0, way: object = None) -> None:
        if (source, target) in self._cuts:
            if self._cuts[source, target]:
                self._held.append((source, target, frame, way))
                self.world.seen["messages held at a cut"] += 1
            return
        process = self.world.processes[target]
        if process.frozen:
            process.backlog.append(lambda: self._arrive(source, target, frame, life, way))
        elif not process.dead and life in (0, process.life):
            self.deliver(process, source, frame, way)

    def deliver(self, process: Process, source: str, frame: bytes, way: object) -> None:
        """The process receives a frame."""
        process.deliver(source, decode(frame))
