"""kv_copy without a GPU: its launches as host code and its CPU path, against the tensors' own indexing."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtransfer.errors import LayoutMismatchError, LocalProtocolError, WorldError
from pdtransfer.kernels import UnusableError, compiled, driver, gpu, native, source_directory
from pdtransfer.kernels.arguments import CopyArgument, SlotsArgument
from pdtransfer.kernels.cancel import CancelWord
from pdtransfer.kernels.kv_copy import PlannedCopy, kv_copy, lanes_of, launch_of, pairing_of, side_of
from pdtransfer.kernels.pools import PageSlots, PinnedCancel, Progress, State
from pdtransfer.layout.layout_builders import ITEM_LAYOUTS
from pdtransfer.serve.commands import cli
from tests.support import kernels_host
from tests.support.effort import some
from tests.support.layout_tensors import CANARY, c4, dsa_index, mha, mla
from tests.support.layout_tensors import Pool as Tensors
from tests.support.slot_copies import copies, filled, pool_of, slots_of, wanted

PROPERTY = settings(
    max_examples=some(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

GLANCE_ITEMS = 16  # as in kernels/kv_copy.h


@PROPERTY
@given(copies(), st.sampled_from([(1, 32), (2, 64), (3, 1024)]), st.booleans())
def test_a_launch_copies_every_layout_into_every_other_and_touches_nothing_else(
    lib: ctypes.CDLL, copy: tuple[Tensors, Tensors, Any, Any, int], shape: tuple[int, int], fetch: bool
) -> None:
    source, target, source_slots, target_slots, rows = copy
    source.fill(np.arange(source.slots))
    right = wanted(source, target, slots_of(source_slots, source, rows), slots_of(target_slots, target, rows))
    sides = pool_of(target, host=not fetch), pool_of(source, host=fetch)
    words = kernels_host.Words()
    kernels_host.run(lib, *sides, target_slots, source_slots, rows, blocks=shape[0], threads=shape[1], words=words)
    assert np.array_equal(target.memory, right)
    assert words.progress.tolist() == [5 << 2 | State.COMPLETE, 0]
    assert not words.tally.any()


@PROPERTY
@given(copies())
def test_the_cpu_path_copies_the_same_with_the_same_arguments(copy: tuple[Tensors, Tensors, Any, Any, int]) -> None:
    source, target, source_slots, target_slots, rows = copy
    source.fill(np.arange(source.slots))
    right = wanted(source, target, slots_of(source_slots, source, rows), slots_of(target_slots, target, rows))
    progress = Progress()
    kv_copy(pool_of(target), pool_of(source), target_slots, source_slots, rows, progress=progress, blocks=3)
    assert np.array_equal(target.memory, right)
    assert progress.state is State.COMPLETE


@pytest.mark.parametrize("far", ITEM_LAYOUTS)
@pytest.mark.parametrize("near", ITEM_LAYOUTS)
def test_pages_that_keep_values_and_scales_apart_move_row_by_row_to_rows_of_their_own_and_back(
    lib: ctypes.CDLL, near: str, far: str
) -> None:
    """Rows that are not whole pages of either side: from pages of 64 to pages of 1 and of 4, and back to 64."""
    device, back = (filled(near, c4(), 64, 3, content=content) for content in (True, False))
    start = [filled(far, c4(), page_size, pages, content=False) for page_size, pages in ((1, 150), (4, 40))]
    rng = np.random.default_rng(3)
    rows, of, into = 147, rng.permutation(192)[:147], rng.permutation(192)[:147]
    for host in start:
        at = rng.permutation(host.slots)[:rows]
        right = wanted(device, host, of, at)
        kernels_host.run(lib, pool_of(host, host=True), pool_of(device), at, of, rows)
        assert np.array_equal(host.memory, right)
        again = wanted(host, back, at, into)
        kernels_host.run(lib, pool_of(back), pool_of(host, host=True), into, at, rows)
        assert np.array_equal(back.memory, again)
        for kind, layer, head in device.model.rows():
            assert np.array_equal(back.read(kind, layer, head, into), device.read(kind, layer, head, of))


@pytest.mark.slow
def test_rows_of_every_size_and_alignment_stay_within_themselves(tmp_path: Path) -> None:
    kernels_host.built(tmp_path / "alone", *kernels_host.ENDS, "-DALONE", "-fsanitize=address,undefined")
    done = subprocess.run([tmp_path / "alone"], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "72704 rows\n"


def test_arguments_are_as_long_as_the_kernels_own(lib: ctypes.CDLL) -> None:
    sizes = [lib.sizes_of(which) for which in range(3)]
    assert sizes == [ctypes.sizeof(CopyArgument), ctypes.sizeof(SlotsArgument), 7 * 8]


@pytest.mark.parametrize("of_source", [False, True])
@pytest.mark.parametrize("granule", [1, 4])
def test_slots_that_only_the_card_knows_are_skipped_and_counted_where_they_leave_their_pool(
    lib: ctypes.CDLL, granule: int, of_source: bool
) -> None:
    source, target = filled("layer_first", mla(), 4, 8, content=True), filled("page_first", mla(), 4, 8, content=False)
    entries = np.array([3, -1, 0, 1 << 20, 32 // granule, 32 // granule - 1])
    good = [0, 2, 5]
    slots = PageSlots(entries) if granule > 1 else entries
    words = kernels_host.Words()
    rows = len(entries) * granule
    given = (range(rows), slots) if of_source else (slots, range(rows))
    kernels_host.run(lib, pool_of(target), pool_of(source), *given, rows, words=words)
    plain = np.arange(rows).reshape(-1, granule)[good].reshape(-1)
    named = (entries[good][:, None] * granule + np.arange(granule)).reshape(-1)
    untouched = filled("page_first", mla(), 4, 8, content=False)
    sides = (named, plain) if of_source else (plain, named)
    assert np.array_equal(target.memory, wanted(source, untouched, *sides))
    assert words.progress.tolist() == [5 << 2 | State.COMPLETE, 3 * granule]
    assert not words.tally.any(), "ready for the next launch"


@pytest.mark.parametrize(("known", "copied"), [(0, 0), (7, 7), (40, 32), (-3, 0)])
def test_a_count_that_only_the_card_knows_ends_at_the_slots(lib: ctypes.CDLL, known: int, copied: int) -> None:
    source, target = (filled("layer_first", mla(), 4, 8, content=content) for content in (True, False))
    slots = np.random.default_rng(0).permutation(32)
    untouched = filled("layer_first", mla(), 4, 8, content=False)
    right = wanted(source, untouched, np.arange(copied), slots[:copied]) if copied else untouched.memory
    count = np.array([known], np.int32)
    kernels_host.run(lib, pool_of(target), pool_of(source), slots, range(32), 32, count_at=count, known=False)
    assert np.array_equal(target.memory, right)


def test_a_cancelled_launch_stops_where_it_looks_and_reports_it(lib: ctypes.CDLL) -> None:
    model = mla()
    source, target = (filled("layer_first", model, 4, 32, content=content) for content in (True, False))
    words = kernels_host.Words()
    words.cancel[0] = 1
    launch = kernels_host.run(
        lib, pool_of(target), pool_of(source), range(128), range(128), 128, words=words, blocks=1, threads=32
    )
    groups = 32 >> launch.argument.group_shift
    written = int((target.memory != CANARY).sum())
    assert 0 < written <= GLANCE_ITEMS * 3 // 2 * groups * int(launch.pairs[:, 6].max()), (
        "the second look at the latest"
    )
    assert 128 * len(launch.pairs) > GLANCE_ITEMS * 2 * groups, "there was more to do"
    assert words.progress[0] == 5 << 2 | State.CANCELLED
    assert not words.tally.any()


def test_a_launch_that_is_short_does_not_look(lib: ctypes.CDLL) -> None:
    source, target = (filled("layer_first", mla(), 4, 8, content=content) for content in (True, False))
    words = kernels_host.Words()
    words.cancel[0] = 1
    right = wanted(source, target, range(32), range(32))
    kernels_host.run(lib, pool_of(target), pool_of(source), range(32), range(32), 32, words=words)
    assert np.array_equal(target.memory, right)
    assert words.progress[0] == 5 << 2 | State.COMPLETE


def test_whole_pages_move_as_wide_rows(lib: ctypes.CDLL) -> None:
    model = dsa_index()
    source, target = (
        filled("layer_first", model, 64, 6, content=True),
        filled("page_first", model, 64, 6, content=False),
    )
    pages = np.array([5, 0, 3, 1])
    slots = slots_of(PageSlots(pages), source, 256)
    right = wanted(source, target, slots, slots[::-1].reshape(4, 64)[:, ::-1].reshape(-1))
    launch = kernels_host.run(
        lib, pool_of(target), pool_of(source), PageSlots(pages[::-1].copy()), PageSlots(pages), 256
    )
    assert np.array_equal(target.memory, right)
    assert launch.argument.count == 4
    assert launch.pairs[:, 6].sum() == 3 * 64 * 132


def test_wide_rows_are_cut_into_pieces_that_tile_them() -> None:
    source, target = (filled("page_first", mha(head_bytes=4_000), 4, 8, content=content) for content in (True, False))
    pairing = pairing_of(source.layout, target.layout)
    sides = [side_of("slots", range(4), pool_of(each), pairing.source_slots) for each in (target, source)]
    launch = launch_of(pool_of(target), pool_of(source), *sides, 4)
    pieces = launch.pairs[np.argsort(launch.pairs[:, 3])]
    assert (pieces[:, 6] <= 2_048).all()
    assert (pieces[:, 0] - pieces[0, 0] == pieces[:, 3] - pieces[0, 3]).all()
    ends = pieces[:-1, 3] + pieces[:-1, 6]
    assert (ends <= pieces[1:, 3]).all()
    assert pieces[:, 6].sum() == sum(plane.row_bytes for plane in source.layout.planes)


@pytest.mark.parametrize(
    ("row_bytes", "far", "near"),
    [
        (4, 1, 1),
        (16, 1, 1),
        (36, 4, 1),
        (128, 8, 2),
        (132, 8, 4),
        (584, 16, 8),
        (656, 8, 8),
        (1_152, 8, 8),
        (2_052, 32, 8),
    ],
)
def test_lanes_suit_the_widest_row_and_the_units_in_which_it_can_be_copied(row_bytes: int, far: int, near: int) -> None:
    pairs = np.array([[0, step, step, 0, step, step, step] for step in (8, row_bytes)][row_bytes < 8 :])
    assert (lanes_of(pairs, far=True), lanes_of(pairs, far=False)) == (far, near)


def test_a_second_launch_is_not_taken_for_the_first() -> None:
    progress = Progress()
    progress.begin()
    progress.end(State.COMPLETE)
    assert progress.state is State.COMPLETE
    progress.begin()
    assert progress.state is State.RUNNING


def test_a_cancelled_copy_on_the_cpu_reports_it() -> None:
    source, target = (filled("layer_first", mla(), 4, 8, content=content) for content in (True, False))
    progress, cancel = Progress(), CancelWord()
    cancel.set()
    kv_copy(pool_of(target), pool_of(source), range(8), range(8), 8, progress=progress, cancel=cancel)
    assert progress.state is State.CANCELLED
    assert (target.memory == CANARY).all()


@pytest.mark.parametrize("host", [None, 0])
@pytest.mark.parametrize(
    ("target_slots", "source_slots", "count", "complaint"),
    [
        (np.array([1, 2, 1]), range(3), 3, "target_slots: slot 1 is there twice"),
        (np.array([1, 32]), range(2), 2, r"target_slots: 32 is outside 0..31"),
        (np.array([1, 2]), np.array([0, -1]), 2, r"source_slots: -1 is outside 0..31"),
        (range(30, 33), range(3), 3, r"target_slots: 30..32 are outside 0..31"),
        (PageSlots(np.array([1, 1])), range(8), 8, "target_slots: slot 1 is there twice"),
        (PageSlots(np.array([8])), range(4), 4, r"target_slots: 8 is outside 0..7"),
        (range(3), range(2), 3, "count: 3 rows, and slots for 2"),
        (range(3), range(3), -1, "count: -1 rows"),
        (range(0, 6, 2), range(3), 3, "is not 1"),
        (np.array([0.5]), range(1), 1, "float64"),
        (range(3), range(3), "3", "count: str"),
    ],
)
def test_what_the_cpu_knows_is_checked_before_a_byte_moves(
    target_slots: Any, source_slots: Any, count: Any, complaint: str, host: int | None
) -> None:
    source, target = (filled("layer_first", mla(), 4, 8, content=content) for content in (True, False))
    with pytest.raises(LocalProtocolError, match=complaint):
        kv_copy(pool_of(target, device=host), pool_of(source, device=host), target_slots, source_slots, count)
    kv_copy(pool_of(target), pool_of(source), [], np.array([]), 0)  # of which numpy makes float64
    assert (target.memory == CANARY).all()


@pytest.mark.parametrize("rows", [-1, 3])
@pytest.mark.parametrize("counts", [None, np.array([9], np.int32)])
def test_a_planned_copy_ends_at_its_lists(rows: int, counts: Any) -> None:
    source, target = (filled("layer_first", mla(), 4, 8, content=content) for content in (True, False))
    planned = PlannedCopy(pool_of(target), pool_of(source), np.arange(2), np.arange(4), counts=counts)
    with pytest.raises(LocalProtocolError, match=f"rows: {rows}, and slots for 2"):
        planned.queue(rows)
    assert (target.memory == CANARY).all()
    planned.queue(2)
    assert not (target.memory == CANARY).all()


def test_pools_that_do_not_pair_are_refused_field_by_field() -> None:
    source, target = filled("layer_first", mla(), 4, 8, content=True), filled("layer_first", mha(), 4, 8, content=False)
    with pytest.raises(LayoutMismatchError):
        kv_copy(pool_of(target), pool_of(source), range(3), range(3), 3)
    with pytest.raises(LocalProtocolError, match="the target is of GPU 0, the source of GPU None"):
        kv_copy(pool_of(target, device=0), pool_of(source), range(3), range(3), 3)


# Compiling


@pytest.fixture
def compiler() -> compiled.Compiler:
    try:
        return compiled.compiler()
    except UnusableError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", compiled.ARCHITECTURES)
@pytest.mark.parametrize("kernel", compiled.KERNELS)
def test_every_kernel_compiles_forevery_architecture(
    compiler: compiled.Compiler, kernel: str, architecture: str, tmp_path: Path
) -> None:
    assert compiled.machine_code(kernel, architecture, tmp_path)[:4] == b"\x7fELF"


def test_what_is_compiled_is_all_that_there_is() -> None:
    directory = source_directory()
    assert sorted(compiled.KERNELS) == sorted(path.stem for path in directory.glob("*.cu"))
    assert sorted(compiled.HEADERS) == sorted(path.name for path in directory.glob("*.h"))


class Counting:
    """A compiler that counts."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []

    def compile(self, kernel: str, architecture: str) -> bytes:
        self.compiled.append((kernel, architecture))
        return b"code of " + architecture.encode()


