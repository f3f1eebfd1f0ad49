"""Copies rows between two pools with the backend that suits their size and runs: kernel, copy engine or ring."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from ..errors import LocalProtocolError
from ..layout.pairing import Pairing
from ..layout.plan import Plan, plan
from .cancel import CancelWord
from .gpu import gpu_at
from .kv_copy import CheckedCopy, by_pages, check_copy
from .kv_copy import prepare as prepare_launch
from .pools import Pool, Progress, Slots
from .ring.blocks import Through, through
from .ring.lanes import SLOT_BYTES, borrowed
from .ring.works import direct_works, listing, on_cpu, ring_works, strided_works
from .staging import Staging

Backend = Literal["auto", "spare", "kernel", "direct", "strided", "ring"]

# Measured bounds; docs/figures/kernels.md has the measurements.
PLANNED_BYTES_MIN = 8 << 20  # below this size a launch is the fastest, and nothing is planned
DIRECT_RUN_BYTES_MIN = 128 << 10  # mean run length from which the copy engine alone is faster than a launch
STRIDED_BYTES_MIN = 64 << 10  # mean bytes of a transfer that outweigh its fixed cost
RING_BYTES_MIN = 12 << 20  # size from which a ring's late start is worth the multiprocessors it frees
RING_SHARE_MIN = 0.9
_PAIRINGS_MAX = 64


def push(
    target: Pool, source: Pool, target_slots: Slots, source_slots: Slots, count: Any, *, backend: Backend = "auto",
    progress: Progress | None = None, cancel: CancelWord | None = None, stream: int = 0,
) -> None:  # fmt: skip
    """Copies `count` rows in all planes of both layouts: row i from source_slots[i] to target_slots[i].

    Arguments, errors and progress are kv_copy's. Work starts after the work queued on `stream`, and later work there
    starts after it. It returns once everything is queued, which on a GPU may be shortly before the end: call it
    outside the event loop. `cancel` stops work that has not begun; bytes in flight may land until `progress` reports
    the end.

    Backends: `kernel` is kv_copy's launch, by whole pages where a plane's rows are narrow. `direct` uses the copy
    engine, one transfer for each run that is contiguous on both sides. `strided` uses the copy engine, one transfer for
    each plane and run of slots; it is slower but needs no multiprocessor. `ring` gathers rows into a ring in the GPU's
    memory in the order of the host's side. The copy engine drains it in long runs; a fetch does the reverse. Rows
    outside long runs go by kv_copy. `auto` uses `choose`. `spare` is `strided` if its transfers are long, else `auto`.
    Raises LocalProtocolError, with the reason, if a backend cannot carry the rows.
    """
    slots = target_slots, source_slots
    prepare(target, source, *slots, count, backend=backend, progress=progress, cancel=cancel, stream=stream)()


def prepare(
    target: Pool, source: Pool, target_slots: Slots, source_slots: Slots, count: Any, *, backend: Backend = "auto",
    progress: Progress | None = None, cancel: CancelWord | None = None, stream: int = 0,
    staging: Staging | None = None,
) -> Callable[[], None]:  # fmt: skip
    """Prepares `push` and returns a function that queues it, which may be called once. `staging` as for kv_copy."""
    copy = check_copy(target, source, target_slots, source_slots, count)
    count_known = isinstance(count, int) and copy.known
    if backend == "spare" and count_known and (work := _spare(copy)) is not None:
        backend = "strided"
    elif backend in ("auto", "spare"):
        work = _choose(copy) if count_known else None
    elif backend != "kernel":
        if not count_known:
            raise LocalProtocolError(
                f"backend: {backend}: the slots are in GPU memory, which only the backend kernel can read"
            )
        work = _through(copy) if backend == "ring" else _plan(copy)
    else:
        work = None
    if work is not None:
        return partial(_carry, copy, work, progress, cancel, stream, strided=backend == "strided")
    pages = by_pages(copy) if count_known and target.device is not None else None
    if pages is None:
        return prepare_launch(copy, count, progress=progress, cancel=cancel, stream=stream, staging=staging)
    # Rows outside whole pages go first, in a small launch that reports nothing: the second waits for its end.
    whole, rest = pages
    queues = [] if rest is None else [prepare_launch(rest, rest.rows, stream=stream)]
    queues.append(prepare_launch(whole, whole.rows, progress=progress, cancel=cancel, stream=stream, staging=staging))
    return partial(_in_order, queues)


def _in_order(queues: list[Callable[[], None]]) -> None:
    for queue in queues:
        queue()


class PushLoad(NamedTuple):
    """The input of `choose`."""

    bytes: int
    direct_run_bytes: float  # mean length of a run that is contiguous on both sides
    ring_bytes: int  # bytes in long runs on the host's side


def choose(load: PushLoad) -> Backend:
    """The fastest backend between a GPU and its host, by the bounds above.

    Each transfer of the copy engine has a fixed cost, so it takes long runs. A ring makes long runs of short ones, but
    must gather the first of them before the copy engine starts.
    """
    if load.bytes < PLANNED_BYTES_MIN:
        return "kernel"
    if load.direct_run_bytes >= DIRECT_RUN_BYTES_MIN:
        return "direct"
    if load.bytes >= RING_BYTES_MIN and load.ring_bytes >= RING_SHARE_MIN * load.bytes:
        return "ring"
    return "kernel"


def _choose(copy: CheckedCopy) -> Plan | Through | None:
    """The chosen backend's work: a Plan for direct, a Through for ring, None for the kernel."""
    byte_count = copy.rows * copy.pairing.row_bytes
    if copy.target.device is None or copy.target.host == copy.source.host or byte_count < PLANNED_BYTES_MIN:
        return None  # the copy stays on one side of the bus, or is small
    direct = _plan(copy) if contiguous_planes(copy.pairing) else None
    runs = runs_of(direct) if direct is not None else copy.rows * len(copy.pairing.table)
    mean = byte_count / max(1, runs)
    ring = _rows_through(copy) if mean < DIRECT_RUN_BYTES_MIN else None
    match choose(PushLoad(byte_count, mean, ring.bytes if ring is not None else 0)):
        case "direct":
            return direct or _plan(copy)
        case "ring":
            return ring
        case _:
            return None


