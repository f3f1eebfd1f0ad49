"""Runs the simulator by hand: each seed is a world of its own, and any failure is replayed by its seed alone.

python -m tests.library.sim --seeds 100000 --jobs 4      many seeds, of every kind in turn, in four processes
python -m tests.library.sim --rooms 1000000 --jobs 2     as many as it takes for that many rooms, with progress
python -m tests.library.sim --seed 7 --trace             one seed, with every message and event
python -m tests.library.sim --mutant NAME                how many seeds of its kind a planted bug takes to be caught
"""

from __future__ import annotations

import argparse
import gc
import math
import shlex
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from .mutants import MUTANTS
from .profile import KINDS, draw
from .world import Violation, World

PROGRESS_S = 60.0
SEED_CPU_S_MAX = 60.0  # of one seed: the busiest take a second or two


@dataclass(slots=True)
class Tally:
    """What some seeds have shown; `failure` says how the first bad one ended, and how to replay it."""

    seeds: int = 0
    seen: Counter[str] = field(default_factory=Counter[str])
    failure: str = ""
    cpu: float = 0.0  # seconds

    def __str__(self) -> str:
        rooms, ready = self.seen["rooms"], self.seen["ready"]
        share = f"{ready / max(1, rooms):.0%}"
        return f"{self.seeds} seeds, {rooms} rooms, {ready} READY ({share}), {self.cpu:.1f} s of CPU"

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.seen += other.seen
        self.failure = self.failure or other.failure
        self.cpu += other.cpu


@contextmanager
def _bounded(seed_cpu_s: float) -> Generator[None]:
    """Fails what computes for so long: a call that does not come back is a finding, too."""

    def give_up(*_: object) -> None:
        raise Violation(f"a call has not come back in {seed_cpu_s:g} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seed_cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def run(seeds: Iterable[int], *, kind: str | None = None, trace: bool = False, replay: str = "") -> Tally:
    """Runs seeds up to the first that fails, for whatever reason: an exception of the code under test is one, too."""
    tally, start = Tally(), time.process_time()
    gc.set_threshold(100_000)  # a world is large, and lives on: looking for garbage as often as usual takes a sixth
    for seed in seeds:
        world = World(seed, draw(seed, kind))
        world.trace = [] if trace else None
        tally.seeds += 1
        tally.seen[f"worlds of kind {world.profile.name}"] += 1
        try:
            with _bounded(SEED_CPU_S_MAX):
                tally.seen += world.run()
        except Exception as error:  # noqa: BLE001 -- every one is a finding
            what = str(error) if isinstance(error, Violation) else traceback.format_exc()
            # With its kind: which one a seed draws changes whenever a kind is added.
            command = f"python -m tests.library.sim --seed {seed} --kind {world.profile.name} --trace{replay}"
            tally.failure = f"seed {seed} ({world.profile.name}): {what}\nreplay: {command}"
        if world.trace:
            print("\n".join(world.trace))
        if tally.failure:
            break
    tally.cpu = time.process_time() - start
    return tally


def plant(owner: object, name: object, value: object) -> None:
    """Patches an attribute, or an entry of a table, for good."""
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, str(name), value)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.library.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="replay one seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run (default 1000)")
    parser.add_argument("--rooms", type=int, help="run until this many rooms were simulated, whatever --seeds says")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no more seeds after so long")
    parser.add_argument("--kind", choices=KINDS, help="worlds of this kind only (default: all of them in turn)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in (default 1)")
    parser.add_argument("--go-on", action="store_true", help="run on after a failure; each is printed with its seed")
    parser.add_argument("--trace", action="store_true", help="print every message and event")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this bug first")
    return parser.parse_args()


def _batches(options: argparse.Namespace) -> Iterator[range]:
    """Seeds in batches of 50; without an end where rooms are counted."""
    for first in count(options.first, 50):
        left = 50 if options.rooms else options.first + options.seeds - first
        if left <= 0:
            return
        yield range(first, first + min(left, 50))


def main() -> int:
    options = _options()
    replay = f" --mutant {shlex.quote(options.mutant)}" if options.mutant else ""
    kind: str | None = options.kind
    start = time.perf_counter()
    total = Tally()
    if options.mutant:
        MUTANTS[options.mutant].plant(plant)
        kind = kind or MUTANTS[options.mutant].kind
        options.first = options.first or MUTANTS[options.mutant].first
    if options.seed is not None:
        total = run([options.seed], kind=kind, trace=options.trace, replay=replay)
    else:
        # A worker is forked, and so has the mutant too.
        with ProcessPoolExecutor(options.jobs) as pool:
            under_way = deque[tuple[range, Future[Tally]]]()
            batches, printed_at = _batches(options), start

            def submit(seeds: range) -> None:
                job = pool.submit(run, seeds, kind=kind, trace=options.trace, replay=replay)
                under_way.append((seeds, job))

            while not total.failure or options.go_on:
                wanted = not options.rooms or total.seen["rooms"] < options.rooms
                wanted = wanted and time.perf_counter() - start < 60 * options.minutes
                while wanted and len(under_way) <= options.jobs and (seeds := next(batches, None)) is not None:
                    submit(seeds)
                if not under_way:
                    break
                seeds, job = under_way.popleft()
                total.add(tally := job.result())
                if tally.failure and options.go_on:
                    print(tally.failure, flush=True)
                    submit(seeds[tally.seeds :])
                if time.perf_counter() - printed_at > PROGRESS_S:
                    printed_at = time.perf_counter()
                    print(f"{total} in {printed_at - start:.0f} s, up to seed {seeds[-1]}", flush=True)
    if total.failure:
        print(total.failure)
    elif options.seed is None:
        print(", ".join(f"{count} {what}" for what, count in sorted(total.seen.items())))
    print(f"{total} in {time.perf_counter() - start:.1f} s")
    return 1 if total.failure else 0


if __name__ == "__main__":
    sys.exit(main())
