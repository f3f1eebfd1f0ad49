"""What the status document has about a daemon, and about the router's rooms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .....wire import Load, Tally, split_key
from ...fleet.roles import Departure
from ...fleet.status import SlotsStatus, WorkerState, WorkerStatus
from ...fleet.worker import Worker, model_text
from .router_rooms import Leg, RoutedRoom, RouterRoom


def worker_status(worker: Worker, why: str = "") -> WorkerStatus:
    """Returns what is known of a daemon. Of one that is not connected, only its name and the reason. `why` is a better
    one than its own."""
    load, figures, window = worker.load, worker.figures.latest, worker.figures
    kv_bytes_s = window.rate("kv_bytes")
    is_decode = worker.role == "decode"
    sparse = load if load is not None and load.sparse_slots_total else None
    hisparse = figures if is_decode and load is not None and load.enable_hisparse else None
    return WorkerStatus(
        role=worker.role,
        address=split_key(worker.peer)[1],
        node=None if worker.identity is None else worker.identity.node,
        model=None if worker.identity is None else model_text(worker.model),
        state=_state(worker, load),
        why=why or worker.why or worker.departure.value or None,
        leaves=worker.departure is Departure.LEAVES,
        uptime_s=None if figures is None else figures.uptime_ms / 1e3,
        rooms_here=len(worker.rooms),
        rooms_running=None if load is None else load.rooms_running,
        rooms_queued=None if load is None else load.rooms_queued,
        rooms=None if figures is None else _counts(figures.rooms),
        rooms_done=None if figures is None else figures.rooms_done,
        rooms_failed=None if figures is None else figures.rooms_failed,
        rooms_cancelled=None if figures is None else figures.rooms_cancelled,
        sessions=None if figures is None else _counts(figures.sessions),
        slots=None
        if load is None
        else SlotsStatus(free=load.slots_free, total=load.slots_total, quarantined=load.slots_quarantined),
        sparse_slots=None
        if sparse is None
        else SlotsStatus(free=sparse.sparse_slots_free, total=sparse.sparse_slots_total),
        quarantined_bytes=None if figures is None or not is_decode else figures.quarantined_bytes,
        kv_bytes=None if figures is None else figures.kv_bytes,
        kv_gb_s=None if kv_bytes_s is None else kv_bytes_s / 1e9,
        tokens_s=window.rate("tokens"),
        prefix_hit_ratio=window.share("prefix_hit_tokens", "prefix_queried_tokens") if is_decode else None,
        hot_hit_ratio=None if hisparse is None else window.share("hot_hits", "hot_hits", "hot_misses"),
        hisparse_running=None if hisparse is None else hisparse.hisparse_running,
        hisparse_waiting=None if hisparse is None else hisparse.hisparse_waiting,
    )


def rooms_by_progress(rooms: Iterable[RoutedRoom]) -> dict[str, int]:
    """Counts the router's rooms by what their client waits for."""
    counts = Counter({"waiting": 0, "generating": 0, "ending": 0})
    for room in rooms:
        if room.state is not RouterRoom.OPEN or all(leg.state is Leg.ENDED for leg in room.legs):
            counts["ending"] += 1
        else:
            counts["generating" if room.received else "waiting"] += 1
    return dict(counts)


def _state(worker: Worker, load: Load | None) -> WorkerState:
    if not worker.connected:
        return "connecting"
    if load is None or not load.ready:
        return "starting"
    return "ready" if worker.usable else "draining"


def _counts(tallies: Iterable[Tally]) -> dict[str, int]:
    return {tally.name: tally.count for tally in tallies}
