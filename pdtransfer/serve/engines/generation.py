"""Generation in a single process without transfers, by any engine: what the answers of a fleet are compared with."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...wire import Sampling
from ..engine_api import Broken, DecodeEngine, Finished, Prefilled, PrefillEngine, Request, Token
from .shell.prefill import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request's outcome, with digests of its tokens, and of logits and KV if the engines compute these."""

    tokens: tuple[int, ...]
    reason: str  # "stop" or "length"
    tokens_digest: bytes
    logits_digest: bytes
    kv_digest: bytes


class GrowingPrefill(PrefillEngine, Protocol):
    """A prefill engine in whose pool decode goes on."""

    def admit_with_growth(self, request: Request, growth: int) -> Slots | None:
        """As `admit`, with pages for `growth` more tokens for decode from this pool. Returns slots by component."""
        ...


def generated(
    prefill: GrowingPrefill, decode: DecodeEngine, requests: Sequence[tuple[NDArray[np.int64], Sampling]]
) -> list[Generation]:
    """Runs requests on these engines of one memory, as many at a time as fit it. Returns outcomes in their order."""
    rooms = [Request(room=index, prompt=prompt, sampling=sampling) for index, (prompt, sampling) in enumerate(requests)]
    waiting = deque(rooms)
    slots: dict[int, Slots] = {}
    tokens: list[list[int]] = [[] for _ in requests]
    outcomes: dict[int, Generation] = {}
    while len(outcomes) < len(requests):
        while waiting:
            taken = prefill.admit_with_growth(waiting[0], waiting[0].sampling.max_tokens)
            if taken is None:
                break
            slots[waiting.popleft().room] = taken
        for event in prefill.step() or decode.step():
            match event:
                case Prefilled(room=room, aux=aux):
                    decode.admit(rooms[room], slots.pop(room), aux)
                case Token(room=room, id=token):
                    tokens[room].append(token)
                case Finished(room=room):
                    prefill.free(room)
                    outcomes[room] = Generation(
                        tokens=tuple(tokens[room]), reason=event.reason, tokens_digest=event.tokens_digest,
                        logits_digest=event.logits_digest, kv_digest=event.kv_digest,
                    )  # fmt: skip
                case Broken(room=room, detail=detail):
                    raise RuntimeError(f"request {room}: {detail}")
                case _:
                    pass
    return [outcomes[index] for index in range(len(requests))]
