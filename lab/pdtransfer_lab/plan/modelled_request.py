"""One request of the fleet model on its way: what it needs, where it is, and when it got there."""

from __future__ import annotations

from dataclasses import dataclass

from pdtransfer.handoff.admission import Demand
from pdtransfer.handoff.slot_allocator import Holding
from pdtransfer.serve.router.backends.daemons.placement import WorkerPair
from pdtransfer.serve.router.backends.daemons.router_rooms import CompletionRequest


@dataclass(slots=True, eq=False)
class ModelledRequest:
    """Times in seconds of virtual time; below 0 for what has not happened."""

    room: int
    at_s: float
    tokens: int
    output_tokens: int
    prompt: CompletionRequest
    demand: Demand
    keys: tuple[bytes, ...]
    pair: WorkerPair
    retried: bool = False
    over: bool = False  # it has failed: the next step that meets it drops it
    computed: int = 0  # tokens of the prompt
    last_chunk: int = 0  # tokens of the newest chunk
    compute_begins_s: float = -1.0
    computed_s: float = -1.0
    granted_s: float = -1.0
    in_transfer: bool = False  # what is left of its bytes is on the way, or has landed
    landed: bool = False
    holding: Holding | None = None
    first_token_s: float = -1.0
