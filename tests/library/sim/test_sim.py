"""The simulator as a test: many worlds, every planted bug caught, and only the seed decides what happens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tests.library.sim.__main__ as sim
from pdtransfer.handoff.liveness import Liveness
from tests.library.sim import profile, world
from tests.library.sim.__main__ import main, run
from tests.library.sim.calls import Call
from tests.library.sim.mutants import MUTANTS, read
from tests.library.sim.planted.replaced import Patch
from tests.library.sim.profile import KINDS
from tests.library.sim.world import World
from tests.support.effort import Effort, chosen, some

SHOWN = 300  # the first seeds, which test_worlds_show_what_they_are_for runs
SEEDS = 2_600 if chosen() is Effort.FULL else SHOWN + 100
CHUNK = 25  # seeds a test, so that several workers can share them


@pytest.mark.parametrize("first", range(SHOWN, SEEDS, CHUNK))
def test_every_world_keeps_the_invariants(first: int) -> None:
    tally = run(range(first, first + CHUNK))
    assert not tally.failure, tally.failure


# What each kind of worlds is for: all of it is seen in every chunk.
SEEN = {
    "apart": ("grants copied up", "writes to HBM", "ready", "fences that had to wait"),
    "staged": ("grants copied up", "writes to HBM", "ready", "pieces"),
    "placed": (
        "chosen slots drained", "slots of another room refused", "wrong slots refused", "ready",
        "pieces after the room failed", "fences that had to wait", "grants that waited for memory",
    ),
    "led": ("rooms that name a leader", "ready", "prefill kills"),
    "hasty": ("rooms that decode gave up in haste", "ready"),
    "waiting": (
        "calls with a queue", "calls with a queue for bytes in flight", "repeats in time", "silent peers back", "ready",
        "fences", "prefill kills",
    ),
    "starved": ("freezes", "connections made again", "evidence that somebody is gone", "ready"),
    "strangers": tuple(
        f"strangers: {what}"
        for what in (
            "grants that overlap", "grants sent again with other slots", "rooms granted twice",
            "grants for rooms of others", "grants beyond the window", "unended grants released",
            "Goodbyes of another life", "words on sessions of others",
            "rooms given up that another has leased", "bytes landed that were not granted",
            "numbers landed that were not granted", "older words that ask for a Hello", "calls for a Hello",
            "arenas registered as larger than they are", "new lives",
        )
    ),
    "spelled": ("messages by a second name", "second names", "ready", "prefill kills", "requests: finished"),
    "lines": (
        "lines", "messages by a line", "frames that a line took a part of", "lines that end one way",
        "lines that nobody reads", "prefills that leave with grants unacknowledged", "ready",
    ),
    "turns": (
        "rooms without a prefill", "turns READY", "turns refused", "turns dropped in their rest", "tokens shared",
        "turns of a rank that follows", "keys of more than there are slots for", "blocks evicted", "grants copied up",
        "ready",
    ),
    "parts": (
        "rooms of several prefills", "rooms that their sources do not cover", "tokens shared", "prefill kills",
        "fences that had to wait", "grants read back", "ready",
    ),
    "variants": (
        "rooms by page", "rooms by token", "rooms of several prefills", "rooms that their sources do not cover",
        "chosen slots drained", "slots of another room refused", "fences that had to wait", "prefill kills", "ready",
    ),
}  # fmt: skip
READY = {"turns": 2, "strangers": 3, "parts": 3, "variants": 3}  # of this many rooms more than one is READY


@pytest.mark.parametrize("chunk", range(some(4)))
@pytest.mark.parametrize("kind", SEEN)
def test_every_world_of_a_kind_keeps_the_invariants_and_shows_what_it_is_for(kind: str, chunk: int) -> None:
    tally = run(range(chunk * CHUNK, (chunk + 1) * CHUNK), kind=kind)
    assert not tally.failure, tally.failure
    for what in SEEN[kind]:
        assert tally.seen[what] > 0, what
    assert kind not in READY or tally.seen["ready"] > tally.seen["rooms"] / READY[kind]
    assert (kind, chunk) != ("led", 0) or tally.seen["ranks that cannot be dialled"] > 0, "rare, and in the first chunk"


def test_lines_end_in_the_middle_of_a_frame() -> None:
    """Rare: not in every few worlds."""
    tally = run(range(CHUNK), kind="lines")
    assert tally.seen["frames that a line had begun when it ended"] > 0
    assert tally.seen["freezes"] > 0


@pytest.mark.full
def test_decodes_stay_away() -> None:
    """Rare: one deadly world in eight."""
    tally = run(range(CHUNK), kind="deadly")
    assert not tally.failure, tally.failure
    assert tally.seen["decode nodes that stay away"] > 0


@pytest.mark.full
def test_worlds_show_what_they_are_for() -> None:
    """Invariants hold easily where nothing happens: most rooms are READY, and each fault was there."""
    tally = run(range(SHOWN))
    assert not tally.failure, tally.failure
    seen = tally.seen
    assert seen["ready"] >= seen["rooms"] / 2
    for what in (
        "lost messages", "repeated messages", "freezes", "prefill kills", "decode kills", "silent peers back",
        "writes of unknown outcome", "writers killed", "fences", "fences that had to wait", "steps with quarantine",
        "pieces by orphans", "pieces after the room failed", "repeated ends", "Landed that met an Abort",
        "Abort before its Grant", "Abort after the end", "Grant after the end", "Grant after the end was acknowledged",
        "partitions", "one-way partitions", "messages held at a cut", "cells that the engine forgets",
        "Failed before its writing has ended", "router kills", "rooms of dead routers", "retries", "resumptions",
        "tokens shared", "blocks evicted", "rooms with a rank left out",
        "fences of who stays away", "dead and frozen peers found", "evidence that somebody is gone",
        "grants that waited for memory", "grants read back",
        "grants read back after the room failed", "rooms with a corrupted row",
        "requests: finished", "requests: its router died", "requests: failed full",
        "sparse rooms preloaded", "sparse rooms all-miss", "sparse rooms retracted", "sparse rooms readmitted",
        "sparse rooms dropped", "sparse rooms refused", "sparse rooms read after they had ended", "sparse misses",
    ):  # fmt: skip
        assert seen[what] > 0, f"{what}: {sorted(seen.items())}"


def until_the_end_of(monkeypatch: pytest.MonkeyPatch) -> Patch:
    """Plants for as long as this lasts."""

    def patch(owner: Any, key: Any, value: Any) -> None:
        if isinstance(owner, dict):
            monkeypatch.setitem(owner, key, value)
        else:
            monkeypatch.setattr(owner, key, value)

    return patch


@pytest.mark.grid
@pytest.mark.parametrize("name", MUTANTS)
def test_every_planted_bug_is_caught_within_its_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.plant(until_the_end_of(monkeypatch))
    tally = run(range(mutant.first, mutant.first + mutant.seeds), kind=mutant.kind)
    assert tally.failure, f"{name!r} lived through {tally.seeds} seeds"
    assert mutant.words in tally.failure, "another checker has caught it"
    assert (
        f"replay: python -m tests.library.sim --seed {mutant.first + tally.seeds - 1} --kind {mutant.kind} --trace"
        in tally.failure
    )


def test_every_planted_bug_fits_the_source_and_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Liveness.late.__code__
    for mutant in MUTANTS.values():
        with monkeypatch.context() as patch:
            mutant.plant(until_the_end_of(patch))
    with monkeypatch.context() as patch:
        MUTANTS["earlier lives believed"].plant(until_the_end_of(patch))
        assert Liveness.late.__code__ != before
    assert Liveness.late.__code__ is before


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("in handoff.admission:Admission.admit\n- return 0", "in 0 places"),
        ("in handoff.prefill.sessions:PrefillSessions.wrote\n- return self._effects()", "in 2 places"),
        ("in handoff.admission:Admission.admitted\n+ return", "no attribute 'admitted'"),
    ],
)
def test_a_planted_bug_that_does_not_fit_the_source_is_not_planted(lines: str, why: str) -> None:
    _, mutant = read(f"a bug | quiet | 3 | words\n{lines}")
    with pytest.raises((LookupError, AttributeError), match=why):
        mutant.plant(lambda *_: None)


def test_the_documents_count_kinds_and_mutants_as_there_are() -> None:
    lines = Path("docs/figures/simulator.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("| simulator |"))
    assert f" of {len(KINDS)} kinds" in row
    assert f" {len(MUTANTS)} mutants" in row


def test_a_seed_decides_everything() -> None:
    """The same messages at the same times, whatever order Python's hashes bring."""
    traces = [
        subprocess.run(
            [sys.executable, "-m", "tests.library.sim", "--seed", "2", "--trace"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()[:-1]
        for hash_seed in ("1", "2")
    ]
    assert len(traces[0]) > 100
    assert traces[0] == traces[1]


def test_any_exception_of_the_code_under_test_is_a_failure_with_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: World) -> Counter[str]:
        raise KeyError("a peer")

    monkeypatch.setattr(World, "run", broken)
    tally = run([7, 8])
    assert tally.seeds == 1
    assert "KeyError: 'a peer'" in tally.failure
    assert tally.failure.endswith("replay: python -m tests.library.sim --seed 7 --kind patient --trace")


def test_a_world_that_goes_round_in_circles_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(call: Call) -> None:
        call.world.at(0.0, lambda: again(call))

    monkeypatch.setattr(Call, "begin", again)
    monkeypatch.setattr(world, "EVENTS_MAX", 10_000)
    tally = run([0], kind="quiet")
    assert "10000 events have happened, and no end of it" in tally.failure
    assert tally.failure.endswith("replay: python -m tests.library.sim --seed 0 --kind quiet --trace")


def test_a_call_that_does_not_come_back_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(call: Call) -> None:
        while True:
            pass

    monkeypatch.setattr(Call, "begin", again)
    monkeypatch.setattr(sim, "SEED_CPU_S_MAX", 0.1)
    tally = run([0], kind="quiet")
    assert "a call has not come back in 0.1 s of CPU time" in tally.failure


def test_by_hand_any_seeds_run_in_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sim", "--seeds", "4", "--first", "6", "--jobs", "2"])
    assert main() == 0
    assert "4 seeds, " in capsys.readouterr().out


def test_without_a_kind_every_kind_is_drawn_and_a_replay_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mutant of a kind that a long run never draws would be one that a long run never catches."""
    monkeypatch.setattr(World, "run", lambda self: Counter({"rooms": 1}))
    monkeypatch.setattr(sys, "argv", ["sim", "--seeds", str(2 * len(KINDS))])
    assert main() == 0
    printed = capsys.readouterr().out
    known = {*KINDS, *profile.FURTHER, *(mutant.kind for mutant in MUTANTS.values())}
    assert {kind for kind in known if f"2 worlds of kind {kind}" in printed} == known
    for seed in range(len(KINDS)):
        assert profile.draw(seed) == profile.draw(seed, KINDS[seed]), "which a failure's command names"


def test_help_shows_how_to_replay_a_seed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sim", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "python -m tests.library.sim --seed 7 --trace" in capsys.readouterr().out
