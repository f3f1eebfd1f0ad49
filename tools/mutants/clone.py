"""A copy of the tree, in which a mutant meets the tests of its set.

The mutant is written there, for what imports its file later and for the processes that tests start. A process that has
collected the tests before runs them in a fork with the mutant's code, where it fits; else one that collects them anew.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .edits import Mutant
from .plugin import REPORT, SOCKET

_ROOT = Path(__file__).parents[2]
_COLLECTION_S_MAX = 240


@dataclass(frozen=True, slots=True)
class Outcome:
    """`failed` has each test that failed, with where and why; the last that had started, if time was over."""

    status: str
    failed: dict[str, str]


class Clone:
    """For one mutant at a time."""

    def __init__(self, root: Path, folder: Path, options: argparse.Namespace) -> None:
        self.path, self._options = folder / "tree", options
        self._stages: list[list[str]] = []
        self._kept: dict[tuple[str, ...], Collection] = {}  # of these stages, without a mutant
        self._open: list[Collection] = []
        self._stopped = False
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)  # noqa: S603
        for name in listed.stdout.split("\0"):
            if name and (root / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.path / name)
        for environment in root.glob(".venv*"):
            (self.path / environment.name).symlink_to(environment)

    def meet(self, mutant: Mutant, stages: list[list[str]]) -> dict[str, object]:
        """What becomes of the mutant: one stage of tests after the other, until one has killed it."""
        started = time.monotonic()
        if stages != self._stages:
            self.end()
            self._stages = stages
        outcome, left_out, forked = Outcome("lived", {}), list[str](), True
        for stage in stages:
            kept = self._kept.get(tuple(stage))
            if kept is None or kept.process.poll() is not None:
                kept = self._kept[*stage,] = self.collect(stage)
            if not kept.importable:
                raise ValueError(f"pytest cannot collect {' '.join(stage)}")
            with self._written(mutant) as before:
                forked = kept.load(self.path / mutant.file, before)
                collection = kept if forked else self.collect(stage)
                outcome = self._met(collection, mutant, left_out)
                if not forked:
                    collection.end()
            if outcome.failed:
                break
        return {
            "status": outcome.status,
            "tests": outcome.failed,
            "failed once": left_out,
            "line": mutant.line,
            "fork": forked,
            "seconds": round(time.monotonic() - started, 1),
        }

    def _met(self, collection: Collection, mutant: Mutant, left_out: list[str]) -> Outcome:
        """A test that fails once and not twice is left out from then on."""
        function = mutant.name.split()[1].rstrip(":")
        names = [Path(mutant.file).stem, *function.split(".")]
        while True:
            outcome = collection.run([], names, left_out, stops=not self._options.matrix)
            test = next(iter(outcome.failed), None)
            if test is None or self._options.matrix or collection.run([test], [], []).failed:
                return outcome
            left_out.append(test)

    def red(self, tests: list[str]) -> list[str]:
        """Those that fail without a mutant, twice."""
        if not tests:
            return []
        collection = self.collect(tests)
        failed = collection.run([], [], [], stops=False, limited=False).failed
        return [test for test in failed if collection.run([test], [], []).failed]

    @contextmanager
    def _written(self, mutant: Mutant) -> Generator[str]:
        """The file with the mutant, in place of this text."""
        source = (self.path / mutant.file).read_bytes()
        self._write(mutant.file, source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
        try:
            yield source.decode()
        finally:
            self._write(mutant.file, source)

    def _write(self, file: str, source: bytes) -> None:
        """With its bytecode removed: that is found by time and size alone."""
        path = self.path / file
        path.write_bytes(source)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()

    def collect(self, tests: list[str]) -> Collection:
        """These tests of the tree as it is now. They end with the clone."""
        if self._stopped:
            raise KeyboardInterrupt
        self._open = [collection for collection in self._open if collection.process.poll() is None]
        self._open.append(Collection(self.path, tests, self._options))
        return self._open[-1]

    def end(self) -> None:
        for collection in self._open:
            collection.end()
        self._kept.clear()

    def stop(self) -> None:
        """From another thread: ends the tests, and begins no others."""
        self._stopped = True
        self.end()


class Collection:
    """A pytest of its own that has collected tests of a tree, and runs them in forks of itself."""

    def __init__(self, tree: Path, tests: list[str], options: argparse.Namespace) -> None:
        self._tree, self._options, self._report = tree, options, tree.with_name("report")
        ours, theirs = socket.socketpair()
        names = {
            "PYTHONPATH": f"{tree}:{tree / 'lab'}:{_ROOT}",  # a tree may have no tools
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "",  # the package is compiled once a clone
            "OMP_NUM_THREADS": "1",  # a fork would have none of the others
            "TMPDIR": str(tree.parent),
            REPORT: str(self._report),
            SOCKET: str(theirs.fileno()),
        }
        command = [sys.executable, "-m", "pytest", *tests, "-n0", "-q", "--tb=short", "-pno:cacheprovider"]
        command += ["-ptools.mutants.plugin", f"--timeout={options.test_seconds}"]
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603
                command, cwd=tree, env=os.environ | names, start_new_session=True, pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        with ours:
            self._lines = ours.makefile("rw")
            ours.settimeout(_COLLECTION_S_MAX)
            self.importable = self._ask(None) is True
            if self.importable:
                ours.settimeout(None)

    def _ask(self, request: object) -> object:
        """Its answer; None if it has ended."""
        try:
            if request is not None:
                print(json.dumps(request), file=self._lines, flush=True)
            return json.loads(self._lines.readline() or "null")
        except OSError:
            return None

    def load(self, path: Path, before: str) -> bool:
        """Whether the mutant that is in this file now fits; the runs from now on are with it."""
        return self._ask({"file": str(path), "before": before}) is True

    def run(
        self, tests: list[str], names: list[str], left_out: list[str], *, stops: bool = True, limited: bool = True
    ) -> Outcome:
        """These tests, or all, up to the first failure; all of them with `stops` off."""
        if not self.importable:
            return Outcome("import", {})
        self._report.write_text("")
        request = {"tests": tests, "names": names, "left_out": left_out, "alone": bool(names) and self._options.near}
        request |= {"stops": stops, "seconds": self._options.seconds if limited else None}
        status = self._ask(request)
        for left in self._tree.parent.glob("pytest-of-*"):
            shutil.rmtree(left, ignore_errors=True)
        lines = [json.loads(line) for line in self._report.read_text().splitlines()]
        failed = {test: why for kind, test, why in lines if kind == "failed"}
        if not failed and status not in (0, 5):
            failed = {test: "no end" for _, test, _ in lines[-1:]}
        why = next(iter(failed.values()), "")
        by_assert = "AssertionError" in why and why.startswith(f"{self._tree}/pdtransfer/")
        ending = "by time" if "Timeout" in why or why == "no end" else "by assert" if by_assert else "killed"
        return Outcome(ending if failed else "lived", failed)

    def end(self) -> None:
        """With all that its tests have started."""
        self.process.terminate()
        with suppress(OSError):  # a request that it has not read
            self._lines.close()  # a signal just before it reads a request waits for one
        self.process.wait()