def _spare(copy: CheckedCopy) -> Plan | None:
    """The plan for `strided`, if its transfers are long enough."""
    if copy.target.device is None or copy.target.host == copy.source.host:
        return None
    work = _plan(copy)
    transfers = len(work.runs) * len(work.pairing.table)
    return work if work.bytes >= STRIDED_BYTES_MIN * transfers else None


def runs_of(work: Plan) -> int:
    """An upper bound of the plan's contiguous runs: adjacent planes count separately."""
    contiguous = contiguous_planes(work.pairing)
    return len(work.runs) * contiguous + work.rows * (len(work.pairing.table) - contiguous)


@lru_cache(_PAIRINGS_MAX)
def contiguous_planes(pairing: Pairing) -> int:
    """The number of planes whose rows are contiguous on both sides. In other planes every row is a run."""
    table = pairing.table
    return int(((table[:, 2] == table[:, 6]) & (table[:, 5] == table[:, 6])).sum())


def _plan(copy: CheckedCopy) -> Plan:
    return plan(copy.pairing, copy.source_slots, copy.target_slots)


def _through(copy: CheckedCopy) -> Through | None:
    if copy.target.device is not None and copy.target.host == copy.source.host:
        raise LocalProtocolError("backend: ring: both pools are in the same memory")
    work = _rows_through(copy)
    if work is None and copy.rows:
        side = "source" if copy.fetches else "target"
        raise LocalProtocolError(
            f"backend: ring: no rows of the {side} lie in runs that are long enough and without gaps"
        )
    return work


def _rows_through(copy: CheckedCopy) -> Through | None:
    return through(copy.pairing, copy.source_slots, copy.target_slots, fetch=copy.fetches, slot_bytes=SLOT_BYTES)


def _carry(
    copy: CheckedCopy, work: Plan | Through, progress: Progress | None, cancel: CancelWord | None, stream: int, *,
    strided: bool,
) -> None:  # fmt: skip
    """Copies with the copy engine, directly or through a ring."""
    target, source = copy.target, copy.source
    if target.device is None:
        on_cpu(copy, work, SLOT_BYTES, progress=progress, cancel=cancel or CancelWord())
        return
    if progress is not None and not progress.address:
        raise LocalProtocolError("progress: a GPU can't see these words: make them for that GPU")
    with borrowed(gpu_at(target.device)) as ring, ExitStack() as tables:
        if not isinstance(work, Plan):
            works = ring_works(ring, copy, work, ring.stage(listing(work, copy)), tables, stream)
        elif strided:
            works = strided_works(target, source, work)
        else:
            works = direct_works(target, source, work, bytes_max=SLOT_BYTES)
        ring.run(works, stream=stream, cancel=cancel, progress=progress)
