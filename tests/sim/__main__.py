"""Runs seeds by hand: python -m tests.sim --seed 7 --trace, or --seeds 100000 --first 0."""

from __future__ import annotations

import argparse
import sys
import time

from .mutants import MUTANTS
from .world import Violation, World


def plant(owner: object, name: object, value: object) -> None:
    """Patches an attribute, or an entry of a table, for good."""
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, str(name), value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay one seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--trace", action="store_true", help="print every message and event of --seed")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this bug first")
    options = parser.parse_args()
    if options.mutant:
        MUTANTS[options.mutant](plant)
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    rooms = ready = 0
    start = time.perf_counter()
    for seed in seeds:
        world = World(seed)
        world.trace = [] if options.trace else None
        try:
            counts = world.run()
        except (Violation, AssertionError) as error:
            print("\n".join(world.trace or []))
            mutant = f" --mutant {options.mutant}" if options.mutant else ""
            print(f"seed {seed} ({world.profile.name}): {error}\nreplay: python -m tests.sim --seed {seed} --trace{mutant}")
            if options.trace:
                raise
            return 1
        rooms, ready = rooms + counts["rooms"], ready + counts["ready"]
    if options.trace:
        print("\n".join(world.trace or []))
    seconds = time.perf_counter() - start
    print(f"{len(seeds)} seeds, {rooms} rooms, {ready} READY ({ready / rooms:.0%}), {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
