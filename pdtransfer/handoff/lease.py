"""The two tables of a grant: decode's lease on slots, and the writer's duty to end it with a proof."""

from __future__ import annotations

from .states import Word


class Lease(Word):
    """A grant as decode sees it: until ENDED its writer may touch the slots."""

    GRANTED = "granted"
    ABORTING = "aborting"  # Abort repeats until a proof
    QUARANTINED = "quarantined"  # condemned, silent, or deaf to Abort for silence_ms: a proof or a fence ends it
    ENDED = "ended"


class LeaseEvent(Word):
    """What happens to a lease; a proof is Landed, Failed(quiescent) or Drained."""

    ABORT = "abort"
    CONDEMN = "condemn"
    PROOF = "proof"
    FENCE = "fence"


_L, _LE = Lease, LeaseEvent

LEASE: dict[tuple[Lease, LeaseEvent], Lease] = {
    (_L.GRANTED, _LE.ABORT): _L.ABORTING,
    (_L.GRANTED, _LE.CONDEMN): _L.QUARANTINED,
    (_L.GRANTED, _LE.PROOF): _L.ENDED,
    (_L.GRANTED, _LE.FENCE): _L.ENDED,
    (_L.ABORTING, _LE.CONDEMN): _L.QUARANTINED,
    (_L.ABORTING, _LE.PROOF): _L.ENDED,
    (_L.ABORTING, _LE.FENCE): _L.ENDED,
    (_L.QUARANTINED, _LE.PROOF): _L.ENDED,
    (_L.QUARANTINED, _LE.FENCE): _L.ENDED,
}


class Duty(Word):
    """A grant as its writer sees it; LANDED, FAILED and DRAINED are ends, repeated until Released."""

    WAITING = "waiting"  # for its room to be opened
    ACTIVE = "active"
    STOPPING = "stopping"  # refused, failed or aborted while writes are in flight
    LANDED = "landed"
    FAILED = "failed"
    DRAINED = "drained"


class DutyEvent(Word):
    """What happens to a duty. FAIL and ABORT say whether anything is in flight: BUSY if so."""

    OPEN = "open"
    COMPLETE = "complete"
    FAIL = "fail"
    FAIL_BUSY = "fail_busy"
    ABORT = "abort"
    ABORT_BUSY = "abort_busy"
    QUIET = "quiet"


_W, _WE = Duty, DutyEvent

DUTY: dict[tuple[Duty, DutyEvent], Duty] = {
    (_W.WAITING, _WE.OPEN): _W.ACTIVE,
    (_W.WAITING, _WE.FAIL): _W.FAILED,
    (_W.WAITING, _WE.ABORT): _W.DRAINED,
    (_W.ACTIVE, _WE.COMPLETE): _W.LANDED,
    (_W.ACTIVE, _WE.FAIL): _W.FAILED,
    (_W.ACTIVE, _WE.FAIL_BUSY): _W.STOPPING,
    (_W.ACTIVE, _WE.ABORT): _W.DRAINED,
    (_W.ACTIVE, _WE.ABORT_BUSY): _W.STOPPING,
    (_W.STOPPING, _WE.QUIET): _W.DRAINED,
}

DUTY_ENDS = frozenset({Duty.LANDED, Duty.FAILED, Duty.DRAINED})
