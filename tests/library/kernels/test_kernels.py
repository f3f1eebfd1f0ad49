"""Copies of plans: every implementation against the layouts' own addresses, and the cache against its enemies."""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import stat
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdtransfer import kernels
from pdtransfer.kernels import NativeCopy, UnusableError
from pdtransfer.kernels.cancel import CancelWord
from pdtransfer.layout.layout import Layout, Plane
from pdtransfer.layout.pairing import pair
from pdtransfer.layout.plan import Plan, plan
from tests.support import kernels_host
from tests.support.effort import some

NUMPY = NativeCopy(path=None, text="numpy")
MARGIN = 256

# The suite passes on a host without a compiler, where numpy copies.
COMPILER = any(map(shutil.which, kernels._COMPILERS))
compiles = pytest.mark.skipif(not COMPILER, reason="no C or C++ compiler")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> NativeCopy:
    if not COMPILER:
        pytest.skip("no C or C++ compiler")
    found = kernels.load(tmp_path_factory.mktemp("cache"))
    assert found.used, found.text
    return found


@pytest.fixture(params=["compiled", "numpy"])
def either(request: pytest.FixtureRequest) -> NativeCopy:
    """The compiled copy, then numpy's."""
    return NUMPY if request.param == "numpy" else request.getfixturevalue("compiled")


@dataclass(frozen=True)
class Side:
    """How one side lays the same planes out."""

    page_size: int
    pages: int
    interleaved: bool
    base: int
    gap: int

    def layout(self, widths: list[int]) -> Layout:
        planes: list[Plane] = []
        at, item = self.base, sum(widths) + self.gap
        for layer, width in enumerate(widths):
            row = item if self.interleaved else width + self.gap
            page = row * self.page_size + (0 if self.interleaved else self.gap)
            planes.append(Plane(layer, "k", "uint8", 0, 1, at, page, row, width))
            at += width if self.interleaved else page * self.pages
        return Layout(tuple(planes), self.page_size, self.page_size * self.pages)


SIDES = st.builds(
    Side,
    page_size=st.sampled_from((1, 2, 8, 64)),
    pages=st.integers(1, 6),
    interleaved=st.booleans(),
    base=st.integers(0, 70),
    gap=st.sampled_from((0, 0, 1, 3, 48, 64)),
)
WIDTHS = st.lists(
    st.one_of(st.integers(1, 200), st.sampled_from((4, 64, 576, 656, 1152, 9_217, 20_001))), min_size=1, max_size=4
)


def some_slots(rng: random.Random, limit: int, count: int) -> NDArray[np.int64]:
    """Slots in runs of any length, none twice."""
    slots: list[int] = []
    free = set(range(limit))
    while len(slots) < count:
        slot = rng.choice(sorted(free))
        for _ in range(rng.choice((1, 1, 3, 9, 70))):
            if slot in free and len(slots) < count:
                free.discard(slot)
                slots.append(slot)
            slot += 1
    return np.array(slots, np.int64)


@dataclass
class Case:
    """Two pools of random bytes, what to copy, and what must come of it: nothing else may change, margins included."""

    work: Plan
    source: NDArray[np.uint8]
    target: NDArray[np.uint8]
    wanted: NDArray[np.uint8]

    @classmethod
    def of(cls, widths: list[int], source: Side, target: Side, seed: int) -> Case:
        rng = random.Random(seed)
        ours, theirs = source.layout(widths), target.layout(widths)
        count = rng.randint(1, min(ours.slots, theirs.slots))
        source_slots, target_slots = some_slots(rng, ours.slots, count), some_slots(rng, theirs.slots, count)
        pools = [np.frombuffer(rng.randbytes(MARGIN + side.end + MARGIN), np.uint8).copy() for side in (ours, theirs)]
        wanted = pools[1].copy()
        for index, width in enumerate(widths):
            for source_slot, target_slot in zip(source_slots.tolist(), target_slots.tolist(), strict=True):
                a, b = MARGIN + ours.address(index, source_slot), MARGIN + theirs.address(index, target_slot)
                wanted[b : b + width] = pools[0][a : a + width]
        return cls(plan(pair(ours, theirs).fused(), source_slots, target_slots), *pools, wanted)

    def check(self, by: NativeCopy) -> None:
        target = self.target.copy()
        where = self.source.ctypes.data + MARGIN, target.ctypes.data + MARGIN
        assert kernels.copy(self.work, *where, by=by)
        wrong = np.flatnonzero(target != self.wanted)
        assert not len(wrong), f"{len(wrong)} bytes differ, the first at {wrong[0] - MARGIN}"


