"""Every table of states of the hand-off."""

from __future__ import annotations

from .tables import Word


class DecodeRoom(Word):
    """A room on the decode side."""

    CONNECTING = "connecting"  # some prefill rank is not known yet, its session is not up, or its window is full
    QUEUED = "queued"  # waits for slots; its window slots are reserved
    LANDING = "landing"  # granted; bytes are on their way
    SETTLING = "settling"  # every grant has landed, and some are still verified or copied to HBM
    READY = "ready"  # every byte has arrived; the engine reads it
    RELEASED = "released"
    FAILED = "failed"


class DecodeRoomEvent(Word):
    """What happens to a room on the decode side."""

    CONNECT = "connect"
    ADMIT = "admit"
    LAND = "land"
    COMPLETE = "complete"
    RELEASE = "release"
    FAIL = "fail"


_D, _DE = DecodeRoom, DecodeRoomEvent

DECODE_ROOM: dict[tuple[DecodeRoom, DecodeRoomEvent], DecodeRoom] = {
    (_D.CONNECTING, _DE.CONNECT): _D.QUEUED,
    (_D.CONNECTING, _DE.FAIL): _D.FAILED,
    (_D.QUEUED, _DE.ADMIT): _D.LANDING,
    (_D.QUEUED, _DE.FAIL): _D.FAILED,
    (_D.LANDING, _DE.COMPLETE): _D.READY,
    (_D.LANDING, _DE.LAND): _D.SETTLING,
    (_D.LANDING, _DE.FAIL): _D.FAILED,
    (_D.SETTLING, _DE.COMPLETE): _D.READY,
    (_D.SETTLING, _DE.FAIL): _D.FAILED,
    (_D.READY, _DE.RELEASE): _D.RELEASED,
}


class PrefillRoom(Word):
    """A room on the prefill side; its pages may be reused once it has ended and its last write has."""

    OPEN = "open"  # the engine computes and offers cells
    FINISHED = "finished"  # every cell and the aux were offered
    LANDED = "landed"  # every grant has landed
    FAILED = "failed"


class PrefillRoomEvent(Word):
    """What happens to a room on the prefill side."""

    FINISH = "finish"
    LAND = "land"
    FAIL = "fail"


_P, _PE = PrefillRoom, PrefillRoomEvent

PREFILL_ROOM: dict[tuple[PrefillRoom, PrefillRoomEvent], PrefillRoom] = {
    (_P.OPEN, _PE.FINISH): _P.FINISHED,
    (_P.OPEN, _PE.FAIL): _P.FAILED,
    (_P.FINISHED, _PE.LAND): _P.LANDED,
    (_P.FINISHED, _PE.FAIL): _P.FAILED,
}


class Lease(Word):
    """The granted side of a Grant, decode's lease on slots: until ENDED its writer may touch the slots."""

    GRANTED = "granted"
    ABORTING = "aborting"  # Abort repeats until a proof
    QUARANTINED = "quarantined"  # condemned, silent, or no answer to Abort for slow_ms: a proof or a fence ends it
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


class WriterGrantState(Word):
    """The received side of a Grant, at its writer; LANDED, FAILED and DRAINED are ends, repeated until Released."""

    WAITING = "waiting"  # for its room to be opened
    ACTIVE = "active"
    STOPPING = "stopping"  # refused, failed or aborted while writes are in flight
    LANDED = "landed"
    FAILED = "failed"
    DRAINED = "drained"


class WriterGrantEvent(Word):
    """What happens to a received grant; the BUSY forms of FAIL and ABORT are for writes in flight."""

    OPEN = "open"
    COMPLETE = "complete"
    FAIL = "fail"
    FAIL_BUSY = "fail_busy"
    ABORT = "abort"
    ABORT_BUSY = "abort_busy"
    QUIET = "quiet"


_W, _WE = WriterGrantState, WriterGrantEvent

WRITER_GRANT: dict[tuple[WriterGrantState, WriterGrantEvent], WriterGrantState] = {
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

WRITER_GRANT_ENDS = frozenset({WriterGrantState.LANDED, WriterGrantState.FAILED, WriterGrantState.DRAINED})


class SessionState(Word):
    """A session on the decode side; only UP may be granted on."""

    OFFERING = "offering"  # the shell prepares the hand-over
    REGISTERING = "registering"
    UP = "up"
    SLOW = "slow"  # no message for slow_ms: nothing new is granted, what was granted goes on
    SILENT = "silent"  # its peer counts as lost: its rooms have failed, its leases are quarantined
    FENCING = "fencing"  # condemned: waits for the proof that its writer is quiet
    CLOSED = "closed"


class SessionEvent(Word):
    """What happens to a session."""

    OFFER = "offer"
    REGISTER = "register"
    SLOW = "slow"
    SILENCE = "silence"
    SEEN = "seen"
    CONDEMN = "condemn"
    FENCE = "fence"


_S, _SE = SessionState, SessionEvent


SESSION: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (_S.OFFERING, _SE.OFFER): _S.REGISTERING,
    (_S.OFFERING, _SE.CONDEMN): _S.FENCING,
    (_S.REGISTERING, _SE.REGISTER): _S.UP,
    (_S.REGISTERING, _SE.CONDEMN): _S.FENCING,
    (_S.UP, _SE.SLOW): _S.SLOW,
    (_S.UP, _SE.SILENCE): _S.SILENT,
    (_S.UP, _SE.CONDEMN): _S.FENCING,
    (_S.SLOW, _SE.SEEN): _S.UP,
    (_S.SLOW, _SE.SILENCE): _S.SILENT,
    (_S.SLOW, _SE.CONDEMN): _S.FENCING,
    (_S.SILENT, _SE.SEEN): _S.UP,
    (_S.SILENT, _SE.CONDEMN): _S.FENCING,
    (_S.SILENT, _SE.FENCE): _S.CLOSED,
    (_S.FENCING, _SE.FENCE): _S.CLOSED,
}


class WriterState(Word):
    """A session on the prefill side; only MAPPING and UP take messages."""

    MAPPING = "mapping"  # the shell maps the arena
    UP = "up"
    ABANDONED = "abandoned"  # closed while the shell maps: the mapping is released at once
    CLOSING = "closing"  # its mapping is released when its last write has ended
    CLOSED = "closed"


class WriterEvent(Word):
    """What happens to a session on the prefill side."""

    MAP = "map"
    CLOSE = "close"
    QUIET = "quiet"


_WS, _WSE = WriterState, WriterEvent


WRITER: dict[tuple[WriterState, WriterEvent], WriterState] = {
    (_WS.MAPPING, _WSE.MAP): _WS.UP,
    (_WS.MAPPING, _WSE.CLOSE): _WS.ABANDONED,
    (_WS.UP, _WSE.MAP): _WS.UP,
    (_WS.UP, _WSE.CLOSE): _WS.CLOSING,
    (_WS.ABANDONED, _WSE.QUIET): _WS.CLOSED,
    (_WS.CLOSING, _WSE.QUIET): _WS.CLOSED,
}
