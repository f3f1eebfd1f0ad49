"""Checksums: the published hash, one sum for one content however it lies, and every way in which it can be wrong."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdtransfer import kernels
from pdtransfer.kernels import checksum_copy
from pdtransfer.kernels.cancel import CancelWord
from pdtransfer.kernels.checksum_copy import NativeChecksum, checksum
from pdtransfer.layout.checksum import Lines, hash_of, hashes, lines_of, runs_of
from pdtransfer.layout.layout import Layout, Plane
from pdtransfer.layout.pairing import pair
from pdtransfer.layout.plan import pieces_of, plan
from tests.serve.stranger import messages
from tests.serve.stranger.checksum import MASK, head_hash
from tests.support import kernels_host
from tests.support.effort import some
from tests.support.layout_tensors import CANARY, Pool, mha, mla, models, pools

NUMPY = NativeChecksum(path=None, text="numpy")
PRIME32 = 2_654_435_761
PROPERTY = settings(
    max_examples=some(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> NativeChecksum:
    if not any(map(shutil.which, kernels._COMPILERS)):
        pytest.skip("no C or C++ compiler")
    found = checksum_copy.load(tmp_path_factory.mktemp("cache"))
    assert found.sum is not None, found.text
    return found


def ways(compiled: NativeChecksum) -> list[NativeChecksum]:
    """Every way of summing that this host has."""
    return [NUMPY, replace(compiled, wide=False), *([compiled] if compiled.wide else [])]


def sanity(byte_count: int) -> bytes:
    """The bytes that XXH64's published test values are of."""
    found, seed = bytearray(), PRIME32
    for _ in range(byte_count):
        found.append(seed >> 24)
        seed = seed * seed & 0xFFFF_FFFF
    return bytes(found)


def sum_of(
    pool: Pool, slots: np.ndarray, lines: Lines | None = None, *, first_row: int = 0, by: NativeChecksum = NUMPY
) -> int:
    """Of a room whose row i is slots[i]."""
    lines = lines or lines_of("kv", pool.layout)
    runs = runs_of(slots, np.ones(len(slots), np.int64), first_row)
    found = checksum(lines, runs, pool.memory.ctypes.data, by=by)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "seed", "wanted"),
    [
        (b"", 0, 0xEF46DB3751D8E999),
        (b"", PRIME32, 0xAC75FDA2929B17EF),
        (sanity(1), 0, 0x4FCE394CC88952D8),
        (sanity(1), PRIME32, 0x739840CB819FA723),
        (sanity(14), 0, 0xCFFA8DB881BC3A3D),
        (sanity(14), PRIME32, 0x5B9611585EFCC9CB),
        (sanity(101), 0, 0x0EAB543384F878AD),
        (sanity(101), PRIME32, 0xCAA65939306F1E21),
        (b"xxhash", 20_141_025, 0xB559B98D844E0635),
    ],
)
def test_the_hash_is_xxh64_as_published(text: bytes, seed: int, wanted: int) -> None:
    assert hash_of(text, *([seed] if seed else [])) == wanted


def test_the_hash_is_what_the_xxhash_package_returns() -> None:
    xxhash = pytest.importorskip("xxhash")
    rng = np.random.default_rng(1)
    for byte_count in range(200):
        text, seed = rng.bytes(byte_count), int(rng.integers(1 << 63))
        assert hash_of(text, seed) == xxhash.xxh64_intdigest(text, seed)