def by_stores(by: NativeCopy) -> list[NativeCopy]:
    """The copy with each kind of store that this CPU has."""
    return [replace(by, streams=streams) for streams in range(by.streams + 1)]


PROPERTY = settings(
    max_examples=some(120),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def small_copies_stream_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_STREAM_BYTES_MIN", 0)


@PROPERTY
@given(WIDTHS, SIDES, SIDES, st.integers(0, 1 << 32))
@example([1152] * 3, Side(64, 4, False, 0, 0), Side(64, 4, True, 0, 0), 1)
@example([1152] * 3, Side(64, 4, False, 0, 0), Side(64, 4, False, 0, 0), 2)
@example([20_001, 7], Side(8, 6, False, 3, 1), Side(1, 48, False, 5, 0), 3)
def test_every_store_copies_the_rows_and_nothing_else(
    compiled: NativeCopy, widths: list[int], source: Side, target: Side, seed: int
) -> None:
    case = Case.of(widths, source, target, seed)
    for by in by_stores(compiled):
        case.check(by)


@PROPERTY
@given(WIDTHS, SIDES, SIDES, st.integers(0, 1 << 32))
def test_numpy_copies_the_same(widths: list[int], source: Side, target: Side, seed: int) -> None:
    Case.of(widths, source, target, seed).check(NUMPY)


def test_the_compiled_copy_has_no_undefined_behaviour(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same source as C++, which reports it on standard error."""
    sanitized, rng = kernels._open(kernels_host.sanitized(tmp_path / "host_copy.so", "host_copy.c")), random.Random(11)
    for seed in range(60):
        widths = [rng.choice((1, 7, 64, 656, 1152, 20_001)) for _ in range(rng.randint(1, 3))]
        sides = [
            Side(
                rng.choice((1, 8, 64)),
                rng.randint(1, 4),
                rng.random() < 0.5,
                rng.randint(0, 70),
                rng.choice((0, 1, 48)),
            )
            for _ in range(2)
        ]
        case = Case.of(widths, *sides, seed)
        for by in by_stores(sanitized):
            case.check(by)
    assert "runtime error" not in capfd.readouterr().err


def endless() -> tuple[Plan, NDArray[np.uint8], NDArray[np.uint8]]:
    """A long plan over little memory: the same rows again and again."""
    layout = Layout((Plane(0, "k", "uint8", 0, 1, 0, 4_096, 4_096, 4_096),), 1, 64)
    pairing = pair(layout, layout)
    once = plan(pairing, np.arange(0, 64, 2), np.arange(0, 64, 2))
    runs = np.tile(once.runs, (1 << 15, 1))
    repeated = Plan(pairing=pairing, runs=runs, rows=once.rows << 15)
    return repeated, np.zeros(layout.end, np.uint8), np.zeros(layout.end, np.uint8)


def test_cancel_stops_a_copy_that_runs(either: NativeCopy) -> None:
    work, source, target = endless()
    cancel, ended = CancelWord(), list[bool]()
    thread = threading.Thread(
        target=lambda: ended.append(
            kernels.copy(work, source.ctypes.data, target.ctypes.data, cancel=cancel, by=either)
        )
    )
    thread.start()
    cancel.set()
    thread.join(20)
    assert ended == [False]


def test_a_cancelled_copy_writes_nothing_more(either: NativeCopy) -> None:
    case = Case.of([1152], Side(64, 4, False, 0, 0), Side(64, 4, False, 0, 0), 3)
    target, cancel = case.target.copy(), CancelWord()
    cancel.set()
    assert not kernels.copy(
        case.work, case.source.ctypes.data + MARGIN, target.ctypes.data + MARGIN, cancel=cancel, by=either
    )
    assert np.array_equal(target, case.target)


@pytest.mark.parametrize("reported", ["a.c:1: error: no type", "nvcc fatal   : Value 'x' is not defined"])
def test_a_compiler_that_fails_is_quoted(reported: str) -> None:
    with pytest.raises(UnusableError, match=f": {re.escape(reported)}$"):
        kernels.run_compiler(["sh", "-c", f'echo first >&2; echo "{reported}" >&2; exit 1'])


@compiles
def test_the_library_is_compiled_once_into_a_private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kernels.load(tmp_path)
    assert first.path is not None
    assert first.path.parent == tmp_path / "kernels"
    assert stat.S_IMODE(first.path.parent.stat().st_mode) == 0o700
    assert os.listdir(first.path.parent) == [first.path.name]
    compile_time = first.path.stat().st_mtime_ns
    assert kernels.load(tmp_path).path == first.path
    assert first.path.stat().st_mtime_ns == compile_time
    monkeypatch.setenv("PATH", "/nonexistent")
    assert kernels.load(tmp_path).path == first.path, "what was compiled outlives its compiler"


@compiles
def test_a_cache_that_cannot_be_written_serves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image whose root is read-only and that has no compiler."""
    first = kernels.load(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert kernels.load(tmp_path).path == first.path


def test_without_a_compiler_numpy_copies_and_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found = kernels.load(tmp_path)
    assert not found.used
    assert "install gcc" in found.text
    Case.of([64], Side(8, 2, False, 0, 0), Side(8, 2, False, 0, 0), 1).check(found)


@compiles
def test_a_source_that_does_not_compile_leaves_numpy_and_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "host_copy.c").write_text("int broken(")
    monkeypatch.setattr(kernels, "source_directory", lambda: tmp_path)
    found = kernels.load(tmp_path / "cache")
    assert not found.used
    assert "error" in found.text
    assert os.listdir(tmp_path / "cache" / "kernels") == []


@compiles
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720])
def test_a_cache_that_others_may_write_is_not_used(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "kernels"
    directory.mkdir()
    directory.chmod(mode)
    found = kernels.load(tmp_path)
    assert found.used, "it is compiled aside"
    assert found.path is not None
    assert not found.path.exists()
    assert os.listdir(directory) == []


@compiles
def test_a_cache_behind_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kernels").symlink_to(tmp_path / "elsewhere")
    assert kernels.load(tmp_path).used
    assert os.listdir(tmp_path / "elsewhere") == []


@compiles
def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    first = kernels.load(tmp_path)
    assert first.path is not None
    aside = tmp_path / "damaged"
    aside.write_bytes(first.path.read_bytes()[:1_000])
    aside.replace(first.path)  # another file: the one that is loaded stays whole
    again = kernels.load(tmp_path)
    assert again.used
    assert ctypes.CDLL(str(first.path)).pdtransfer_streams() == first.streams


def test_the_source_is_found_in_a_wheel_and_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (kernels.source_directory() / "host_copy.c").is_file()
    package = tmp_path / "pdtransfer"
    package.mkdir()
    monkeypatch.setattr(kernels, "__file__", str(package / "kernels" / "__init__.py"))
    assert kernels.source_directory() == tmp_path / "kernels"
    (package / "_share" / "kernels").mkdir(parents=True)
    assert kernels.source_directory() == package / "_share" / "kernels"
