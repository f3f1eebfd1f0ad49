"""Copies rows between two pools, all planes in one launch: on a card, or with the same arguments on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import LocalProtocolError
from ..layout.geometry import Int64s
from ..layout.layout import Layout, check_slots, expand_pages
from ..layout.pairing import Pairing, pair
from ..layout.plan import plan
from . import copy as host_copy
from .cancel import Cancel
from .card import Card, card
from .pairs import device_pairs, granule_of, lanes_of, pair_major
from .pools import Pages, PinnedCancel, Pool, Progress, Slots, State

THREADS = 1_024
BLOCKS_PUSH = 4  # to host memory: enough for the bus, and the model's kernels keep the other multiprocessors
BLOCKS_FETCH = 32  # from host memory, whose latency has to be covered: 16 take 2 % longer for rows of 656 bytes
_PAIRINGS_MAX = 64  # pools do not change often: an engine has a few


class SlotsArgument(ctypes.Structure):
    """Slots of kernels/kv_copy.h."""

    _fields_ = (
        ("entries", ctypes.c_uint64), ("first", ctypes.c_int64), ("entry_limit", ctypes.c_int64),
        ("wide", ctypes.c_int32), ("granule_shift", ctypes.c_int32), ("page_shift", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )  # fmt: skip


class CopyArgument(ctypes.Structure):
    """Copy of kernels/kv_copy.h."""

    _fields_ = (
        ("pairs", ctypes.c_uint64), ("source", SlotsArgument), ("target", SlotsArgument), ("count_at", ctypes.c_uint64),
        ("cancel", ctypes.c_uint64), ("progress", ctypes.c_uint64), ("tally", ctypes.c_uint64),
        ("count", ctypes.c_int64), ("pair_count", ctypes.c_uint32), ("ticket", ctypes.c_uint32),
        ("group_shift", ctypes.c_int32), ("pair_major", ctypes.c_int32), ("by_source", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )  # fmt: skip


class Side(NamedTuple):
    """One side's slots, looked at: `listed` is what the CPU knows, `at` where the card finds what only it knows."""

    listed: np.ndarray[Any, Any] | None
    first: int
    at: int
    wide: bool
    granule: int  # slots that an entry stands for
    entries: int
    limit: int
    card: bool  # whether its pool is a card's


def kv_copy(
    target: Pool,
    source: Pool,
    target_slots: Slots,
    source_slots: Slots,
    count: Any,
    *,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    blocks: int | None = None,
    stream: int = 0,
) -> None:
    """Copies `count` rows, all planes of both layouts: row i from source_slots[i] to target_slots[i].

    Slots and Pages mix freely; `count` is an int, or an int32 (1,) in the card's memory, of which at most as many rows
    are copied as there are slots. Target slots are different from one another; other rows keep every byte. Between
    pools of a card this queues one launch on `stream` (a CUstream's address) and returns: `progress` says when it has
    ended, and `cancel`, a PinnedCancel there, ends it early; `blocks` is how many multiprocessors it may occupy.
    Between pools of this process it returns when all is done, and `blocks` and `stream` mean nothing.

    Raises LayoutMismatchError where the pools do not pair, LocalProtocolError for slots that are outside their pool,
    repeated or too few, as far as the CPU knows them; the kernel skips what lies outside and counts it in `progress`.
    Raises WorldError where the card refuses.
    """
    asked = checked(target, source, target_slots, source_slots, count)
    prepared(target, source, asked, count, progress=progress, cancel=cancel, blocks=blocks, stream=stream)()