def test_machine_code_is_kept_by_all_that_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting, version, text = Counting(), "1", compiled._read("rows.h")
    monkeypatch.setattr(compiled, "compiler", lambda: compiled.Compiler(version, counting.compile))
    for _ in range(2):
        assert compiled.machine_code("kv_copy", "sm_90", tmp_path) == b"code of sm_90"
    assert len(counting.compiled) == 1
    compiled.machine_code("kv_copy", "sm_100", tmp_path)
    version = "2"
    compiled.machine_code("kv_copy", "sm_90", tmp_path)
    read = compiled._read
    monkeypatch.setattr(compiled, "_read", lambda name: text + " " if name == "rows.h" else read(name))
    compiled.machine_code("kv_copy", "sm_90", tmp_path)
    assert len(counting.compiled) == 4


def test_without_a_compiler_what_was_kept_is_used_and_the_rest_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "compiler", lambda: compiled.Compiler("1", Counting().compile))
    compiled.machine_code("kv_copy", "sm_90", tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "_nvrtc", Mock(side_effect=UnusableError("no NVRTC: pip install it")))
    monkeypatch.setenv("PATH", "/nonexistent")
    assert compiled.machine_code("kv_copy", "sm_90", tmp_path) == b"code of sm_90"
    with pytest.raises(UnusableError, match=r"pip install .*; and no nvcc"):
        compiled.machine_code("kv_copy", "sm_100", tmp_path)


