"""Every bound of a bus, with its reason; times are milliseconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BusLimits:
    """What a bus allows itself and its peers."""

    dials_max: int = 256  # endpoints dialled at once: each costs four descriptors
    named_max: int = 1_024  # connections that have said Hello
    unnamed_max: int = 1_024  # connections that have not: beyond it the oldest is forgotten
    stale_ms: int = 10_000  # a named connection silent for so long makes place for a newcomer
    turn_messages: int = 16  # taken from one socket before the loop's other work has its turn: 0.1 to 0.3 ms
    turn_bytes: int = 4 << 20  # and no more bytes than these: a large frame takes longer to decode
    send_queue: int = 1_024  # messages queued for one peer; beyond it send() says False, and the protocol repeats
    unread_bytes_max: int = 256 << 20  # of one connection, come and not read yet: beyond it the connection ends
    unread_frames_max: int = 65_536  # the same, by its usual frame: what a loop drops in a tenth of a second
    audit_ms: int = 500  # how often that is looked at
    mute_ms: int = 1_000  # what follows a breach on its connection is dropped for so long
    rejects_max: int = 128  # Rejects that one connection may earn in mute_ms before it is muted: one for each grant
    ignored_max: int = 4_096  # messages that a muted connection may go on to send before it ends
    banned_ms: int = 10_000  # a key whose connection was ended for its floods gets no other for so long
    log_ms: int = 1_000  # refused strangers are logged this often
    handshake_ms: int = 5_000  # a connection that has not authenticated by then ends
    naming_ms: int = 5  # a listed key waits for its answer: the routing id in it has to come after the peer's own
    unanswered_ms: int = 5_000  # of what was sent, Pings too, no byte acknowledged: the connection ends
    reconnect_ms: int = 100
    reconnect_ms_max: int = 1_000
    redial_ms: int = 2_000  # an endpoint that stays unreachable is resolved and dialled afresh, at first this soon
    redial_ms_max: int = 8_000  # and at last this seldom
    linger_ms: int = 200  # how long close() waits for last words to leave
    backlog: int = 128