class Lists(Protocol):
    """Where lists of slots wait for the one launch that reads them: it follows another, which brings them."""

    @property
    def address(self) -> int:
        """Of the list, once the card has it."""
        ...

    @property
    def argument(self) -> CopyArgument:
        """What brings it, by as many `blocks`."""
        ...

    @property
    def blocks(self) -> int: ...

    def put(self, card: Card, content: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Takes the place of the one before, once nobody reads that."""
        ...


def prepared(
    target: Pool,
    source: Pool,
    asked: Asked,
    count: Any,
    *,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    blocks: int | None = None,
    stream: int = 0,
    lists: Lists | None = None,
) -> Callable[[], None]:
    """kv_copy in two steps: what it returns does it, and is to be called at most once. With `lists` what the CPU has
    listed is on its way before that."""
    if target.card is None:
        return partial(_on_cpu, target, source, asked, progress, cancel or Cancel())
    return _on_card(target, source, asked, count, progress, cancel, blocks, stream, lists)


class Asked(NamedTuple):
    """What a copy was asked for, once the CPU has found no fault with it."""

    pairing: Pairing
    target: Side
    source: Side
    rows: int  # at most so many, where only the card knows the count


def checked(target: Pool, source: Pool, target_slots: Slots, source_slots: Slots, count: Any) -> Asked:
    """kv_copy's errors for its arguments, before a byte moves."""
    if target.card != source.card:
        raise LocalProtocolError(f"pools: the target is of card {target.card}, the source of card {source.card}")
    pairing = pairing_of(source.layout, target.layout)
    theirs = side_of("source_slots", source_slots, source, pairing.source_slots)
    ours = side_of("target_slots", target_slots, target, pairing.target_slots)
    rows = _rows(count, theirs, ours)
    _check(theirs, "source_slots", rows, repeated=True)
    _check(ours, "target_slots", rows, repeated=False)
    return Asked(pairing, ours, theirs, rows)


@lru_cache(_PAIRINGS_MAX)
def pairing_of(source: Layout, target: Layout) -> Pairing:
    """pairing.pair, fused; kept, since engines copy between the same two pools again and again."""
    return pair(source, target).fused()


def side_of(name: str, slots: Slots, pool: Pool, slot_limit: int) -> Side:
    """What `slots` are; LocalProtocolError for what is no integers."""
    granule = pool.layout.page_size if isinstance(slots, Pages) else 1
    entries = slots.entries if isinstance(slots, Pages) else slots
    limit, on_card = slot_limit // granule, pool.card is not None
    if isinstance(entries, range):
        if entries.step != 1:
            raise LocalProtocolError(f"{name}: {entries} is no run")
        return Side(None, entries.start, 0, False, granule, len(entries), limit, on_card)
    described: dict[str, Any] | None = getattr(entries, "__cuda_array_interface__", None)
    if described is None:
        listed = np.ascontiguousarray(entries)
        if listed.dtype.str not in ("<i4", "<i8") or listed.ndim != 1:
            raise LocalProtocolError(f"{name}: {listed.dtype} of shape {listed.shape}, not int32 or int64 (n,)")
        return Side(listed, 0, 0, listed.dtype == np.int64, granule, len(listed), limit, on_card)
    kind, shape = described["typestr"], described["shape"]
    if kind not in ("<i4", "<i8") or len(shape) != 1 or described.get("strides") is not None:
        raise LocalProtocolError(f"{name}: {kind} of shape {shape}, not contiguous int32 or int64 (n,)")
    if pool.card is None:
        raise LocalProtocolError(f"{name}: in a card's memory, where the pool is not")
    return Side(None, 0, int(described["data"][0]), kind == "<i8", granule, int(shape[0]), limit, on_card)


def _rows(count: Any, source: Side, target: Side) -> int:
    """The most rows that there may be; LocalProtocolError where slots do not suffice."""
    most = min(source.entries * source.granule, target.entries * target.granule)
    if not isinstance(count, int):
        if not (source.card and hasattr(count, "__cuda_array_interface__")):
            raise LocalProtocolError(f"count: {type(count).__name__}, not int")
        return most
    rows = count
    if not 0 <= rows <= most:
        raise LocalProtocolError(f"count: {rows} rows, and slots for {most}")
    return rows


def _check(side: Side, name: str, rows: int, *, repeated: bool) -> None:
    used = -(-rows // side.granule)
    if side.at or not used:
        return
    if side.listed is None:
        if side.first < 0 or side.first + used > side.limit:
            raise LocalProtocolError(f"{name}: {side.first}..{side.first + used - 1} leave 0..{side.limit - 1}")
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


def _on_cpu(target: Pool, source: Pool, asked: Asked, progress: Progress | None, cancel: Cancel) -> None:
    if progress is not None:
        progress.begin()
    work = plan(asked.pairing, listed(asked.source, asked.rows), listed(asked.target, asked.rows))
    complete = host_copy(work, source.address, target.address, cancel=cancel)
    if progress is not None:
        progress.end(State.COMPLETE if complete else State.CANCELLED)


def listed(side: Side, rows: int) -> Int64s:
    """The slots of so many rows, which the CPU knows."""
    count = -(-rows // side.granule)
    if side.listed is None:
        used = np.arange(side.first, side.first + count)
    else:
        used = side.listed[:count].astype(np.int64, copy=False)
    return expand_pages(used, side.granule, rows) if side.granule > 1 else used


class Launch(NamedTuple):
    """One launch, but for what only a card can say: where its pairs and its listed slots are."""

    argument: CopyArgument
    pairs: Int64s
    key: object  # of the pairs: who has them need not upload them again
    source: np.ndarray[Any, Any] | None
    target: np.ndarray[Any, Any] | None


def launch_of(target: Pool, source: Pool, ours: Side, theirs: Side, rows: int, *, known: bool = True) -> Launch:
    """What the kernel is told; `known`: there are `rows` of them, and not only at most."""
    assert rows < 1 << 31, "the kernel counts with 32 bits"
    pairing = pairing_of(source.layout, target.layout)
    granule = theirs.granule
    whole = granule == ours.granule > 1 and known and rows % granule == 0 and granule_of(pairing, granule) == granule
    step = granule if whole else 1
    pairs = _pairs(target, source, step)
    by_source = source.host and not target.host
    columns = (0, 2) if by_source else (3, 5)
    argument = CopyArgument(
        source=_argument(theirs, pairing.source_page_size, whole=whole),
        target=_argument(ours, pairing.target_page_size, whole=whole),
        count=rows // step,
        pair_count=len(pairs),
        group_shift=lanes_of(pairs).bit_length() - 1,
        pair_major=pair_major(pairs, base=columns[0], stride=columns[1]),
        by_source=by_source,
    )
    return Launch(argument, pairs, (target, source, step), _used(theirs, rows), _used(ours, rows))


@lru_cache(_PAIRINGS_MAX)
def _pairs(target: Pool, source: Pool, granule: int) -> Int64s:
    pairing = pairing_of(source.layout, target.layout)
    return device_pairs(pairing, source_address=source.address, target_address=target.address, granule=granule)


def _argument(side: Side, page_size: int, *, whole: bool) -> SlotsArgument:
    """Whole pages are entries that stand for one row each."""
    return SlotsArgument(
        entries=side.at,
        first=side.first,
        entry_limit=side.limit,
        wide=side.wide,
        granule_shift=0 if whole else side.granule.bit_length() - 1,
        page_shift=0 if whole else page_size.bit_length() - 1,
    )


def _used(side: Side, rows: int) -> np.ndarray[Any, Any] | None:
    return None if side.listed is None else side.listed[: -(-rows // side.granule)]


def _on_card(
    target: Pool, source: Pool, asked: Asked, count: Any, progress: Progress | None, cancel: Cancel | None,
    blocks: int | None, stream: int, lists: Lists | None,
) -> Callable[[], None]:  # fmt: skip
    assert target.card is not None
    here = card(target.card)
    launch = launch_of(target, source, asked.target, asked.source, asked.rows, known=isinstance(count, int))
    argument = launch.argument
    argument.count_at = 0 if isinstance(count, int) else _count_at(count)
    if cancel is not None:
        if not isinstance(cancel, PinnedCancel):
            raise LocalProtocolError("cancel: a card can't see this word: make a PinnedCancel")
        argument.cancel = cancel.device_address
    if progress is not None:
        if not progress.address:
            raise LocalProtocolError("progress: a card can't see these words: make them for that card")
        argument.progress, argument.tally, argument.ticket = progress.address, progress.tally, progress.begin()
    put = lists is not None and _put(here, launch, lists)

    def go() -> None:
        uploaded, argument.pairs = 0, here.tables.kept(launch.key, launch.pairs)
        try:
            if lists is not None and put:
                here.launch("kv_copy", lists.argument, blocks=lists.blocks, threads=THREADS, stream=stream)
            else:
                uploaded = _upload(here, launch, stream)
            here.launch(
                "kv_copy", argument, blocks=blocks or blocks_of(here, target, source), threads=THREADS, stream=stream
            )
        finally:
            here.tables.let(launch.key, stream)
            if uploaded:
                here.free(uploaded, stream)

    return go


def blocks_of(here: Card, target: Pool, source: Pool) -> int:
    """How many multiprocessors a copy between these takes, where nobody says."""
    if target.host:
        return BLOCKS_PUSH
    return BLOCKS_FETCH if source.host else here.multiprocessors


def _count_at(count: Any) -> int:
    described = count.__cuda_array_interface__
    if described["typestr"] != "<i4":
        raise LocalProtocolError(f"count: {described['typestr']}, not int32")
    return int(described["data"][0])


def _listed(launch: Launch) -> list[tuple[np.ndarray[Any, Any], SlotsArgument]]:
    """What the CPU has listed, and where a launch is told of it."""
    sides = (launch.source, launch.argument.source), (launch.target, launch.argument.target)
    return [(entries, argument) for entries, argument in sides if entries is not None and len(entries)]


def _put(here: Card, launch: Launch, lists: Lists) -> bool:
    """Whether there was anything to put there."""
    if not (listed := _listed(launch)):
        return False
    lists.put(here, np.concatenate([entries for entries, _ in listed], dtype=np.int32, casting="same_kind"))
    at = lists.address
    for entries, argument in listed:
        argument.entries, argument.wide = at, 0
        at += 4 * len(entries)
    return True


def _upload(here: Card, launch: Launch, stream: int) -> int:
    """Queues what the CPU has listed to the card; the address of it all, 0 where nothing was listed."""
    if not (listed := _listed(launch)):
        return 0
    address = at = here.allocate(sum(entries.nbytes + 16 for entries, _ in listed), stream)
    for entries, argument in listed:
        here.upload(at, entries, stream)
        argument.entries = at
        at += entries.nbytes + 15 & -16
    return address
