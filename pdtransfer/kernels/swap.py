"""Which of a step's top-k tokens a request's hot buffer lacks, and whom they replace: on a card, or on the CPU.

The plan says slots and a list of copies; `kv_copy` carries the list out with the counts still on the card, once for
each layer that shares the plan. Exact LRU; kernels/swap_plan.h states the order and why victims suffice.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import LocalProtocolError
from ..layout.geometry import Int64s
from .card import Card, card
from .kv_copy import CopyArgument
from .standing import StandingCopy

_THREADS_MAX = 1_024
_SHARES = (2, 4), (4, 16)  # positions and places of a thread, as kernels/swap_plan.cu has them
_SHARED_BYTES_MAX = 227 << 10
_TOP_MAX, _HOT_MAX = 4 * _THREADS_MAX, 16 * _THREADS_MAX
_WORDS = 36
_BUCKETS = 8  # for each position: with two, some thread of each warp has to look into many


class SwapArgument(ctypes.Structure):
    """Swap of kernels/swap_plan.h."""

    _fields_ = (
        ("positions", ctypes.c_uint64), ("lengths", ctypes.c_uint64), ("rows", ctypes.c_uint64),
        ("real", ctypes.c_uint64), ("host_slots", ctypes.c_uint64), ("hot_slots", ctypes.c_uint64),
        ("held", ctypes.c_uint64), ("order", ctypes.c_uint64), ("slots", ctypes.c_uint64),
        ("sources", ctypes.c_uint64), ("targets", ctypes.c_uint64), ("counts", ctypes.c_uint64),
        ("refused", ctypes.c_uint64), ("tally", ctypes.c_uint64),
        ("host_stride", ctypes.c_int64), ("requests", ctypes.c_int32), ("top", ctypes.c_int32),
        ("hot", ctypes.c_int32), ("buckets", ctypes.c_int32), ("row_count", ctypes.c_int32), ("unused", ctypes.c_int32),
        ("bring", CopyArgument),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HotBuffers:
    """What is in each row's hot buffer, int32, all of numpy or all in a card's memory, contiguous.

    `held` (rows, hot): the position in each place, -1 where there is none. `order` (rows, hot): the places, the one
    used longest ago first; at first 0, 1, ... `hot_slots` (rows, hot): each place's slot in the device pool.
    `host_slots` (rows, length): each position's slot in the arena. Either slot is -1 where there is none. While a
    request has at most `hot` tokens, position p is in place p: whoever brings it there says so in `held`.
    """

    held: Any
    order: Any
    hot_slots: Any
    host_slots: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwapPlan:
    """Where a plan is written, int32, where the tables are; it may be carried out for any number of layers.

    `slots` (requests, top): the device slot of each position, -1 for none. The first counts[0] of `sources` and
    `targets` (requests * top,) are arena slots and device slots to copy; counts[1] is how many positions were refused:
    they were outside their request, or more than the hot buffer holds. `counts` (5,) is zero before the first plan.
    """

    slots: Any
    sources: Any
    targets: Any
    counts: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Told:
    """What plans add to, where the tables are, and nobody but their owner ever takes from.

    `refused` int32 (rows,): each row's positions that got no slot, or have none in the arena to be brought from: its
    request has to fail. `tally` int64 (2,): positions that were held, and that were not, of requests above `hot`.
    """

    refused: Any
    tally: Any


def check_sizes(*, top: int, hot: int) -> None:
    """Raises LocalProtocolError for more positions and places than a block of threads can plan for."""
    if not (0 < hot <= _HOT_MAX and 0 < top <= _TOP_MAX):
        raise LocalProtocolError(f"hot: {hot} is not in 1..{_HOT_MAX}, or top {top} not in 1..{_TOP_MAX}")
    if (shared := _shared_bytes(top, hot, 2 * _power(top))) > _SHARED_BYTES_MAX:
        raise LocalProtocolError(f"hot: {hot} and top {top} take {shared} bytes of shared memory")


def swap_plan(
    hot: HotBuffers,
    positions: Any,
    lengths: Any,
    rows: Any,
    plan: SwapPlan,
    *,
    real: Any = None,
    told: Told | None = None,
    bring: StandingCopy | None = None,
    stream: int = 0,
) -> None:
    """Plans one step: positions int32 (requests, top), of which -1 is none and any may be there twice.

    `lengths` (requests,) is tokens of each, `rows` (requests,) its row of the tables, no row twice; `real` (1,) how
    many requests are no padding, where fewer than all, and what has no row of the tables is padding, too. What has no
    slot in the arena is listed with -1, which a card's kv_copy skips. With `bring`, which is to carry out the list,
    rows of requests that lack few may be copied by the plan itself: the list is then what is left. On a card this
    queues one launch, a block for each request. Raises LocalProtocolError for shapes that do not fit together.
    """
    requests, top = int(positions.shape[0]), int(positions.shape[1])
    check_sizes(top=top, hot=hot.held.shape[1])
    if tuple(plan.slots.shape) != (requests, top) or plan.sources.shape[0] < requests * top:
        raise LocalProtocolError(f"plan: for {tuple(plan.slots.shape)}, not for {requests} requests of {top}")
    if not getattr(positions, "is_cuda", False):
        _on_cpu(hot, positions, lengths, rows, plan, requests if real is None else int(real[0]), told)
    elif requests:
        argument = argument_of(hot, positions, lengths, rows, plan, real, told)
        if bring is not None:
            argument.bring = bring.argument
        launch(card(positions.device.index), argument, stream)


def argument_of(
    hot: HotBuffers, positions: Any, lengths: Any, rows: Any, plan: SwapPlan, real: Any, told: Told | None = None
) -> SwapArgument:
    """What the kernel is told."""
    requests, top = positions.shape
    return SwapArgument(
        positions=address_of("positions", positions), lengths=address_of("lengths", lengths),
        rows=address_of("rows", rows), real=0 if real is None else address_of("real", real),
        host_slots=address_of("host_slots", hot.host_slots),
        hot_slots=address_of("hot_slots", hot.hot_slots), held=address_of("held", hot.held),
        order=address_of("order", hot.order), slots=address_of("slots", plan.slots),
        sources=address_of("sources", plan.sources), targets=address_of("targets", plan.targets),
        counts=address_of("counts", plan.counts), refused=0 if told is None else address_of("refused", told.refused),
        tally=0 if told is None else address_of("tally", told.tally, "<i8"), host_stride=hot.host_slots.shape[1],
        requests=requests, top=top, hot=hot.held.shape[1], buckets=_buckets(top, hot.held.shape[1]),
        row_count=hot.held.shape[0],
    )  # fmt: skip


def _buckets(top: int, hot: int) -> int:
    """A power of two: as many as fit."""
    buckets = _BUCKETS * _power(top)
    while buckets > 2 * _power(top) and _shared_bytes(top, hot, buckets) > _SHARED_BYTES_MAX:
        buckets >>= 1
    return buckets


def _power(top: int) -> int:
    return 1 << (top - 1).bit_length()


def _shared_bytes(top: int, hot: int, buckets: int) -> int:
    """Words, keys, marks, two tables of the hot buffer, victims, and places of two bytes."""
    hot = hot + 3 & ~3
    return 4 * (_WORDS + max(buckets, hot) + buckets + 2 * hot + top) + 2 * buckets


class Shape(NamedTuple):
    """How a launch is laid out: the function, threads of a block, and dynamic shared memory."""

    function: str
    threads: int
    shared_bytes: int


def shape_of(argument: SwapArgument) -> Shape:
    """The fewest threads that have a share each."""
    shared_bytes = _shared_bytes(argument.top, argument.hot, argument.buckets)
    for top, hot in _SHARES:
        threads = -(-max(-(-argument.top // top), -(-argument.hot // hot)) // 32) * 32
        if threads <= _THREADS_MAX:
            return Shape(f"swap_plan_{top}x{hot}", threads, shared_bytes)
    raise AssertionError(f"hot: {argument.hot}, top: {argument.top}")


def launch(here: Card, argument: SwapArgument, stream: int) -> None:
    """Queues it."""
    function, threads, shared_bytes = shape_of(argument)
    here.launch(
        "swap_plan",
        argument,
        blocks=argument.requests,
        threads=threads,
        stream=stream,
        shared_bytes=shared_bytes,
        function=function,
    )


def address_of(name: str, array: Any, kind: str = "<i4") -> int:
    """Where it lies; LocalProtocolError for what is not of `kind`, or has gaps."""
    described = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    if described["typestr"] != kind or described.get("strides") is not None:
        raise LocalProtocolError(f"{name}: {described['typestr']}, not contiguous int{8 * int(kind[2])}")
    return int(described["data"][0])


def _on_cpu(
    hot: HotBuffers, positions: Any, lengths: Any, rows: Any, plan: SwapPlan, real: int, told: Told | None
) -> None:
    plan.slots[:] = -1
    copies: list[Int64s] = []
    refused = 0
    for request in range(min(real, len(positions))):
        row, length, top = int(rows[request]), min(int(lengths[request]), hot.host_slots.shape[1]), positions[request]
        if not 0 <= row < len(hot.held):
            continue
        inside = (top >= 0) & (top < length)
        lost = 0
        if length <= hot.held.shape[1]:
            plan.slots[request, inside] = hot.hot_slots[row][top[inside]]
            lacking = int(((plan.slots[request] < 0) & (top != -1)).sum())
        else:
            step = _swapped(hot, row, top, inside, plan.slots[request])
            lacking, lost = int((~inside & (top != -1)).sum()) + step.lacking, int((step.copies[0] < 0).sum())
            copies.append(step.copies)
            if told is not None:
                told.tally[:] += np.array((step.hits, step.copies.shape[1]))
        refused += lacking
        if told is not None:
            told.refused[row] += lacking + lost
    listed = np.concatenate(copies, axis=1) if copies else np.empty((2, 0), np.int64)
    count = listed.shape[1]
    plan.sources[:count], plan.targets[:count] = listed
    plan.counts[:2] = count, refused


class _Swapped(NamedTuple):
    """One request's step: arena slots and device slots to copy, int64 (2, n); positions that no place was left for."""

    copies: Int64s
    hits: int
    lacking: int


def _swapped(hot: HotBuffers, row: int, top: Any, inside: Any, slots: Any) -> _Swapped:
    """Of a request above the buffer; answers in `slots`."""
    places, held, order = hot.hot_slots[row], hot.held[row], hot.order[row].copy()
    asked, first = np.unique(top[inside], return_index=True)
    asked = asked[np.argsort(first)]
    hit = np.isin(held[order], asked) & (held[order] >= 0)
    unused, missing = order[~hit], asked[~np.isin(asked, held)]
    brought = missing[: len(unused)]
    victims = unused[: len(brought)]
    held[victims] = brought
    hot.order[row] = np.concatenate((unused[len(brought) :], order[hit], victims))
    place_of = np.full(hot.host_slots.shape[1] + 1, -1, np.int64)  # the last is for what is outside
    filled = held >= 0
    place_of[held[filled]] = np.flatnonzero(filled)
    found = place_of[np.where(inside, top, -1)]
    slots[:] = np.where(found >= 0, places[found], -1)
    copies = np.stack((hot.host_slots[row, brought], places[victims])).astype(np.int64)
    return _Swapped(copies, int(hit.sum()), len(missing) - len(brought))
