"""Copies rows between two pools, all planes in one launch on a GPU, or on the CPU with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import LocalProtocolError
from ..layout.geometry import Int64s, read_only
from ..layout.layout import Layout, check_slots, expand_pages
from ..layout.pairing import Pairing, pair
from ..layout.plan import plan
from . import copy as host_copy
from .arguments import BLOCKS_PUSH, THREADS, CopyArgument, SlotsArgument
from .cancel import CancelWord
from .gpu import Gpu, gpu_at
from .pools import PageSlots, PinnedCancel, Pool, Progress, Slots, State
from .staging import Staging

BLOCKS_PUSH_NARROW = 8  # of narrow rows, of which more must be under way
BLOCKS_FETCH = 32  # from host memory, whose latency they hide
NARROW_BYTES = 256  # rows that take more of the bus than their bytes, when they are copied one by one
_PAIRINGS_MAX = 64  # an engine has a few pools
_PIECE_BYTES = 2_048
_LINE_BYTES = 128
_UNIT_BYTES = 16  # of one access by a lane, at most
_HELD_UNITS = 9  # by a lane at once, as in kernels/kv_copy.h
_NEAR_BYTES = 64  # of a row for each lane, within a GPU


class Side(NamedTuple):
    """The slots of one side: `listed` if the CPU knows them, or at the device address `address`."""

    listed: np.ndarray[Any, Any] | None
    first: int  # the first slot of a range
    address: int
    wide: bool  # int64
    granule: int  # slots that one entry stands for
    entries: int
    limit: int
    on_gpu: bool  # the pool is a GPU's


def kv_copy(
    target: Pool, source: Pool, target_slots: Slots, source_slots: Slots, count: Any, *,
    progress: Progress | None = None, cancel: CancelWord | None = None, blocks: int | None = None, stream: int = 0,
) -> None:  # fmt: skip
    """Copies `count` rows in all planes of both layouts: row i from source_slots[i] to target_slots[i].

    All kinds of Slots mix. `count` is an int, or an int32 (1,) in the GPU's memory, limited by the number of slots.
    Target slots must be distinct; other rows do not change. Between pools of a GPU this queues one launch on `stream`
    (a CUstream's address) and returns. `progress` reports its end, `cancel` (a PinnedCancel) stops it early, and
    `blocks` limits the multiprocessors it uses. Between pools of this process it returns when the copy is done.

    Raises LayoutMismatchError if the pools do not pair, LocalProtocolError for slots that are out of range, repeated or
    too few, as far as the CPU knows them. Raises WorldError if the driver refuses. The kernel skips slots that are out
    of range and counts them in `progress`.
    """
    copy = check_copy(target, source, target_slots, source_slots, count)
    prepare(copy, count, progress=progress, cancel=cancel, blocks=blocks, stream=stream)()


def prepare(
    copy: CheckedCopy, count: Any, *, progress: Progress | None = None,
    cancel: CancelWord | None = None, blocks: int | None = None, stream: int = 0, staging: Staging | None = None,
) -> Callable[[], None]:  # fmt: skip
    """Prepares kv_copy and returns a function that queues it, which may be called once.

    With `staging`, the slots that the CPU knows are already on their way to the GPU.
    """
    if copy.target.device is None:
        return partial(_copy_on_cpu, copy, progress, cancel or CancelWord())
    return _prepare_launch(copy, count, progress, cancel, blocks, stream, staging)


class CheckedCopy(NamedTuple):
    """Arguments of a copy that the CPU has checked."""

    target: Pool
    source: Pool
    pairing: Pairing
    target_side: Side
    source_side: Side
    rows: int  # an upper bound if only the GPU knows the count

    @property
    def target_slots(self) -> Int64s:
        """The target slot of each row, if the CPU knows them."""
        return slots_of(self.target_side, self.rows)

    @property
    def source_slots(self) -> Int64s:
        """The source slot of each row, if the CPU knows them."""
        return slots_of(self.source_side, self.rows)

    @property
    def known(self) -> bool:
        """True if the CPU knows the slots of both sides."""
        return not self.target_side.address and not self.source_side.address

    @property
    def fetches(self) -> bool:
        """True if the rows go from the host to a GPU."""
        return self.source.host and not self.target.host


def check_copy(target: Pool, source: Pool, target_slots: Slots, source_slots: Slots, count: Any) -> CheckedCopy:
    """Checks kv_copy's arguments and raises its errors."""
    if target.device != source.device:
        raise LocalProtocolError(f"pools: the target is of GPU {target.device}, the source of GPU {source.device}")
    pairing = pairing_of(source.layout, target.layout)
    source_side = side_of("source_slots", source_slots, source, pairing.source_slots)
    target_side = side_of("target_slots", target_slots, target, pairing.target_slots)
    rows = _rows(count, source_side, target_side)
    _check(source_side, "source_slots", rows, repeated=True)
    _check(target_side, "target_slots", rows, repeated=False)
    return CheckedCopy(target, source, pairing, target_side, source_side, rows)


@lru_cache(_PAIRINGS_MAX)
def pairing_of(source: Layout, target: Layout) -> Pairing:
    """pairing.pair, fused and cached, since engines copy between the same pools."""
    return pair(source, target).fused()


def by_pages(copy: CheckedCopy) -> tuple[CheckedCopy, CheckedCopy | None] | None:
    """Splits a copy with narrow rows into whole pages, as page indices, and the rows that are left over, if any.

    Returns None unless the CPU knows all slots and a plane's rows are below NARROW_BYTES. Every page must be contiguous
    in all planes of both sides. All rows between the first and the last page border must lie in whole pages of both.
    """
    pairing, sides = copy.pairing, (copy.target_side, copy.source_side)
    size = max(pairing.source_page_size, pairing.target_page_size)
    if size == 1 or copy.rows < size or int(pairing.table[:, 6].min()) >= NARROW_BYTES:
        return None
    if not copy.known or any(side.granule > 1 for side in sides) or granule_of(pairing, size) != size:
        return None
    slots = [slots_of(side, copy.rows) for side in sides]
    first = -int(slots[0][0]) % size
    end = first + (copy.rows - first) // size * size
    if end <= first:
        return None
    pages = [side_slots[first:end].reshape(-1, size) for side_slots in slots]
    if any((side_pages != side_pages[:, :1] // size * size + np.arange(size)).any() for side_pages in pages):
        return None
    whole = [
        side._replace(
            listed=side_pages[:, 0] // size, wide=True, granule=size, entries=len(side_pages), limit=side.limit // size
        )
        for side, side_pages in zip(sides, pages, strict=True)
    ]
    left = [np.concatenate((side_slots[:first], side_slots[end:])) for side_slots in slots]
    rest = [
        side._replace(listed=side_slots, wide=True, entries=len(side_slots))
        for side, side_slots in zip(sides, left, strict=True)
    ]
    of_pages = copy._replace(target_side=whole[0], source_side=whole[1], rows=end - first)
    others = copy._replace(target_side=rest[0], source_side=rest[1], rows=len(left[0]))
    return of_pages, others if others.rows else None


def side_of(name: str, slots: Slots, pool: Pool, slot_limit: int) -> Side:
    """Describes `slots`. Raises LocalProtocolError unless they are integers where the pool can read them."""
    granule = pool.layout.page_size if isinstance(slots, PageSlots) else 1
    entries = slots.entries if isinstance(slots, PageSlots) else slots
    limit, on_gpu = slot_limit // granule, pool.device is not None
    if isinstance(entries, range):
        if entries.step != 1:
            raise LocalProtocolError(f"{name}: the step of {entries} is not 1")
        return Side(None, entries.start, 0, False, granule, len(entries), limit, on_gpu)
    interface: dict[str, Any] | None = getattr(entries, "__cuda_array_interface__", None)
    if interface is None:
        listed = np.ascontiguousarray(entries, None if np.size(entries) else np.int64)
        if listed.dtype.str not in ("<i4", "<i8") or listed.ndim != 1:
            raise LocalProtocolError(f"{name}: {listed.dtype} of shape {listed.shape}, not int32 or int64 (n,)")
        return Side(listed, 0, 0, listed.dtype == np.int64, granule, len(listed), limit, on_gpu)
    kind, shape = interface["typestr"], interface["shape"]
    if kind not in ("<i4", "<i8") or len(shape) != 1 or interface.get("strides") is not None:
        raise LocalProtocolError(f"{name}: {kind} of shape {shape}, not contiguous int32 or int64 (n,)")
    if pool.device is None:
        raise LocalProtocolError(f"{name}: in a GPU's memory, but the pool is not")
    return Side(None, 0, int(interface["data"][0]), kind == "<i8", granule, int(shape[0]), limit, on_gpu)


def _rows(count: Any, source: Side, target: Side) -> int:
    """The number of rows, or its upper bound. Raises LocalProtocolError if there are too few slots."""
    most = min(source.entries * source.granule, target.entries * target.granule)
    if not isinstance(count, int):
        if not (source.on_gpu and hasattr(count, "__cuda_array_interface__")):
            raise LocalProtocolError(f"count: {type(count).__name__}, not int")
        return most
    rows = count
    if not 0 <= rows <= most:
        raise LocalProtocolError(f"count: {rows} rows, and slots for {most}")
    return rows


def _check(side: Side, name: str, rows: int, *, repeated: bool) -> None:
    used = -(-rows // side.granule)
    if side.address or not used:
        return
    if side.listed is None:
        if side.first < 0 or side.first + used > side.limit:
            raise LocalProtocolError(f"{name}: {side.first}..{side.first + used - 1} are outside 0..{side.limit - 1}")
        return
    listed = side.listed[:used]
    low, high = int(listed.min()), int(listed.max())
    if low < 0 or high >= side.limit:
        raise LocalProtocolError(f"{name}: {low if low < 0 else high} is outside 0..{side.limit - 1}")
    if not repeated:
        try:
            check_slots(listed.astype(np.int64, copy=False), side.limit, name)
        except ValueError as error:
            raise LocalProtocolError(str(error)) from None


def _copy_on_cpu(copy: CheckedCopy, progress: Progress | None, cancel: CancelWord) -> None:
    if progress is not None:
        progress.begin()
    work = plan(copy.pairing, copy.source_slots, copy.target_slots)
    complete = host_copy(work, copy.source.address, copy.target.address, cancel=cancel)
    if progress is not None:
        progress.end(State.COMPLETE if complete else State.CANCELLED)


def slots_of(side: Side, rows: int) -> Int64s:
    """The slots of `rows` rows, which the CPU knows."""
    count = -(-rows // side.granule)
    if side.listed is None:
        used = np.arange(side.first, side.first + count)
    else:
        used = side.listed[:count].astype(np.int64, copy=False)
    return expand_pages(used, side.granule, rows) if side.granule > 1 else used


class Launch(NamedTuple):
    """One launch without the device addresses of its pairs and of its listed slots."""

    argument: CopyArgument
    pairs: Int64s
    key: object  # names the pairs among the GPU's tables
    source: np.ndarray[Any, Any] | None
    target: np.ndarray[Any, Any] | None


def launch_of(
    target: Pool, source: Pool, target_side: Side, source_side: Side, rows: int, *, count_known: bool = True
) -> Launch:  # fmt: skip
    """Builds the kernel's argument. `count_known`: `rows` is the count, not an upper bound."""
    assert rows < 1 << 31, "the kernel counts with 32 bits"
    pairing = pairing_of(source.layout, target.layout)
    granule = source_side.granule
    pages = granule == target_side.granule > 1 and count_known and rows % granule == 0
    whole = pages and granule_of(pairing, granule) == granule
    step = granule if whole else 1
    pairs = _pairs(target, source, step)
    by_source = source.host and not target.host
    columns = (0, 2) if by_source else (3, 5)
    argument = CopyArgument(
        source=_argument(source_side, pairing.source_page_size, whole=whole),
        target=_argument(target_side, pairing.target_page_size, whole=whole),
        count=rows // step, pair_count=len(pairs),
        group_shift=lanes_of(pairs, far=source.host or target.host).bit_length() - 1,
        pair_major=pair_major(pairs, base=columns[0], stride=columns[1]), by_source=by_source,
    )  # fmt: skip
    return Launch(argument, pairs, (target, source, step), _used(source_side, rows), _used(target_side, rows))


@lru_cache(_PAIRINGS_MAX)
def _pairs(target: Pool, source: Pool, granule: int) -> Int64s:
    pairing = pairing_of(source.layout, target.layout)
    return device_pairs(pairing, source_address=source.address, target_address=target.address, granule=granule)


def _argument(side: Side, page_size: int, *, whole: bool) -> SlotsArgument:
    """`whole`: an entry is one row, a whole page."""
    return SlotsArgument(
        entries=side.address, first=side.first, entry_limit=side.limit, wide=side.wide,
        granule_shift=0 if whole else side.granule.bit_length() - 1,
        page_shift=0 if whole else page_size.bit_length() - 1,
    )  # fmt: skip


def _used(side: Side, rows: int) -> np.ndarray[Any, Any] | None:
    return None if side.listed is None else side.listed[: -(-rows // side.granule)]


def _prepare_launch(
    copy: CheckedCopy, count: Any, progress: Progress | None, cancel: CancelWord | None, blocks: int | None,
    stream: int, staging: Staging | None,
) -> Callable[[], None]:  # fmt: skip
    target, source = copy.target, copy.source
    assert target.device is not None
    gpu = gpu_at(target.device)
    launch = launch_of(
        target, source, copy.target_side, copy.source_side, copy.rows, count_known=isinstance(count, int)
    )
    argument = launch.argument
    argument.count_at = 0 if isinstance(count, int) else _count_address(count)
    if cancel is not None:
        if not isinstance(cancel, PinnedCancel):
            raise LocalProtocolError("cancel: a GPU can't see this word: make a PinnedCancel")
        argument.cancel = cancel.device_address
    if progress is not None:
        if not progress.address:
            raise LocalProtocolError("progress: a GPU can't see these words: make them for that GPU")
        argument.progress, argument.tally, argument.ticket = progress.address, progress.tally, progress.begin()
    staged = staging is not None and _stage(gpu, launch, staging)

    def queue() -> None:
        uploaded, argument.pairs = 0, gpu.tables.acquire(launch.key, launch.pairs)
        try:
            if staging is not None and staged:
                gpu.launch("kv_copy", staging.argument, blocks=staging.blocks, threads=THREADS, stream=stream)
            else:
                uploaded = _upload(gpu, launch, stream)
            count = blocks or blocks_of(gpu, target, source, launch.pairs)
            gpu.launch("kv_copy", argument, blocks=count, threads=THREADS, stream=stream)
        finally:
            gpu.tables.release(launch.key, stream)
            if uploaded:
                gpu.free(uploaded, stream)

    return queue


def blocks_of(gpu: Gpu, target: Pool, source: Pool, pairs: Int64s) -> int:
    """The default number of multiprocessors for a copy between these pools."""
    if target.host:
        return BLOCKS_PUSH if int(pairs[:, 6].max()) >= NARROW_BYTES else BLOCKS_PUSH_NARROW
    return BLOCKS_FETCH if source.host else gpu.multiprocessors


def _count_address(count: Any) -> int:
    interface = count.__cuda_array_interface__
    if interface["typestr"] != "<i4":
        raise LocalProtocolError(f"count: {interface['typestr']}, not int32")
    return int(interface["data"][0])


def _listed(launch: Launch) -> list[tuple[np.ndarray[Any, Any], SlotsArgument]]:
    """The sides whose slots the CPU knows, each with its argument."""
    sides = (launch.source, launch.argument.source), (launch.target, launch.argument.target)
    return [(entries, argument) for entries, argument in sides if entries is not None and len(entries)]


def _stage(gpu: Gpu, launch: Launch, staging: Staging) -> bool:
    """Stages the listed slots. Returns False if there are none."""
    if not (listed := _listed(launch)):
        return False
    staging.put(gpu, np.concatenate([entries for entries, _ in listed], dtype=np.int32, casting="same_kind"))
    address = staging.address
    for entries, argument in listed:
        argument.entries, argument.wide = address, 0
        address += 4 * len(entries)
    return True


def _upload(gpu: Gpu, launch: Launch, stream: int) -> int:
    """Queues an upload of the listed slots. Returns its device address, or 0 if there are none."""
    if not (listed := _listed(launch)):
        return 0
    start = address = gpu.allocate(sum(entries.nbytes + 16 for entries, _ in listed), stream)
    for entries, argument in listed:
        gpu.upload(address, entries, stream)
        argument.entries = address
        address += entries.nbytes + 15 & -16
    return start


# The kernel knows layouts only through its table of pairs


def device_pairs(pairing: Pairing, *, source_address: int, target_address: int, granule: int = 1) -> Int64s:
    """int64 (n, 7), with Pairing.table's columns, ascending by target; `granule` comes from `granule_of`."""
    table = pairing.table.copy()
    if granule > 1:
        page_strides = _page_strides(pairing, granule)
        table[:, 6] *= granule
        table[:, [1, 2]], table[:, [4, 5]] = page_strides[0][:, None], page_strides[1][:, None]
    table[:, 0] += source_address
    table[:, 3] += target_address
    return _in_pieces(table)


def granule_of(pairing: Pairing, page_size: int) -> int:
    """`page_size` if every page of that size is contiguous in every plane of both sides, otherwise 1."""
    width = pairing.table[:, 6]
    whole = all(
        size in (1, page_size) and np.array_equal(pairing.table[:, column], width)
        for size, column in ((pairing.source_page_size, 2), (pairing.target_page_size, 5))
    )
    return page_size if whole else 1


def lanes_of(pairs: Int64s, *, far: bool) -> int:
    """Lanes for one row, a power of two. `far`: over PCIe, where the lanes together access one line of the bus at a
    time, or the widest row if that is shorter. Within the GPU each lane copies more: more rows are in flight."""
    widest = pairs[pairs[:, 6].argmax()]
    byte_count = int(widest[6])
    if not far:
        return _lanes(byte_count, _NEAR_BYTES, _LINE_BYTES // _UNIT_BYTES)
    apart = int(np.bitwise_or.reduce(widest[[1, 2, 4, 5]])) | int(widest[0] ^ widest[3]) | _UNIT_BYTES
    unit = max(4, apart & -apart)  # in which both sides are aligned alike
    at_once = _lanes(byte_count, unit * _HELD_UNITS, _LINE_BYTES // unit)
    return max(at_once, _lanes(byte_count, _UNIT_BYTES, _LINE_BYTES // _UNIT_BYTES))


def _lanes(byte_count: int, lane_bytes: int, most: int) -> int:
    """The least power of two of lanes of `lane_bytes` bytes that hold `byte_count`, at most `most`."""
    return min(most, 1 << (-(-byte_count // lane_bytes) - 1).bit_length())


def pair_major(pairs: Int64s, *, base: int, stride: int) -> bool:
    """True if rows of one pair are closer in memory than the pairs of one row, by these columns of one side."""
    if len(pairs) == 1:
        return False
    bases = np.sort(pairs[:, base])
    return bool((bases[1:] - bases[:-1]).min() >= pairs[:, stride].min())


def _page_strides(pairing: Pairing, page_size: int) -> tuple[Int64s, Int64s]:
    """The stride between pages on each side. A side without pages has page_size 1 and contiguous rows."""
    source, target = (
        pairing.table[:, column] * page_size if size == 1 else pairing.table[:, column - 1]
        for size, column in ((pairing.source_page_size, 2), (pairing.target_page_size, 5))
    )
    return source, target


def _in_pieces(table: Int64s) -> Int64s:
    """Splits rows wider than a warp's load into pieces of similar size, at cache lines."""
    widths = table[:, 6]
    counts = -(-widths // _PIECE_BYTES)
    if (counts == 1).all():
        return read_only(table)
    steps = -(-widths // counts)
    steps = np.where(counts > 1, -(-steps // _LINE_BYTES) * _LINE_BYTES, steps)
    counts = -(-widths // steps)
    pieces = np.repeat(table, counts, axis=0)
    number = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = number * np.repeat(steps, counts)
    pieces[:, 0] += starts
    pieces[:, 3] += starts
    pieces[:, 6] = np.minimum(np.repeat(steps, counts), pieces[:, 6] - starts)
    return read_only(pieces)


class PlannedCopy:
    """A copy of rows source_slots[i] to target_slots[i] that is planned once and repeated; a graph may capture it.

    Both are int32 (n,), numpy for pools of this process, else in the GPU's memory. Rows with a negative slot are
    skipped. The first element of `counts` (int32, in the same memory) is the number of rows. On a GPU the pairs stay
    uploaded until `close`, so `queue` does not allocate or wait. Raises as kv_copy does.
    """

    def __init__(self, target: Pool, source: Pool, target_slots: Any, source_slots: Any, *, counts: Any = None) -> None:
        self._pools, self._slots, self._counts = (target, source), (target_slots, source_slots), counts
        self._key: object = None
        self._gpu = None if target.device is None else gpu_at(target.device)
        if self._gpu is None:
            if source.device is not None:
                raise LocalProtocolError(f"pools: the target is not on a GPU, the source is on GPU {source.device}")
            self._most = min(len(target_slots), len(source_slots))
            return
        copy = check_copy(target, source, target_slots, source_slots, len(target_slots) if counts is None else counts)
        launch = launch_of(target, source, copy.target_side, copy.source_side, copy.rows, count_known=False)
        self._most, self._argument = copy.rows, launch.argument
        self._argument.pairs = self._gpu.tables.acquire(launch.key, launch.pairs)
        self._key = launch.key
        if counts is not None:
            self._argument.count_at = int(counts.__cuda_array_interface__["data"][0])
        self._blocks = blocks_of(self._gpu, target, source, launch.pairs)

    @property
    def argument(self) -> CopyArgument:
        """The kernel's argument, on a GPU. Its pairs stay until `close`."""
        assert self._gpu is not None
        return self._argument

    def queue(self, rows: int, *, stream: int = 0) -> None:
        """Queues the copy of `rows` rows, or of `counts` rows if that is less. Without a GPU it copies at once.

        Raises LocalProtocolError if the lists are shorter.
        """
        if not 0 <= rows <= self._most:
            raise LocalProtocolError(f"rows: {rows}, and slots for {self._most}")
        if self._gpu is not None:
            self._argument.count = rows
            if rows:
                self._gpu.launch("kv_copy", self._argument, blocks=self._blocks, threads=THREADS, stream=stream)
            return
        count = rows if self._counts is None else min(rows, int(self._counts[0]))
        targets, sources = (slots[:count] for slots in self._slots)
        valid = np.flatnonzero((targets >= 0) & (sources >= 0))
        kv_copy(*self._pools, targets[valid], sources[valid], len(valid))

    def close(self) -> None:
        """Releases the uploaded pairs. No launch may be running. Idempotent."""
        if self._gpu is not None and self._key is not None:
            self._gpu.tables.release(self._key)
            self._key = None
