"""Plans swaps: finds the top-k tokens that a request's hot buffer lacks and chooses victims, on a GPU or on the CPU.

A plan holds slots and a list of copies. kv_copy executes the list once for each layer that shares the plan; the counts
stay on the GPU. Replacement is exact LRU; kernels/swap_plan.h gives the order and proves that victims suffice.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import LocalProtocolError
from ..kernels.arguments import CopyArgument
from ..kernels.gpu import Gpu, gpu_at
from ..kernels.kv_copy import PlannedCopy
from ..layout.geometry import Int64s

_THREADS_MAX = 1_024
_SHARES = (2, 4), (4, 16)  # positions and places of one thread, as in kernels/swap_plan.cu
_SHARED_BYTES_MAX = 227 << 10
_TOP_MAX, _HOT_MAX = 4 * _THREADS_MAX, 16 * _THREADS_MAX
_WORDS = 36
_BUCKETS = 8  # for each position: with fewer, some thread of each warp probes many buckets


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
    """The hot buffer of each row: contiguous int32 arrays, all numpy or all in a GPU's memory.

    `held` (rows, hot): the position in each place, or -1. `order` (rows, hot): the places from least to most recently
    used, initially 0, 1, ... `hot_slots` (rows, hot): each place's slot in the device pool, or -1. `host_slots`
    (rows, length): each position's slot in the arena, or -1. While a request has at most `hot` tokens, position p is in
    place p; the code that copies it there sets `held`.
    """

    held: Any
    order: Any
    hot_slots: Any
    host_slots: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwapPlan:
    """The output of a plan: int32 arrays in the tables' memory, valid for any number of layers.

    `slots` (requests, top): each position's device slot, or -1. The first counts[0] elements of `sources` and `targets`
    (requests * top,) are the arena slots and device slots to copy. counts[1] is the number of refused positions, which
    are outside their request or exceed the hot buffer. `counts` (5,) must be zero before the first plan.
    """

    slots: Any
    sources: Any
    targets: Any
    counts: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwapCounts:
    """Totals in the tables' memory that plans only increase.

    `refused` int32 (rows,): each row's positions without a device slot or an arena slot; the request must fail.
    `tally` int64 (2,): hits and misses of requests longer than `hot`.
    """

    refused: Any
    tally: Any


def check_sizes(*, top: int, hot: int) -> None:
    """Raises LocalProtocolError for more positions or places than one block of threads can plan."""
    if not (0 < hot <= _HOT_MAX and 0 < top <= _TOP_MAX):
        raise LocalProtocolError(f"hot: {hot} is not in 1..{_HOT_MAX}, or top {top} not in 1..{_TOP_MAX}")
    if (shared := _shared_bytes(top, hot, 2 * _power(top))) > _SHARED_BYTES_MAX:
        raise LocalProtocolError(f"hot: {hot} and top {top} take {shared} bytes of shared memory")


def swap_plan(
    hot: HotBuffers, positions: Any, lengths: Any, rows: Any, plan: SwapPlan, *, real: Any = None,
    totals: SwapCounts | None = None, bring: PlannedCopy | None = None, stream: int = 0,
) -> None:  # fmt: skip
    """Plans one step for positions int32 (requests, top); -1 is not a position, and positions may repeat.

    `lengths` (requests,) is each request's tokens, `rows` (requests,) its distinct row of the tables. `real` (1,) is
    the number of requests without padding; a request without a row is padding, too. A position without an arena slot is
    listed with -1, which a GPU's kv_copy skips. `bring` executes the list: with it, the plan itself may copy the rows
    of a request with few misses and not list them. On a GPU this queues one launch with a block for each request.
    Raises LocalProtocolError for shapes that do not match.
    """
    requests, top = int(positions.shape[0]), int(positions.shape[1])
    check_sizes(top=top, hot=hot.held.shape[1])
    if tuple(plan.slots.shape) != (requests, top) or plan.sources.shape[0] < requests * top:
        raise LocalProtocolError(f"plan: for {tuple(plan.slots.shape)}, not for {requests} requests of {top}")
    if not getattr(positions, "is_cuda", False):
        _plan_on_cpu(hot, positions, lengths, rows, plan, requests if real is None else int(real[0]), totals)
    elif requests:
        argument = argument_of(hot, positions, lengths, rows, plan, real, totals)
        if bring is not None:
            argument.bring = bring.argument
        launch(gpu_at(positions.device.index), argument, stream)


def argument_of(
    hot: HotBuffers, positions: Any, lengths: Any, rows: Any, plan: SwapPlan, real: Any,
    totals: SwapCounts | None = None,
) -> SwapArgument:  # fmt: skip
    """The kernel's argument."""
    requests, top = positions.shape
    return SwapArgument(
        positions=address_of("positions", positions), lengths=address_of("lengths", lengths),
        rows=address_of("rows", rows), real=0 if real is None else address_of("real", real),
        host_slots=address_of("host_slots", hot.host_slots),
        hot_slots=address_of("hot_slots", hot.hot_slots), held=address_of("held", hot.held),
        order=address_of("order", hot.order), slots=address_of("slots", plan.slots),
        sources=address_of("sources", plan.sources), targets=address_of("targets", plan.targets),
        counts=address_of("counts", plan.counts),
        refused=0 if totals is None else address_of("refused", totals.refused),
        tally=0 if totals is None else address_of("tally", totals.tally, "<i8"), host_stride=hot.host_slots.shape[1],
        requests=requests, top=top, hot=hot.held.shape[1], buckets=_buckets(top, hot.held.shape[1]),
        row_count=hot.held.shape[0],
    )  # fmt: skip


