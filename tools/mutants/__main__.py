"""`python -m tools.mutants` runs the smoke set of sets.toml; with paths, or path:function, their mutants.

Each mutant meets the tests of its set in a copy of the tree. It is killed if the same test fails twice. The report has
the result of each; `--resume` goes on with a report, as after `--minutes` are over, and `--again` runs those once more
that lived.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from .clone import Clone
from .edits import Mutant, mutants

_ROOT = Path(__file__).parents[2]
_SETS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("sets.toml").read_text())
# A kill is one of the first three. "unsure": the test that failed does so without the mutant.
_ENDS = ("killed", "by assert", "by time", "import", "unsure", "equivalent", "gpu", "lived")


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, Mutant]]:
    """Each set's mutants with the lowest hashes: a change of one function moves no choice elsewhere."""
    sets = _SETS["sets"]
    drawn: dict[str, list[Mutant]] = {name: [] for name in options.set or sets}
    for place in options.places or [code for name in drawn for code in sets[name]["code"]]:
        path, _, function = place.partition(":")
        for file in sorted(_ROOT.joinpath(path).rglob("*.py")) or [_ROOT / path]:
            found = mutants(str(file.relative_to(_ROOT)), file.read_text())
            of = (
                name
                for name in sets
                if name in drawn and any(file.is_relative_to(_ROOT / code) for code in sets[name]["code"])
            )
            drawn.setdefault(next(of, "other"), []).extend(
                each for each in found if each.name.split()[1].startswith(function)
            )
    for name, found in drawn.items():
        found.sort(key=lambda mutant: blake2b(f"{options.seed} {mutant.name}".encode()).digest())
        count = options.sample or (len(found) if options.places else sets[name]["count"])
        yield from ((name, mutant) for mutant in found[:count])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", help="a file, a folder, or file:function, instead of the smoke set")
    parser.add_argument(
        "--set", action="append", choices=_SETS["sets"], help="of the smoke set this alone; may be repeated"
    )
    parser.add_argument(
        "--sample", type=int, default=0, help="so many of each set; a larger sample has the smaller in it"
    )
    parser.add_argument("--tests", action="append", help="run these instead of the set's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=3, help="clones that run beside each other")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no mutant after these")
    parser.add_argument("--seconds", type=int, default=240, help="the longest run of tests for a mutant")
    parser.add_argument("--test-seconds", type=int, default=20, help="the longest test")
    parser.add_argument("--near", action="store_true", help="only test files that name the mutant's module: a glance")
    parser.add_argument("--matrix", action="store_true", help="run every test, not only until one fails")
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "mutants.json")
    parser.add_argument("--resume", action="store_true", help="keep what the report has")
    parser.add_argument("--again", action="store_true", help="run those of the report that lived")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    options = parser.parse_args(arguments)
    wanted = list(chosen(options))
    if not options.tests and any(name == "other" for name, _ in wanted):
        parser.error("places: some are in no set of sets.toml, and need --tests")
    if options.list:
        print(*(mutant.name for _, mutant in wanted), sep="\n")
        return 0
    report: dict[str, dict[str, Any]] = {}
    if options.resume or options.again:
        report = json.loads(options.out.read_text())
        lived = {name for name, kept in report.items() if options.again and kept["status"] == "lived"}
        wanted = [(name, mutant) for name, mutant in wanted if mutant.name not in report or mutant.name in lived]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _run(wanted, report, options)
    _print(report)
    left = sum(mutant.name not in report for _, mutant in wanted)
    if left:
        print(f"\nNot run: {left} of {len(wanted)}; --resume runs them")
    return 0


def _run(wanted: list[tuple[str, Mutant]], report: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="m") as folder, ThreadPoolExecutor(options.jobs) as threads:
        made = [Clone(_ROOT, Path(folder) / str(number), options) for number in range(options.jobs)]
        clones: SimpleQueue[Clone] = SimpleQueue()
        for clone in made:
            clones.put(clone)

        def meet(place: tuple[str, Mutant]) -> tuple[str, str, dict[str, object]] | None:
            name, mutant = place
            if time.monotonic() > end:
                return None
            for status in ("equivalent", "gpu"):
                if mutant.name in _SETS[status]:
                    return name, mutant.name, {"status": status, "tests": {}, "line": mutant.line, "seconds": 0}
            clone = clones.get()
            try:
                stages = [options.tests] if options.tests else _SETS["sets"][name]["tests"]
                return name, mutant.name, clone.meet(mutant, stages)
            finally:
                clones.put(clone)

        try:
            for name, mutant, outcome in filter(None, threads.map(meet, wanted)):
                report[mutant] = {"set": name, **outcome}
                _write(report, options.out)
                print(f"{outcome['status']:<10} {outcome['seconds']:>5} s  {mutant}", flush=True)
            met = (report[mutant.name] for _, mutant in wanted if mutant.name in report)
            killers = sorted({next(iter(each["tests"]), "") for each in met} - {""})
            for clone in made:
                clone.end()
            parts = [killers[number :: len(made)] for number in range(len(made))]
            red = {test for failed in threads.map(Clone.red, made, parts) for test in failed}
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for clone in made:
                clone.stop()
        for each in report.values():
            if next(iter(each["tests"]), "") in red:
                each["status"] = "unsure"
        _write(report, options.out)


def _write(report: dict[str, dict[str, Any]], out: Path) -> None:
    whole = out.with_suffix(".tmp")
    whole.write_text(json.dumps(report, indent=1))
    whole.replace(out)


def _print(report: dict[str, dict[str, Any]]) -> None:
    """A row for each set, then those that lived."""
    print(f"\n{'set':<12}" + "".join(f"{end:>12}" for end in _ENDS) + f"{'seconds':>10}")
    for name in dict.fromkeys(each["set"] for each in report.values()):
        rows = [each for each in report.values() if each["set"] == name]
        count = Counter(each["status"] for each in rows)
        print(
            f"{name:<12}"
            + "".join(f"{count[end]:>12}" for end in _ENDS)
            + f"{sum(each['seconds'] for each in rows):>10.0f}"
        )
    print(
        "\nLived:",
        *(f"{name}, line {each['line']}" for name, each in report.items() if each["status"] == "lived"),
        sep="\n  ",
    )


if __name__ == "__main__":
    sys.exit(main())
