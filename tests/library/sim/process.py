"""The processes of the simulated world: each has a clock of its own, freezes, dies, and comes back as another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pdtransfer.errors import Cause
from pdtransfer.limits import Limits
from pdtransfer.wire import Goodbye, Message, Reject

from .lines import ProcessLines
from .pools import BLOCK

if TYPE_CHECKING:
    from .world import World

LIMITS = Limits(
    window=64, resend_ms=50, resend_ms_max=400, ping_ms=150, slow_ms=600, silence_ms=1_500,
    session_silence_ms=5_000, fence_poll_ms=20, room_deadline_ms=120_000,
)  # fmt: skip


class Process:
    """While it is frozen, what is sent to it waits; when it has died, what it had begun never happens."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        p, rng = world.profile, world.rng
        self.limits = replace(
            LIMITS, window=p.window, queue_max=p.queue_max, quarantine_fraction_max=p.quarantine_fraction,
            prefix_block_tokens=BLOCK, prefix_blocks_max=p.blocks_max,
            ping_ms=p.ping_ms, silence_ms=p.silence_ms,
            peer_sessions_max=p.peer_sessions_max, inflight_bytes_max=p.inflight_bytes,
        )  # fmt: skip
        self._rate, self._offset = 1.0 + rng.uniform(-p.skew, p.skew), rng.uniform(0.0, 1e4)
        self.frozen = self.dead = False
        self.disturbed = 0  # times that it froze, died, or was cut off
        self.thawed = 0.0  # by its own clock
        self.life, self.deaths, self.died = 1, 0, -math.inf
        self.backlog: list[Callable[[], None]] = []
        self.awaits: list[Process] = []  # who has to be there before it is started again
        self.lines = ProcessLines(self)

    def send(self, peer: str, message: Message) -> None:
        """By a line, or over the network. Who is honest is not accused; except of words on a session that this process,
        or the one before it, has dropped, and that a repeated Register has it try to map again, in vain."""
        accused = isinstance(message, Reject) and message.reason == Cause.BREACH.value
        accused = accused and peer not in self.world.strangers
        if accused and "not yet Registered" not in str(message.fields):
            self.world.fail(f"{self.name} accuses {peer}: {message.fields}")
        if not self.lines.send(peer, message):
            self.world.network.send(self, peer, message)

    def deliver(self, source: str, message: Message) -> None:
        """Takes what comes over the network: what its sender had sent by a line comes first."""
        self.lines.read(source)
        self.receive(source, message)

    def fail(self, text: str) -> None:
        """The world has failed: this process does what it must not."""
        self.world.fail(f"{self.name} {text}")

    @property
    def clock(self) -> float:
        """Its own time: nobody else's, and not quite as fast."""
        return self._offset + self._rate * self.world.now

    def until(self, when: float) -> float:
        """World's seconds until its own clock says `when`, and never a rounding error less."""
        return max(0.0, (when - self.clock) / self._rate) + 1e-9

    def act(self, life: int, action: Callable[[], None]) -> None:
        """Runs in this process: now, when it thaws, or never if it dies first."""
        if self.life != life or self.dead:
            return
        if self.frozen:
            self.backlog.append(lambda: self.act(life, action))
        else:
            action()

    def later(self, delay: float, action: Callable[[], None]) -> None:
        self.act_in(self.life, delay, action)

    def act_in(self, life: int, delay: float, action: Callable[[], None]) -> None:
        """As `later`, in this life or never."""
        self.world.at(delay, lambda: self.act(life, action))

    def freeze(self, seconds: float) -> None:
        if not self.frozen and not self.dead and not self.world.healed:
            self.world.log(f"{self.name} freezes for {seconds:.2f}")
            self.world.seen["freezes"] += 1
            self.frozen = True
            self.disturbed += 1
            life, times = self.life, self.disturbed
            self.world.at(seconds, lambda: self.thaw() if self.life == life else None)
            found = 1.2 * (self.limits.silence_ms + 2 * self.limits.ping_ms) / 1e3
            self.world.at(found, lambda: self.check_found() if self.frozen and self.disturbed == times else None)

    def thaw(self) -> None:
        if self.frozen:
            self.world.log(f"{self.name} thaws")
            self.frozen, self.thawed = False, self.clock
            backlog, self.backlog = self.backlog, []
            self.world.kernels.look_again(self)
            for action in backlog:
                action()

    def die(self, *, forked: bool = False) -> None:
        """`forked`: a child has its sockets."""
        self.lines.die(held=forked)
        self.dead, self.frozen, self.backlog = True, False, []
        self.disturbed += 1
        self.life += 1
        self.deaths += 1
        self.died = self.world.now
        self.world.kernels.died(self)
        if self.world.kernels.share == 1.0:
            life, found = self.life, 1.2 * (self.limits.slow_ms + 2 * self.limits.ping_ms) / 1e3 + 0.2
            self.world.at(found, lambda: self.check_found() if self.dead and self.life == life else None)
        rng, (soon, late) = self.world.rng, self.world.profile.restart
        self.world.at(math.exp(rng.uniform(math.log(soon), math.log(late))), self.restart)

    def _leave(self, peers: list[str], incarnation: int) -> None:
        """Ends in good order."""
        self.world.log(f"{self.name} leaves")
        for peer in peers:
            self.send(peer, Goodbye(incarnation, Cause.SHUTDOWN.value))
        self.die()

    def restart(self) -> None:
        if self.dead and any(other.dead for other in self.awaits):
            self.world.at(0.01, self.restart)
        elif self.dead:
            self.world.log(f"{self.name} is started again")
            self.dead = False
            self.lines = ProcessLines(self)
            self.start()

    def start(self) -> None:
        """A new life: nothing of an earlier one is left."""
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError

    @property
    def settled(self) -> bool:
        """Whether nothing is left to happen but pings."""
        raise NotImplementedError

    def check_end(self) -> None:
        """What has to hold after healing."""
        raise NotImplementedError

    def receive(self, source: str, message: Message) -> None:
        raise NotImplementedError

    def gone(self, name: str, evidence: str, *, host: bool) -> None:
        """What its kernel says of another process; empty: no longer."""

    def check_found(self) -> None:
        """It has been frozen for longer than any limit of silence, or dead for longer than evidence of that takes."""


class Alarm:
    """Has `tick` called when a core of one process wants it; dies with that life."""

    def __init__(self, process: Process, next_tick: Callable[[], float | None], tick: Callable[[], None]) -> None:
        self._process, self._next_tick, self._tick = process, next_tick, tick
        self._at: float | None = None

    def arm(self) -> None:
        when = self._next_tick()
        if when is None or (self._at is not None and self._at <= when):
            return
        self._at = when
        self._process.later(self._process.until(when), lambda: self._fire(when))

    def _fire(self, when: float) -> None:
        if self._at == when:
            self._at = None
            self._process.lines.read()
            self._tick()