def _buckets(top: int, hot: int) -> int:
    """The number of hash buckets: a power of two, as many as fit in shared memory."""
    buckets = _BUCKETS * _power(top)
    while buckets > 2 * _power(top) and _shared_bytes(top, hot, buckets) > _SHARED_BYTES_MAX:
        buckets >>= 1
    return buckets


def _power(top: int) -> int:
    return 1 << (top - 1).bit_length()


def _shared_bytes(top: int, hot: int, buckets: int) -> int:
    """The size of: words, keys, marks, two tables of the hot buffer, victims, and places of two bytes."""
    hot = hot + 3 & ~3
    return 4 * (_WORDS + max(buckets, hot) + buckets + 2 * hot + top) + 2 * buckets


class SwapLaunch(NamedTuple):
    """The shape of a launch: function, threads of a block, dynamic shared memory."""

    function: str
    threads: int
    shared_bytes: int


def shape_of(argument: SwapArgument) -> SwapLaunch:
    """The fewest threads that cover all positions and places."""
    shared_bytes = _shared_bytes(argument.top, argument.hot, argument.buckets)
    for top, hot in _SHARES:
        threads = -(-max(-(-argument.top // top), -(-argument.hot // hot)) // 32) * 32
        if threads <= _THREADS_MAX:
            return SwapLaunch(f"swap_plan_{top}x{hot}", threads, shared_bytes)
    raise AssertionError(f"hot: {argument.hot}, top: {argument.top}")


def launch(gpu: Gpu, argument: SwapArgument, stream: int) -> None:
    """Queues the launch."""
    function, threads, shared_bytes = shape_of(argument)
    gpu.launch(
        "swap_plan", argument, blocks=argument.requests, threads=threads, stream=stream,
        shared_bytes=shared_bytes, function=function,
    )  # fmt: skip


def address_of(name: str, array: Any, kind: str = "<i4") -> int:
    """The array's address. Raises LocalProtocolError unless it is contiguous and of type `kind`."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    if interface["typestr"] != kind or interface.get("strides") is not None:
        raise LocalProtocolError(f"{name}: {interface['typestr']}, not contiguous int{8 * int(kind[2])}")
    return int(interface["data"][0])


def _plan_on_cpu(
    hot: HotBuffers, positions: Any, lengths: Any, rows: Any, plan: SwapPlan, real: int, totals: SwapCounts | None
) -> None:
    plan.slots[:] = -1
    copies: list[Int64s] = []
    refused = 0
    for request in range(min(real, len(positions))):
        row, length, top = int(rows[request]), min(int(lengths[request]), hot.host_slots.shape[1]), positions[request]
        if not 0 <= row < len(hot.held):
            continue
        inside = (top >= 0) & (top < length)
        no_source = 0
        if length <= hot.held.shape[1]:
            plan.slots[request, inside] = hot.hot_slots[row][top[inside]]
            no_slot = int(((plan.slots[request] < 0) & (top != -1)).sum())
        else:
            swap = _swap(hot, row, top, inside, plan.slots[request])
            no_slot, no_source = int((~inside & (top != -1)).sum()) + swap.refused, int((swap.copies[0] < 0).sum())
            copies.append(swap.copies)
            if totals is not None:
                totals.tally[:] += np.array((swap.hits, swap.copies.shape[1]))
        refused += no_slot
        if totals is not None:
            totals.refused[row] += no_slot + no_source
    listed = np.concatenate(copies, axis=1) if copies else np.empty((2, 0), np.int64)
    count = listed.shape[1]
    plan.sources[:count], plan.targets[:count] = listed
    plan.counts[:2] = count, refused


class _Swap(NamedTuple):
    """One request's step: arena slots and device slots to copy, int64 (2, n), hits, and positions without a place."""

    copies: Int64s
    hits: int
    refused: int


def _swap(hot: HotBuffers, row: int, top: Any, inside: Any, slots: Any) -> _Swap:
    """Swaps for a request longer than the buffer, and writes its device slots to `slots`."""
    places, positions, order = hot.hot_slots[row], hot.held[row], hot.order[row].copy()
    distinct, first = np.unique(top[inside], return_index=True)
    distinct = distinct[np.argsort(first)]
    hit = np.isin(positions[order], distinct) & (positions[order] >= 0)
    unused, missing = order[~hit], distinct[~np.isin(distinct, positions)]
    swapped_in = missing[: len(unused)]
    victims = unused[: len(swapped_in)]
    positions[victims] = swapped_in
    hot.order[row] = np.concatenate((unused[len(swapped_in) :], order[hit], victims))
    place_of = np.full(hot.host_slots.shape[1] + 1, -1, np.int64)  # the last element is for positions outside
    filled = positions >= 0
    place_of[positions[filled]] = np.flatnonzero(filled)
    place = place_of[np.where(inside, top, -1)]
    slots[:] = np.where(place >= 0, places[place], -1)
    copies = np.stack((hot.host_slots[row, swapped_in], places[victims])).astype(np.int64)
    return _Swap(copies, int(hit.sum()), len(missing) - len(swapped_in))
