"""Random faults, one after another, on hosts between which rooms never stop: `python -m tests.soak --seconds 1800`.

Prints a line a minute and what it found; ends with 1 where anything was wrong: a room that ended twice or not at all, a
byte that came late, somebody else held up, a pair that did not work again, slots, files or engines left over.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pdtransfer.transports.mooncake.host import why_not
from tests.support import networks
from tests.support.kv_fleet import DECODES, LARGE, MEGABITS, PAIRS, PREFILLS, SMALL, Fleet, Pair, Room
from tests.support.networks import Network
from tests.support.processes import deliver

QUIET_S = 1.5, 3.0
BRIEF_S, LONG_S = (0.1, 2.0), (3.5, 14.0)  # LONG is past silence, and at its end past every timeout there is
_ABORTED, _HELD = 0.05, 0.05  # of the rooms: given up by their clients, held for long
_PAUSE_S = 0.03


@dataclass
class Outcome:
    """What a soak has seen."""

    rooms: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    quiet_s: list[float] = field(default_factory=list[float])
    beside_s: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])

    def line(self) -> str:
        """What there was so far, in short."""
        rooms = ", ".join(f"{count} {how}" for how, count in sorted(self.rooms.items()))
        slowest = max((max(each) for each in self.recovery_s.values()), default=0.0)
        quiet, beside = (np.percentile(each, 99) if each else np.nan for each in (self.quiet_s, self.beside_s))
        return (
            f"rooms: {rooms}; faults: {self.faults.total()}; slowest recovery {slowest:.2f} s; p99 of small rooms "
            f"{quiet * 1e3:.1f} ms in quiet, {beside * 1e3:.1f} ms beside a fault; wrong: {len(self.wrong)}"
        )

    def report(self) -> list[str]:
        """All of it."""
        recoveries = (
            f"  {kind}: {self.faults[kind]} times, works again after {np.median(each):.2f} s, at most {max(each):.2f} s"
            for kind, each in sorted(self.recovery_s.items())
        )
        quiet, beside = (np.percentile(each, (50, 99)) * 1e3 for each in (self.quiet_s or [0], self.beside_s or [0]))
        return [
            self.line(),
            *recoveries,
            f"  p50 {quiet[0]:.1f} and {beside[0]:.1f} ms of {len(self.quiet_s)} and {len(self.beside_s)} rooms",
            *(f"WRONG {each}" for each in self.wrong),
        ]


@dataclass(frozen=True)
class Fault:
    """One that has begun: whom it concerns, and what ends it."""

    kind: str
    pairs: list[Pair]
    end: Callable[[], Awaitable[None]]


class Soak:
    """Rooms between all pairs, and faults."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet, self._random, self.outcome = fleet, random.Random(seed), Outcome()
        self._spared: set[Pair] | None = None  # while there is a fault
        self._phase = 0  # odd: a fault
        self._over = False

    async def run(self, seconds: float) -> None:
        """Until so long has passed, or something is wrong; at the end all is whole again."""
        fleet = self._fleet
        await fleet.land_again()
        before = await fleet.at_rest()
        fleet.on_over = self._on_over
        loads = [asyncio.ensure_future(load(pair)) for pair in PAIRS for load in (self._small, self._large)]
        started = time.monotonic()
        try:
            while time.monotonic() < started + seconds and not fleet.wrong:
                await self._round()
                if any(load.done() for load in loads):
                    break  # it gives the reason
            self._over = True
            await asyncio.gather(*loads)
            await fleet.at_rest(before)
        except (AssertionError, TimeoutError) as error:
            self.outcome.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            for load in loads:
                load.cancel()
                with suppress(asyncio.CancelledError, AssertionError):
                    await load
            fleet.on_over = lambda _: None
            self.outcome.wrong += fleet.wrong

    def _on_over(self, room: Room) -> None:
        killed = any(side.void for side in room.sides)
        self.outcome.rooms["landed" if room.landed else "killed" if killed else "failed"] += 1

    async def _small(self, between: Pair) -> None:
        chance = self._random
        while not self._over:
            phase, spared = self._phase, self._spared
            hold_s = chance.uniform(0.5, 4.0) if chance.random() < _HELD else 0.0
            room = self._fleet.begin(between, SMALL, hold_s=hold_s)
            if chance.random() < _ABORTED:
                await asyncio.sleep(chance.uniform(0, 0.02))
                self._fleet.abort(room)
            await self._fleet.until(room, lambda room=room: room.decode.ended, "ended by decode")
            if room.landed and phase == self._phase:
                if spared is None:
                    self.outcome.quiet_s.append(room.seconds)
                elif between in spared:
                    self.outcome.beside_s.append(room.seconds)
            await self._fleet.over(room)
            await asyncio.sleep(_PAUSE_S if room.landed else 10 * _PAUSE_S)

    async def _large(self, between: Pair) -> None:
        chance = self._random
        while not self._over:
            await asyncio.sleep(chance.uniform(0.5, 2.5))
            room = self._fleet.begin(between, chance.randint(SMALL, LARGE), hold_s=chance.choice((0.0, 0.0, 0.3)))
            if chance.random() < _ABORTED:
                await asyncio.sleep(chance.uniform(0, 0.3))
                self._fleet.abort(room)
            await self._fleet.over(room)

    async def _round(self) -> None:
        """A while without a fault, then one, others beside it, its end, and its pairs again."""
        chance, fleet = self._random, self._fleet
        await asyncio.sleep(chance.uniform(*QUIET_S))
        lasts_s = chance.uniform(*(BRIEF_S if chance.random() < 0.5 else LONG_S))
        faults = self._kill, self._kill_engines, self._freeze, self._freeze_engines, self._cut, self._cut_data
        begin = chance.choice([*faults, self._refuse, self._nowhere])
        self._phase += 1
        fault = await begin()
        self._spared = set(PAIRS) - set(fault.pairs)
        self.outcome.faults[fault.kind] += 1
        try:
            await asyncio.gather(asyncio.sleep(lasts_s), fleet.land_again(self._spared))
        finally:
            await fault.end()
        self._phase += 1
        self._spared = None
        self.outcome.recovery_s[fault.kind].append(await fleet.land_again(fault.pairs))

    # The faults

    def _host(self) -> tuple[str, list[Pair]]:
        name = self._random.choice(PREFILLS + DECODES)
        return name, [pair for pair in PAIRS if name in pair]

    async def _kill(self) -> Fault:
        name, pairs = self._host()
        await self._fleet.kill(name)
        return Fault(f"{name[0]} killed", pairs, lambda: self._fleet.start(name))

    async def _kill_engines(self) -> Fault:
        name, pairs = self._host()
        engines = self._fleet.hosts[name].engines()
        deliver(self._random.sample(engines, self._random.randint(0, len(engines))), signal.SIGKILL)
        return Fault(f"engines of {name[0]} killed", pairs, _nothing)

    async def _freeze(self) -> Fault:
        name, pairs = self._host()
        host = self._fleet.hosts[name]
        engines = self._random.choice((host.engines(), list[int]()))
        host.signal(signal.SIGSTOP)
        deliver(engines, signal.SIGSTOP)

        async def thaw() -> None:
            deliver(engines, signal.SIGCONT)
            host.signal(signal.SIGCONT)

        return Fault(f"{name[0]} frozen", pairs, thaw)

    async def _freeze_engines(self) -> Fault:
        name, pairs = self._host()
        engines = self._fleet.hosts[name].engines()
        deliver(engines, signal.SIGSTOP)

        async def thaw() -> None:
            deliver(engines, signal.SIGCONT)

        return Fault(f"engines of {name[0]} frozen", pairs, thaw)

    async def _healed(self) -> None:
        self._fleet.network.heal()

    async def _cut(self) -> Fault:
        prefill, decode = pair = self._random.choice(PAIRS)
        ways = [[(prefill, decode)], [(decode, prefill)], [(prefill, decode), (decode, prefill)]]
        for source, target in (cut := self._random.choice(ways)):
            self._fleet.network.cut(source, target)
        return Fault("cut both ways" if len(cut) == 2 else f"cut from {cut[0][0][0]}", [pair], self._healed)

    async def _cut_data(self) -> Fault:
        pair = self._random.choice(PAIRS)
        self._fleet.network.cut(*pair, data=True)
        return Fault("data cut", [pair], self._healed)

    async def _refuse(self) -> Fault:
        pair = self._random.choice(PAIRS)
        self._fleet.network.refuse(*pair)
        return Fault("data refused", [pair], self._healed)

    async def _nowhere(self) -> Fault:
        name = self._random.choice(DECODES)
        pairs = [pair for pair in PAIRS if name in pair]
        await self._fleet.kill(name)
        await self._fleet.start(name, advertise=self._fleet.network.nowhere)

        async def again() -> None:
            await self._fleet.kill(name)
            await self._fleet.start(name)

        return Fault("nowhere", pairs, again)