# Hosts without a GPU


@pytest.mark.skipif(driver.count() > 0, reason="this host has a GPU")
def test_without_a_card_there_is_a_clear_line_and_no_crash() -> None:
    source, target = (filled("layer_first", mla(), 4, 8, content=content) for content in (True, False))
    for ask in (lambda: Progress(0), lambda: PinnedCancel(0), lambda: gpu.gpu_at(0)):
        with pytest.raises(WorldError, match="no CUDA"):
            ask()
    with pytest.raises(WorldError, match="no CUDA"):
        kv_copy(pool_of(target, device=0), pool_of(source, device=0), range(3), range(3), 3)


def test_importing_the_kernels_imports_neither_torch_nor_cuda() -> None:
    program = (
        "import sys, pdtransfer.kernels.kv_copy; print([m for m in ('torch', 'cuda.bindings') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
def test_build_fills_the_cache_for_the_architectures_it_is_given(
    compiler: compiled.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDTRANSFER_CACHE", str(tmp_path))
    assert cli.main(["kernels", "build", "--arch", "sm_90", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {each["kernel"] for each in printed["built"]} == set(compiled.KERNELS)
    assert len(list((tmp_path / "kernels").glob("*-sm_90-*.cubin"))) == len(compiled.KERNELS)
    assert cli.main(["kernels", "build", "--arch", "sm_7"]) == 1
    assert "sm_7" in capsys.readouterr().err


@pytest.mark.slow
def test_build_leaves_nothing_to_compile_at_the_first_request(compiler: compiled.Compiler, tmp_path: Path) -> None:
    if not native().used:
        pytest.skip("no C compiler")
    command = [sys.executable, "-m", "pdtransfer", "kernels", "build", "--arch", "sm_90", "--json"]
    environment = os.environ | {"PDTRANSFER_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr
    built = {path.name.partition("-")[0] for path in (tmp_path / "kernels").glob("*.so")}
    assert built == {path.stem for path in source_directory().glob("*.c")}
    assert all(str(tmp_path) in text for text in json.loads(done.stdout)["host"])


@pytest.mark.skipif(driver.count() > 0, reason="this host has a GPU")
def test_commands_for_a_card_fail_in_one_line_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["kernels", "build"], ["bench", "kernels"]):
        assert cli.main(command) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
