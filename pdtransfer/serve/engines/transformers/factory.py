"""Makes the engine of a role, and generates in a single process without transfers.

Tests and the demo compare disaggregated runs with `generate_many`, which runs the same prefill and decode on one pool.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from ....errors import ConfigError
from ....wire import Sampling
from ...engine_api import DecodeEngine, EngineConfig, PrefillEngine
from ..generation import Generation, generated
from ..shell.decode import DecodeShell
from ..shell.prefill import PrefillShell
from .checkpoint import Checkpoint, ModelOptions, kept_by, load, placed, with_cache
from .decode import CheckpointDecode
from .layers import LayerShape, describe
from .paged import PagedModel
from .prefill import CheckpointPrefill
from .ranks import share_of, split, together

_PROOF_TOKENS = 11
_PROOF_KEYS = 1_024  # of the step: most are masked, as those of a longer request in the same batch
_DIFFERENCE_MAX = {torch.float32: 0.01, torch.bfloat16: 0.3, torch.float16: 0.1}  # relative to all logits


def create(config: EngineConfig) -> PrefillEngine | DecodeEngine:
    """The engine for `config.role`. Raises ConfigError."""
    options = ModelOptions.parse(config.options)
    checkpoint = loaded(config, options)
    match config.role:
        case "prefill":
            return PrefillShell(config, CheckpointPrefill(config, options, checkpoint))
        case "decode":
            return DecodeShell(config, CheckpointDecode(config, options, checkpoint))


def loaded(config: EngineConfig, options: ModelOptions) -> Checkpoint:
    """The checkpoint, which computes the same over a pool as over transformers' own cache. Raises ConfigError."""
    if config.chunk_tokens < 1 or config.batch_max < 1:
        raise ConfigError(f"chunk_tokens: {config.chunk_tokens}, batch_max: {config.batch_max}: both are at least 1")
    checkpoint = load(config, options)
    checkpoint.enter()
    ranks = config.group.ranks
    try:
        expected = _whole(checkpoint)
        if ranks.tp_size == 1:
            _prove(checkpoint, config, expected)
            return checkpoint
        shares = together(ranks.tp_size, lambda group: _proven(checkpoint, replace(config, group=group), expected))
        return placed(checkpoint, config, split(checkpoint.model, config.group), shares[ranks.tp_rank])
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, NotImplementedError) as error:
        raise ConfigError(f"model = {options.model!r}: over a paged cache: {error}") from error


@torch.inference_mode()
def _whole(checkpoint: Checkpoint) -> Tensor:
    """Logits of some tokens, computed at once over transformers' own cache."""
    text = checkpoint.model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=text)
    model = checkpoint.model
    return model(_proof(checkpoint)[None], use_cache=True, **with_cache(model, cache)).logits[0].float()


def _proof(checkpoint: Checkpoint) -> Tensor:
    return torch.arange(1, _PROOF_TOKENS + 1, device=checkpoint.device) % checkpoint.vocabulary


def _proven(checkpoint: Checkpoint, config: EngineConfig, expected: Tensor) -> tuple[LayerShape, ...]:
    """What a rank's layers keep; its share of the model computes the same as the whole. Raises as `_prove`."""
    checkpoint.enter()
    model, ranks = split(checkpoint.model, config.group), config.group.ranks
    pairs = zip(checkpoint.shapes, kept_by(model, checkpoint.device), strict=True)
    shapes = tuple(share_of(whole, share, ranks) for whole, share in pairs)
    _prove(replace(checkpoint, model=model, shapes=shapes), config, expected)
    return shapes


@torch.inference_mode()
def _prove(checkpoint: Checkpoint, config: EngineConfig, whole: Tensor) -> None:
    """Raises ValueError if some tokens in two chunks and a step have other logits than at once. The step is as in a
    batch with a longer request: a model must not read positions out of the number of keys."""
    device = checkpoint.device
    ids = _proof(checkpoint)
    small = replace(config, role="prefill", slots=16, page_size=1, host_layout="layer_first")
    described = describe(small, checkpoint.shapes, name="", digest=b"", window_slots=0, hbm=False)
    memory = torch.zeros(described.memory_bytes, dtype=torch.uint8, device=device)
    model = PagedModel(checkpoint, memory, described.components)
    slots = {
        component.name: torch.arange(15, 15 - _PROOF_TOKENS, -1, device=device) for component in described.components
    }
    rest, last = 4, _PROOF_TOKENS - 1
    logits = [model.chunk(ids[:rest], slots, done=0), model.chunk(ids[rest:last], slots, done=rest)]
    keys = max(_PROOF_TOKENS, min(_PROOF_KEYS, checkpoint.context_tokens))
    padded = {
        name: torch.nn.functional.pad(indices, (0, keys - _PROOF_TOKENS))[None] for name, indices in slots.items()
    }
    position, begin = torch.tensor([last], device=device), torch.tensor([0], device=device)
    window = max(model.window, _PROOF_TOKENS)
    ring = torch.tensor([min(window, _PROOF_TOKENS)], device=device)
    logits.append(model.step(ids[last:], padded, position, last=keys, begins=begin, ring=ring)[0])
    computed, expected = torch.stack(logits), whole[[rest - 1, last - 1, last]]
    difference = float((computed - expected).norm() / expected.norm())
    if not difference <= _DIFFERENCE_MAX[checkpoint.shapes[0].dtype]:
        raise ValueError(f"its logits differ by {difference:.3f} of their size from those over transformers' own cache")


def generate_many(config: EngineConfig, requests: Sequence[tuple[NDArray[np.int64], Sampling]]) -> list[Generation]:
    """Runs requests in this process, as many at a time as fit `config.slots`, and returns outcomes in their order.
    Raises ConfigError, and ValueError for an invalid request."""
    options = ModelOptions.parse(config.options)
    checkpoint = loaded(config, options)
    prefill = CheckpointPrefill(replace(config, role="prefill"), options, checkpoint)
    config = replace(config, role="decode")
    decode = CheckpointDecode(config, options, checkpoint, prefill.facts.description)
    decode.take(prefill.memory)
    return generated(PrefillShell(config, prefill), DecodeShell(config, decode), requests)
