"""The reference engine: the factory that daemons call, and generation in a single process without transfers.

Tests compare disaggregated runs with `generate_many`, which runs the same prefill and decode on one pool of pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..engine_api import Broken, DecodeEngine, EngineConfig, Finished, Prefilled, PrefillEngine, Request, Token
from ..wire import Sampling
from .architecture import EngineOptions, Options
from .decode import ReferenceDecode
from .description import build_model
from .hybrid import HybridDecode, HybridPrefill
from .hybrid_rows import HybridOptions
from .model import Transformer
from .prefill import ReferencePrefill


def create(config: EngineConfig) -> PrefillEngine | DecodeEngine:
    """The engine for `config.role`; the option `pools` names that of a hybrid model. Raises ConfigError."""
    if "pools" in config.options:
        hybrid = HybridOptions.parse(config.options)
        return HybridPrefill(config, hybrid) if config.role == "prefill" else HybridDecode(config, hybrid)
    options = Options.parse(config.options)
    return engine_of(config, options, build_model(config, options))


def engine_of(config: EngineConfig, options: EngineOptions, model: Transformer) -> PrefillEngine | DecodeEngine:
    """The engine for `config.role` with this model."""
    match config.role:
        case "prefill":
            return ReferencePrefill(config, options, model)
        case "decode":
            return ReferenceDecode(config, options, model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request's outcome, with digests of its tokens, logits and KV."""

    tokens: tuple[int, ...]
    reason: str  # "stop" or "length"
    tokens_digest: bytes
    logits_digest: bytes
    kv_digest: bytes


def generate(config: EngineConfig, prompt: NDArray[np.int64], sampling: Sampling) -> Generation:
    """Runs one request in this process. Raises ValueError for an invalid request or one that does not fit."""
    return generate_many(config, [(prompt, sampling)])[0]


def generate_many(config: EngineConfig, requests: Sequence[tuple[NDArray[np.int64], Sampling]]) -> list[Generation]:
    """Runs requests in this process, as many at a time as fit `config.slots`, and returns outcomes in their order.

    Only `attention`, `options` and `device` of `config` affect the outcomes.
    """
    prefill, decode = _alone(config)
    rooms = [Request(room=at, prompt=prompt, sampling=sampling) for at, (prompt, sampling) in enumerate(requests)]
    waiting = deque(rooms)
    slots: dict[int, dict[str, NDArray[np.int64]]] = {}
    tokens: list[list[int]] = [[] for _ in requests]
    outcomes: dict[int, Generation] = {}
    while len(outcomes) < len(requests):
        while waiting:
            own = prefill.admit_with_growth(waiting[0], waiting[0].sampling.max_tokens)
            if own is None:
                break
            slots[waiting.popleft().room] = own
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
    return [outcomes[at] for at in range(len(requests))]


def _alone(config: EngineConfig) -> tuple[ReferencePrefill | HybridPrefill, DecodeEngine]:
    """Both engines, on one pool."""
    if "pools" in config.options:
        hybrid = HybridOptions.parse(config.options | {"index_memory": "dram"})
        writes, reads = HybridPrefill(config, hybrid), HybridDecode(config, hybrid)
        reads.take(writes.flat)
        return writes, reads
    options = Options.parse(config.options)
    model = build_model(config, options)
    prefill = ReferencePrefill(replace(config, role="prefill"), options, model)
    decode = ReferenceDecode(replace(config, role="decode"), options, model)
    decode.take(prefill.flat)
    return prefill, decode
