"""The reference engine: the factory that daemons call, and generation in a single process without transfers.

Tests compare disaggregated runs with `generate_many`, which runs the same prefill and decode on one pool of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pdtransfer.serve.engine_api import DecodeEngine, EngineConfig, PrefillEngine
from pdtransfer.serve.engines.generation import Generation, generated
from pdtransfer.serve.engines.shell.decode import DecodeShell
from pdtransfer.serve.engines.shell.prefill import PrefillShell
from pdtransfer.wire import Sampling

from .architecture import EngineOptions, Options
from .decode import ReferenceDecode
from .description import build_model
from .model import Transformer
from .numerics import first_product
from .prefill import ReferencePrefill


def create(config: EngineConfig) -> PrefillEngine | DecodeEngine:
    """The engine for `config.role`. Raises ConfigError."""
    options = Options.parse(config.options)
    return engine_of(config, options, build_model(config, options))


def engine_of(config: EngineConfig, options: EngineOptions, model: Transformer) -> PrefillEngine | DecodeEngine:
    """The engine for `config.role` with this model."""
    if config.role == "prefill":
        prefill = ReferencePrefill(config, options, model)
        return PrefillShell(config, prefill, warm_up=lambda: first_product(model.device))
    return DecodeShell(config, ReferenceDecode(config, options, model), warm_up=lambda: first_product(model.device))


def generate(config: EngineConfig, prompt: NDArray[np.int64], sampling: Sampling) -> Generation:
    """Runs one request in this process. Raises ValueError for an invalid request or one that does not fit."""
    return generate_many(config, [(prompt, sampling)])[0]


def generate_many(config: EngineConfig, requests: Sequence[tuple[NDArray[np.int64], Sampling]]) -> list[Generation]:
    """Runs requests in this process, as many at a time as fit `config.slots`, and returns outcomes in their order.

    Only `options` and `device` of `config` affect the outcomes.
    """
    options = Options.parse(config.options)
    model = build_model(config, options)
    prefill = ReferencePrefill(replace(config, role="prefill"), options, model)
    decode = ReferenceDecode(replace(config, role="decode"), options, model)
    decode.take(prefill.flat)
    return generated(PrefillShell(config, prefill), DecodeShell(config, decode), requests)
