"""The two tables of a room: what decode waits for, and what prefill still owes. Leases have tables of their own."""

from __future__ import annotations

from .states import Word


class DecodeRoom(Word):
    """A room on the decode side."""

    CONNECTING = "connecting"  # a session of its prefill ranks is not up yet, or has its window full
    QUEUED = "queued"  # waits for slots; its places in the windows are reserved
    LANDING = "landing"  # granted; bytes are on their way
    SETTLING = "settling"  # every grant has landed, and some are still read back, or copied up to HBM
    READY = "ready"  # every byte is there; the engine reads it
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
    """A room on the prefill side; its pages may be reused once it has ended and its last write is over."""

    OPEN = "open"  # the engine computes and offers cells
    FINISHED = "finished"  # every cell was offered, and the aux
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
