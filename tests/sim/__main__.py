"""Runs the simulator by hand: each seed is a world of its own, and any failure is replayed by its seed alone.

python -m tests.sim --seeds 100000 --jobs 4      many seeds, in four processes
python -m tests.sim --seed 7 --trace             one seed, with every message and event
python -m tests.sim --mutant NAME                how many seeds a planted bug takes to be caught
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from .mutants import MUTANTS
from .world import Violation, World


@dataclass(slots=True)
class Tally:
    """What some seeds have shown; `failure` says how the first bad one ended, and how to replay it."""

    seeds: int = 0
    seen: Counter[str] = field(default_factory=Counter[str])
    failure: str = ""


def run(seeds: Iterable[int], *, trace: bool = False, replay: str = "") -> Tally:
    """Runs seeds up to the first that fails, for whatever reason: an exception of the code under test is one, too."""
    tally = Tally()
    for seed in seeds:
        world = World(seed)
        world.trace = [] if trace else None
        tally.seeds += 1
        try:
            tally.seen += world.run()
        except Exception as error:  # noqa: BLE001 -- every one is a finding
            what = str(error) if isinstance(error, Violation) else traceback.format_exc()
            command = f"python -m tests.sim --seed {seed} --trace{replay}"
            tally.failure = f"seed {seed} ({world.profile.name}): {what}\nreplay: {command}"
        if world.trace:
            print("\n".join(world.trace))
        if tally.failure:
            break
    return tally


def plant(owner: object, name: object, value: object) -> None:
    """Patches an attribute, or an entry of a table, for good."""
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, str(name), value)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="replay one seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in (default 1)")
    parser.add_argument("--trace", action="store_true", help="print every message and event")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this bug first")
    return parser.parse_args()


def main() -> int:
    options = _options()
    replay = f" --mutant {options.mutant}" if options.mutant else ""
    seeds = range(options.first, options.first + options.seeds)
    start = time.perf_counter()
    total = Tally()
    if options.mutant:
        MUTANTS[options.mutant].plant(plant)
    if options.seed is not None:
        total = run([options.seed], trace=options.trace, replay=replay)
    elif options.jobs == 1:
        total = run(seeds, trace=options.trace, replay=replay)
    else:
        # A worker is forked, and so has the mutant too.
        with ProcessPoolExecutor(options.jobs) as pool:
            for tally in pool.map(run, [seeds[at : at + 50] for at in range(0, len(seeds), 50)]):
                total.seeds += tally.seeds
                total.seen += tally.seen
                total.failure = total.failure or tally.failure
    seen, seconds = total.seen, time.perf_counter() - start
    if total.failure:
        print(total.failure)
    elif options.seed is None:
        print(", ".join(f"{count} {what}" for what, count in sorted(seen.items()) if what not in ("rooms", "ready")))
    share = seen["ready"] / max(1, seen["rooms"])
    print(f"{total.seeds} seeds, {seen['rooms']} rooms, {seen['ready']} READY ({share:.0%}), {seconds:.1f} s")
    return 1 if total.failure else 0


if __name__ == "__main__":
    sys.exit(main())
