"""The factory that daemons call, and generation in a single process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ....wire import Sampling
from ...engine_api import DecodeEngine, EngineConfig, PrefillEngine
from ..generation import Generation, generated
from ..shell.decode import DecodeShell
from ..shell.prefill import PrefillShell
from .decode import StampDecode
from .options import StampOptions
from .prefill import StampPrefill


def create(config: EngineConfig) -> PrefillEngine | DecodeEngine:
    """The engine for `config.role`. Raises ConfigError."""
    options = StampOptions.parse(config.options)
    if config.role == "prefill":
        return PrefillShell(config, StampPrefill(config, options))
    return DecodeShell(config, StampDecode(config, options))


def generate(config: EngineConfig, prompt: NDArray[np.int64], sampling: Sampling) -> Generation:
    """Runs one request in this process. Raises ValueError for an invalid request or one that does not fit."""
    return generate_many(config, [(prompt, sampling)])[0]


def generate_many(config: EngineConfig, requests: Sequence[tuple[NDArray[np.int64], Sampling]]) -> list[Generation]:
    """Runs requests in this process, as many at a time as fit `config.slots`, and returns outcomes in their order.

    Only `options` of `config` affect the outcomes.
    """
    in_arena = {"index_memory": "dram"} if "pools" in config.options else {}
    config = replace(config, hisparse=None, options=config.options | in_arena)
    options = StampOptions.parse(config.options)
    prefill = StampPrefill(replace(config, role="prefill"), options)
    decode = DecodeShell(config, StampDecode(replace(config, role="decode"), options))
    decode.attach(prefill.pool.view)
    return generated(PrefillShell(config, prefill), decode, requests)
