"""One call that carries rows between two pools, by whichever of its backends suits their bytes and their runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from ..errors import LocalProtocolError
from ..layout.pairing import Pairing
from ..layout.plan import Plan, plan
from .cancel import Cancel
from .card import card
from .kv_copy import Asked, Lists, checked, listed
from .kv_copy import prepared as launched
from .lanes import SLOT_BYTES, borrowed
from .pools import Pool, Progress, Slots
from .ring import Sides, direct_works, listing, on_cpu, ring_works, strided_works
from .ring_blocks import Through, through

Backend = Literal["auto", "spare", "kernel", "direct", "strided", "ring"]

PLANNED_BYTES_MIN = 8 << 20  # below, the launch is as fast as anything, and nothing is planned
DIRECT_RUN_BYTES_MIN = 128 << 10  # on average: from there on the engine alone is faster than the launch
STRIDED_BYTES_MIN = 64 << 10  # a transfer, on average: each takes the engine 4 us and more, and a CPU 3
RING_BYTES_MIN = 12 << 20  # one alone takes 0.1 ms longer than a launch, and spares the model more than that
RING_SHARE_MIN = 0.9
_PAIRINGS_MAX = 64


def push(
    target: Pool,
    source: Pool,
    target_slots: Slots,
    source_slots: Slots,
    count: Any,
    *,
    backend: Backend = "auto",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    stream: int = 0,
) -> None:
    """Copies `count` rows, all planes of both layouts: row i from source_slots[i] to target_slots[i].

    Arguments, errors and progress are kv_copy's. Work starts after what is queued on `stream`, and later work there
    starts after it. Returns once all of it is queued: on a card that may be shortly before it has ended, so call it off
    the loop. What `cancel` stops is not begun; bytes that were being copied when it was set may still land, until
    `progress` says that nothing is pending.

    `kernel` is kv_copy's launch. `direct` leaves all to the copy engine, a transfer for each run that lies together on
    both sides; so does `strided`, with one for each plane and run of slots, whose rows may lie apart: a third to two
    thirds of the bus, but no multiprocessor. `ring` gathers rows into a small ring in the card's memory in the order in
    which they lie on the host's side, long runs of which the copy engine then drains, and the reverse from the host;
    rows outside such runs go by launches of kv_copy. `auto` chooses by `choose`; `spare` is `strided` where its
    transfers are long, else `auto`. Raises LocalProtocolError, saying why, where a backend cannot.
    """
    slots = target_slots, source_slots
    prepared(target, source, *slots, count, backend=backend, progress=progress, cancel=cancel, stream=stream)()


def prepared(
    target: Pool,
    source: Pool,
    target_slots: Slots,
    source_slots: Slots,
    count: Any,
    *,
    backend: Backend = "auto",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    stream: int = 0,
    lists: Lists | None = None,
) -> Callable[[], None]:
    """`push` in two steps: nothing is queued before what it returns is called, at most once. `lists` as kv_copy's."""
    asked = checked(target, source, target_slots, source_slots, count)
    known = isinstance(count, int) and not asked.target.at and not asked.source.at
    if backend == "spare" and known and (made := _spare(target, source, asked)) is not None:
        backend = "strided"
    elif backend in ("auto", "spare"):
        made = _chosen(target, source, asked) if known else None
    elif backend != "kernel":
        if not known:
            raise LocalProtocolError(f"backend: {backend}: nobody but the card knows these rows: only kernel can")
        made = _through(target, source, asked) if backend == "ring" else _plan(asked)
    else:
        made = None
    if made is not None:
        return partial(_carry, target, source, asked, made, progress, cancel, stream, strided=backend == "strided")
    return launched(target, source, asked, count, progress=progress, cancel=cancel, stream=stream, lists=lists)


class Load(NamedTuple):
    """What `choose` goes by."""

    bytes: int
    direct_run_bytes: float  # of a run that lies together on both sides, on average
    ring_bytes: int  # of those that lie in long runs on the host's side


