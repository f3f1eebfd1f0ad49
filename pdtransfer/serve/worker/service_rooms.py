"""A room as a daemon keeps it for the router that began it, its state table, and that router."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ...errors import Cause
from ...handoff.liveness import Liveness
from ...handoff.tables import Word
from ...wire import End


class ServiceRoom(Word):
    """A router's room on a daemon."""

    RUNNING = "running"
    STOPPING = "stopping"  # the router gave it up; the daemon has not ended it yet
    ENDING = "ending"  # End repeats until Ended
    ENDED = "ended"


class ServiceEvent(Word):
    """What happens to a room on a daemon."""

    STOP = "stop"
    END = "end"
    ACKNOWLEDGE = "acknowledge"


_S, _E = ServiceRoom, ServiceEvent

SERVICE_ROOM: dict[tuple[ServiceRoom, ServiceEvent], ServiceRoom] = {
    (_S.RUNNING, _E.STOP): _S.STOPPING,
    (_S.RUNNING, _E.END): _S.ENDING,
    (_S.STOPPING, _E.STOP): _S.STOPPING,
    (_S.STOPPING, _E.END): _S.ENDING,
    (_S.ENDING, _E.STOP): _S.ENDING,
    (_S.ENDING, _E.ACKNOWLEDGE): _S.ENDED,
}


@dataclass(slots=True, eq=False)
class ServedRouter:
    """One router process that begins rooms; `ended` holds the answers to a late Begin or Cancel."""

    name: str
    liveness: Liveness
    rooms: dict[int, ServedRoom] = field(default_factory=dict[int, "ServedRoom"])
    ended: OrderedDict[int, End] = field(default_factory=OrderedDict[int, End])


@dataclass(slots=True, eq=False)
class ServedRoom:
    """`unacked` holds the generated ids from `acked` on, those below `sent` were sent at least once. `logprobs` has
    `logprob_bytes` for each of them."""

    id: int
    router: ServedRouter
    tokens_max: int
    prompt_bytes: int
    logprob_bytes: int = 0
    state: ServiceRoom = ServiceRoom.RUNNING
    generated: int = 0
    acked: int = 0
    sent: int = 0
    unacked: list[int] = field(default_factory=list[int])
    logprobs: bytearray = field(default_factory=bytearray)
    cause: Cause | None = None  # why it was stopped
    end: End | None = None
    repeat_ms: int = 0