@PROPERTY
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 140)), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 1 << 32),
)
def test_every_way_of_summing_returns_the_same(
    compiled: NativeChecksum, heads: list[tuple[int, int]], wide_rows: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    page_size, at, planes = 8, int(rng.integers(70)), []
    for layer, (count, byte_count) in enumerate(heads):
        byte_count *= 9 if wide_rows else 1
        row = count * byte_count + int(rng.integers(5))
        planes.append(Plane(layer, "k", "uint8", 3, count, at, row * page_size, row, count * byte_count))
        at += row * 64
    layout = Layout(tuple(planes), page_size, 64)
    memory = rng.integers(0, 256, layout.end, np.uint8)
    slots = rng.permutation(64)[: int(rng.integers(1, 64))]
    runs = runs_of(slots, np.ones(len(slots), np.int64), 5)
    checksums = {checksum(lines_of("kv", layout), runs, memory.ctypes.data, by=by) for by in ways(compiled)}
    assert len(checksums) == 1
    one_by_one = 0
    for row, slot in enumerate(slots.tolist(), 5):
        for plane in layout.planes:
            for head in range(plane.head_count):
                start = plane.base + slot // 8 * plane.page_stride + slot % 8 * plane.row_stride
                bytes_ = memory[start + head * plane.head_bytes :][: plane.head_bytes].tobytes()
                head_seed = hash_of(
                    plane.layer.to_bytes(4, "little") + (3 + head).to_bytes(4, "little"), hash_of(b"k", hash_of(b"kv"))
                )
                one_by_one += hash_of(bytes_, hash_of(row.to_bytes(8, "little"), head_seed))
    assert checksums == {one_by_one & MASK}


@PROPERTY
@given(st.data())
def test_one_content_has_one_sum_in_every_layout_page_size_and_split_of_heads(
    compiled: NativeChecksum, data: st.DataObject
) -> None:
    model = data.draw(models())
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    found: set[int] = set()
    sides = [data.draw(pools(model)) for _ in range(2)]
    tokens = min(side.slots for side in sides)
    for side in sides:
        slots = rng.permutation(side.slots)[:tokens]
        content = np.arange(side.slots) + 1_000
        content[slots] = np.arange(tokens)
        side.fill(content)
        found |= {sum_of(side, slots, by=by) for by in ways(compiled)}
        middle = model.heads[len(model.heads) // 2]
        shares = [(low, high) for low, high in ((model.heads.start, middle), (middle, model.heads.stop)) if low < high]
        parts = [side.layout.heads(*share) for share in shares]
        cut = int(rng.integers(tokens + 1))
        total = 0
        for part in parts:
            lines = lines_of("kv", part)
            total += sum_of(side, slots[:cut], lines) + sum_of(side, slots[cut:], lines, first_row=cut)
        found.add(total & MASK)
        like = [lines_of("kv", side.layout, like=part) for part in parts]
        found.add(sum(sum_of(side, slots, lines) for lines in like) & MASK)
        first, end = side.layout.layer_range
        stages = [lines_of("kv", side.layout, layers=(index, index + 1)) for index in range(first, end)]
        found.add(sum(sum_of(side, slots, lines) for lines in stages) & MASK)
    assert len(found) == 1


@pytest.mark.parametrize("byte_count", [4, 9, 40, 96])
def test_every_flipped_bit_is_seen(byte_count: int) -> None:
    row = np.random.default_rng(byte_count).integers(0, 256, byte_count, np.uint8)
    flipped = np.tile(row, (8 * byte_count + 1, 1))
    for bit in range(8 * byte_count):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    found = hashes(flipped, np.zeros(len(flipped), np.uint64))
    assert len(set(found.tolist())) == len(found)


@pytest.fixture
def pool() -> Pool:
    made = Pool(name="page_first", model=mha(layers=range(3), heads=range(2), head_bytes=16), page_size=4, slots=32)
    made.fill(np.arange(32))
    return made


def test_rows_in_another_order_have_another_sum(pool: Pool) -> None:
    slots = np.arange(8)
    assert sum_of(pool, slots) != sum_of(pool, slots[[1, 0, *range(2, 8)]])


def test_layers_heads_and_kinds_that_change_places_have_another_sum(pool: Pool) -> None:
    slots, layout = np.arange(8), pool.layout
    right = sum_of(pool, slots)
    for field, values in (("layer", {0: 1, 1: 0}), ("head_start", {0: 5}), ("kind", {"k": "v", "v": "k"})):
        planes = []
        for plane in layout.planes:
            changed = {name: getattr(plane, name) for name in plane.__struct_fields__}
            changed[field] = values.get(changed[field], changed[field])
            planes.append(Plane(**changed))
        lines = lines_of("kv", Layout(tuple(planes), layout.page_size, layout.slots))
        assert sum_of(pool, slots, lines) != right, field
    assert sum_of(pool, slots, lines_of("index", layout)) != right


def test_a_row_of_another_room_and_a_missing_row_are_seen(pool: Pool) -> None:
    slots = np.arange(8)
    assert sum_of(pool, slots) != sum_of(pool, np.array([0, 1, 2, 3, 4, 5, 6, 20]))
    assert sum_of(pool, slots) != sum_of(pool, slots[:7])
    assert sum_of(pool, slots) != sum_of(pool, slots, first_row=1)


def test_rows_of_zeros_differ_from_no_rows(pool: Pool) -> None:
    pool.memory[:] = 0
    found = {sum_of(pool, np.arange(count)) for count in range(9)}
    assert len(found) == 9
    assert sum_of(pool, np.arange(0)) == 0


def test_pieces_hold_every_row_once(pool: Pool) -> None:
    runs = runs_of(np.array([3, 20, 9]), np.array([5, 1, 4]), 2)
    for rows_max in range(1, 12):
        pieces = list(pieces_of(runs, rows_max))
        assert all(piece[:, 2].sum() <= rows_max for piece in pieces)
        places = [(slot + i, row + i) for piece in pieces for slot, row, count in piece.tolist() for i in range(count)]
        assert places == list(zip([3, 4, 5, 6, 7, 20, 9, 10, 11, 12], range(2, 12), strict=True))


def test_cancel_stops_a_sum_that_runs(compiled: NativeChecksum) -> None:
    lines = lines_of("kv", Layout((Plane(0, "k", "uint8", 0, 1, 0, 4_096, 4_096, 4_096),), 1, 64))
    runs, memory = np.tile([[0, 0, 64]], (1 << 18, 1)), np.zeros(64 * 4_096, np.uint8)
    for by in ways(compiled):
        cancel, ended = CancelWord(), list[int | None]()

        def run(by: NativeChecksum = by, cancel: CancelWord = cancel, ended: list[int | None] = ended) -> None:
            ended.append(checksum(lines, runs, memory.ctypes.data, cancel=cancel, by=by))

        thread = threading.Thread(target=run)
        thread.start()
        cancel.set()
        thread.join(30)
        assert ended == [None]


@PROPERTY
@given(st.data())
def test_what_is_copied_is_summed_as_it_is_read(compiled: NativeChecksum, data: st.DataObject) -> None:
    model = data.draw(models())
    source, target = data.draw(pools(model)), data.draw(pools(model))
    source.fill(np.arange(source.slots) + 7)
    rows = data.draw(st.integers(1, min(source.slots, target.slots)))
    source_slots, target_slots = (
        np.array(data.draw(st.permutations(range(pool.slots)))[:rows], np.int64) for pool in (source, target)
    )
    work = plan(pair(source.layout, target.layout).fused(), source_slots, target_slots)
    first = data.draw(st.integers(0, 1 << 20))
    addresses = source.memory.ctypes.data, target.memory.ctypes.data
    target.memory[:] = CANARY
    assert kernels.copy(work, *addresses)
    copied, wanted = target.memory.copy(), sum_of(source, source_slots, first_row=first)
    with pytest.MonkeyPatch.context() as patch:
        # Slices of a few rows, so that runs are cut.
        patch.setattr(checksum_copy, "_SLICE_BYTES", data.draw(st.integers(1, 4 * source.layout.row_bytes)))
        for by in ways(compiled):
            target.memory[:] = CANARY
            found = checksum_copy.copy(work, *addresses, lines=lines_of("kv", source.layout), first_row=first, by=by)
            assert found == wanted
            np.testing.assert_array_equal(target.memory, copied)


def test_cancel_stops_a_copy_that_is_summed(compiled: NativeChecksum) -> None:
    side = Layout((Plane(0, "k", "uint8", 0, 1, 0, 4_096, 4_096, 4_096),), 1, 64)
    source, target = np.zeros(64 * 4_096, np.uint8), np.full(64 * 4_096, CANARY, np.uint8)
    work = plan(pair(side, side), np.arange(64), np.arange(64))
    for by in ways(compiled):
        cancel = CancelWord()
        cancel.set()
        addresses = source.ctypes.data, target.ctypes.data
        assert (
            checksum_copy.copy(work, *addresses, lines=lines_of("kv", side), first_row=0, cancel=cancel, by=by) is None
        )
        assert (target == CANARY).all()


def test_without_a_compiler_numpy_sums_and_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found = checksum_copy.load(tmp_path)
    assert found.sum is None
    assert "install gcc" in found.text


def test_the_compiled_sum_has_no_undefined_behaviour(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # One warning is about GCC's own intrinsics.
    path = kernels_host.sanitized(tmp_path / "sanitized.so", "host_checksum.c", "-Wno-maybe-uninitialized")
    sanitized = checksum_copy._open(path)
    for model in (mha(layers=range(2), heads=range(3), head_bytes=44), mla(layers=range(3), head_bytes=656)):
        pool = Pool(name="page_first", model=model, page_size=4, slots=32)
        pool.fill(np.arange(32))
        wanted, target, work = sum_of(pool, np.arange(31)), np.empty_like(pool.memory), np.arange(31)
        carried = plan(pair(pool.layout, pool.layout).fused(), work, work[::-1].copy())
        for by in ways(sanitized):
            assert sum_of(pool, np.arange(31), by=by) == wanted
            between, lines = (pool.memory.ctypes.data, target.ctypes.data), lines_of("kv", pool.layout)
            assert checksum_copy.copy(carried, *between, lines=lines, first_row=0, by=by) == wanted
    assert "runtime error" not in capfd.readouterr().err


def test_a_stranger_computes_the_golden_vectors_from_the_text_of_the_protocol() -> None:
    vectors = messages.vectors("checksums")
    assert len(vectors) >= 6
    for vector in vectors:
        total = 0
        for head in vector["heads"]:
            place = head["kind"], head["layer"], head["head"], head["row"]
            found = head_hash(vector["component"], *place, bytes.fromhex(head["bytes"]))
            assert found == int(head["hash"], 16), (vector["name"], head)
            total += found
        assert bytes.fromhex(vector["checksum"]) == (total & MASK).to_bytes(8, "little"), vector["name"]
