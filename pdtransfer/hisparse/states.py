"""The table of a HiSparse request: what it holds of logical tokens, host slots, rows and device slots."""

from __future__ import annotations

from ..handoff.states import Word


class SparseRequest(Word):
    """A request, as the coordinator sees it."""

    RESERVED = "reserved"  # logical tokens only; its KV is on its way
    WAITING = "waiting"  # landed: it has its host slots, and nothing of the device
    RUNNING = "running"  # it has a row and device slots as well
    RETRACTED = "retracted"  # as WAITING, once nothing queued reads or writes its row's device slots any more
    FINISHED = "finished"  # all of it comes back, once nothing queued reads or writes it any more
    DROPPED = "dropped"  # the same, of one that was given up


class SparseRequestEvent(Word):
    """What happens to a request; RETRACT of one that has no row changes nothing."""

    LAND = "land"
    ADMIT = "admit"
    RETRACT = "retract"
    FINISH = "finish"
    DROP = "drop"


_R, _RE = SparseRequest, SparseRequestEvent

SPARSE_REQUEST: dict[tuple[SparseRequest, SparseRequestEvent], SparseRequest] = {
    (_R.RESERVED, _RE.LAND): _R.WAITING,
    (_R.RESERVED, _RE.RETRACT): _R.RESERVED,
    (_R.RESERVED, _RE.DROP): _R.DROPPED,
    (_R.WAITING, _RE.ADMIT): _R.RUNNING,
    (_R.WAITING, _RE.RETRACT): _R.WAITING,
    (_R.WAITING, _RE.FINISH): _R.FINISHED,
    (_R.WAITING, _RE.DROP): _R.DROPPED,
    (_R.RUNNING, _RE.RETRACT): _R.RETRACTED,
    (_R.RUNNING, _RE.FINISH): _R.FINISHED,
    (_R.RUNNING, _RE.DROP): _R.DROPPED,
    (_R.RETRACTED, _RE.ADMIT): _R.RUNNING,
    (_R.RETRACTED, _RE.RETRACT): _R.RETRACTED,
    (_R.RETRACTED, _RE.FINISH): _R.FINISHED,
    (_R.RETRACTED, _RE.DROP): _R.DROPPED,
}

SPARSE_REQUEST_ENDS = frozenset({SparseRequest.FINISHED, SparseRequest.DROPPED})
