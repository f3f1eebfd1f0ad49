"""The table of a HiSparse request: its logical tokens, host slots, row and device slots."""

from __future__ import annotations

from ..handoff.tables import Word


class SparseRequest(Word):
    """A request in the coordinator."""

    RESERVED = "reserved"  # has logical tokens only; its KV is on its way
    WAITING = "waiting"  # landed: has its host slots, and nothing of the device
    RUNNING = "running"  # has a row and device slots as well
    RETRACTED = "retracted"  # as WAITING, once queued work on its row and device slots has ended
    FINISHED = "finished"  # all of it is returned once queued work on it has ended
    DROPPED = "dropped"  # the same, for one that was given up


class SparseRequestEvent(Word):
    """What happens to a request; RETRACT changes nothing for one without a row."""

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
