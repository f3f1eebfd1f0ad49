"""Every bound of a bus, with its reason; times are milliseconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BusLimits:
    """Resource limits of a bus and of each peer."""

    dials_max: int = 256  # dialled endpoints: each costs five descriptors, of which the process must have enough
    named_max: int = 1_024  # connections that have sent a Hello
    same_max: int = 8  # connections of one process, which may know this node by several addresses
    unnamed_max: int = 1_024  # connections that have not: at the limit the oldest is removed
    stale_ms: int = 10_000  # a named connection silent for this long may be replaced by a new one
    turn_messages: int = 16  # read from one socket in a row, so that other tasks of the loop are served between
    turn_bytes: int = 4 << 20  # read from one socket in a row: a large frame takes longer to decode
    line_bytes_max: int = 16 << 10  # of a frame on a session's line; a longer one goes by ZMQ
    line_queue_bytes: int = 256 << 10  # on a line, sent and not yet read, as the kernel counts them
    line_queue_frames: int = 1_024  # the same in frames, each of which costs the kernel 768 bytes; and as many received
    line_unread_ms: int = 500  # a line whose peer has left something unread for this long takes nothing more
    send_queue: int = 1_024  # messages queued for one peer; beyond it send() returns False, and the protocol repeats
    unread_bytes_max: int = 256 << 20  # of one connection: beyond it the connection is closed
    unread_frames_max: int = 65_536  # the same, estimated from its mean frame: what a loop drops in a tenth of a second
    dialled_frames_max: int = 1 << 20  # the same of a dialled peer, whose rooms may each have a long message here
    audit_ms: int = 500  # period of the check for unread bytes
    mute_ms: int = 1_000  # messages after a breach are dropped for this long
    costs_max: int = 128  # of one connection within mute_ms before it is muted: a Reject for each grant is 1
    hello_cost: int = 4  # of each Hello, which is answered: a peer repeats one a few times a second at most
    ignored_max: int = 4_096  # messages from a muted connection before it is closed
    hostile_max: int = 256  # the same where it broke the protocol or repeated Hello: even dropping costs time
    banned_ms: int = 10_000  # a key whose connection was closed for flooding is refused for this long
    log_ms: int = 1_000  # least time between two log lines about refused handshakes, or about breaches
    handshake_ms: int = 5_000  # a connection that has not authenticated by then is closed
    naming_ms: int = 5  # delay of the authenticator's answer: its routing id must be read after the peer's own
    unanswered_ms: int = 5_000  # sent data, Pings included, unacknowledged for this long: the connection is closed
    unacknowledged_ms: int = 1_000  # the same, and a dial: this long is evidence that the peer's host is gone
    absent_kept_ms: int = 10_000  # how long its absence is reported: by then its process counts as lost
    reconnect_ms: int = 100
    reconnect_ms_max: int = 1_000
    redial_ms: int = 2_000  # first wait before an unreachable endpoint is resolved and dialled again
    redial_ms_max: int = 8_000  # the longest such wait
    linger_ms: int = 200  # close() waits this long for queued messages
    backlog: int = 128