async def _nothing() -> None:
    pass


async def soak(seconds: float, seed: int, logs: Path, report: Callable[[str], None] = lambda _: None) -> Outcome:
    """Faults from `seed` for so long, a line to `say` a minute; where something is wrong it ends early."""

    async def minutes(run: Soak) -> None:
        minute = 0
        while True:
            await asyncio.sleep(60)
            minute += 1
            report(f"{minute} min: {run.outcome.line()}")

    with Network((*PREFILLS, *DECODES), megabits=MEGABITS) as network:
        async with Fleet(network, logs) as fleet:
            run = Soak(fleet, seed)
            telling = asyncio.ensure_future(minutes(run))
            await run.run(seconds)
            telling.cancel()
            return run.outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=("mooncake",), default="mooncake")
    parser.add_argument("--seconds", type=float, default=1_800)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--logs", type=Path, default=None)
    options = parser.parse_args()
    if why := why_not() or networks.why_not():
        print(f"no soak: {why}", file=sys.stderr)
        return 2
    print(f"seed {options.seed}", flush=True)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="pdtransfer-soak-"))
    logs.mkdir(exist_ok=True)
    outcome = asyncio.run(soak(options.seconds, options.seed, logs, lambda line: print(line, flush=True)))
    print("\n".join(outcome.report()))
    if outcome.wrong:
        print(f"logs in {logs}")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
