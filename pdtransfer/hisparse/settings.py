"""What a decode worker has for HiSparse requests, and what it reports of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class HiSparse:
    """The resources of a decode daemon for HiSparse requests: their whole KV stays in the arena, their hot tokens on
    the device."""

    device_slots: int  # device slots in tokens, of all HiSparse requests together
    hot_tokens: int  # of one request at most; at least the tokens that a step reads
    dense_slots: int = 0  # tokens on the device for requests without HiSparse
    # Which request is retracted for a waiting one: by its tokens left, or the newest.
    policy: Literal["longest", "shortest", "newest"] = "longest"
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class HotFigures:
    """Figures of HiSparse requests; counts start with the engine."""

    running: int = 0  # requests with a place on the device
    waiting: int = 0  # landed requests without a place
    retry_ms: int = 0  # when to try again while too many requests wait
    hits: int = 0  # tokens that a step read and found on the device, of requests that do not fit there whole
    misses: int = 0
    swapped_bytes: int = 0  # copied from the arena, for misses
    preloaded_bytes: int = 0  # of requests that were placed whole, by the scheduler's decisions
    admission_bytes: int = 0  # written by the copies that place requests, each copy counted
    retracts: int = 0