def choose(load: Load) -> Backend:
    """The fastest backend for a push or fetch between a card and its host; kernels/README.md has the figures.

    One run of the copy engine costs 0.3 us beside its bytes, so long runs are its own; a ring makes long runs of short
    ones, but the first of them has to be gathered before anything moves.
    """
    if load.bytes < PLANNED_BYTES_MIN:
        return "kernel"
    if load.direct_run_bytes >= DIRECT_RUN_BYTES_MIN:
        return "direct"
    if load.bytes >= RING_BYTES_MIN and load.ring_bytes >= RING_SHARE_MIN * load.bytes:
        return "ring"
    return "kernel"


def _chosen(target: Pool, source: Pool, asked: Asked) -> Plan | Through | None:
    """What the chosen backend goes by: direct by a Plan, ring by a Through, the kernel by neither."""
    byte_count = asked.rows * asked.pairing.row_bytes
    if target.card is None or target.host == source.host or byte_count < PLANNED_BYTES_MIN:
        return None  # nothing but the CPU, or the card's own memory, is used, or it is little
    made = _plan(asked) if touching(asked.pairing) else None
    mean = byte_count / max(1, runs_of(made) if made is not None else asked.rows * len(asked.pairing.table))
    rows = _lies_through(target, source, asked) if mean < DIRECT_RUN_BYTES_MIN else None
    match choose(Load(byte_count, mean, rows.bytes if rows is not None else 0)):
        case "direct":
            return made or _plan(asked)
        case "ring":
            return rows
        case _:
            return None


def _spare(target: Pool, source: Pool, asked: Asked) -> Plan | None:
    """What `strided` goes by, where a transfer is not much dearer than its bytes."""
    if target.card is None or target.host == source.host:
        return None
    made = _plan(asked)
    transfers = len(made.runs) * len(made.pairing.table)
    return made if made.bytes >= STRIDED_BYTES_MIN * transfers else None


def runs_of(made: Plan) -> int:
    """At most so many runs of bytes are in the plan: pages whose planes follow one another are still counted apart."""
    together = touching(made.pairing)
    return len(made.runs) * together + made.rows * (len(made.pairing.table) - together)


@lru_cache(_PAIRINGS_MAX)
def touching(pairing: Pairing) -> int:
    """Planes whose rows touch on both sides; of the others every row is a run."""
    table = pairing.table
    return int(((table[:, 2] == table[:, 6]) & (table[:, 5] == table[:, 6])).sum())


def _plan(asked: Asked) -> Plan:
    return plan(asked.pairing, listed(asked.source, asked.rows), listed(asked.target, asked.rows))


def _through(target: Pool, source: Pool, asked: Asked) -> Through | None:
    if target.card is not None and target.host == source.host:
        raise LocalProtocolError("backend: ring: both pools are in the same memory")
    made = _lies_through(target, source, asked)
    if made is None and asked.rows:
        side = "source" if _fetches(target, source) else "target"
        raise LocalProtocolError(f"backend: ring: no rows of the {side} lie in runs that are long enough, or they gape")
    return made


def _fetches(target: Pool, source: Pool) -> bool:
    return source.host and not target.host


def _lies_through(target: Pool, source: Pool, asked: Asked) -> Through | None:
    sides = listed(asked.source, asked.rows), listed(asked.target, asked.rows)
    return through(asked.pairing, *sides, fetch=_fetches(target, source), slot_bytes=SLOT_BYTES)


def _carry(
    target: Pool, source: Pool, asked: Asked, made: Plan | Through, progress: Progress | None, cancel: Cancel | None,
    stream: int, *, strided: bool,
) -> None:  # fmt: skip
    """By the copy engine, straight or through a ring."""
    sides = Sides(target, source, listed(asked.target, asked.rows), listed(asked.source, asked.rows))
    if target.card is None:
        on_cpu(sides, made, SLOT_BYTES, progress=progress, cancel=cancel or Cancel())
        return
    here = card(target.card)
    if progress is not None and not progress.address:
        raise LocalProtocolError("progress: a card can't see these words: make them for that card")
    with borrowed(here) as ring:
        if isinstance(made, Plan):
            if strided:
                works = strided_works(target, source, made)
            else:
                works = direct_works(target, source, made, bytes_max=SLOT_BYTES)
            ring.run(works, stream=stream, cancel=cancel, progress=progress)
            return
        with ExitStack() as held:
            works = ring_works(ring, sides, made, ring.stage(listing(made, sides)), held, stream)
            ring.run(works, stream=stream, cancel=cancel, progress=progress)
