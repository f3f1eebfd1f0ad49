"""Hugging Face checkpoints by `--model DIR`: the engine of prefill and decode daemons, which needs the package
transformers. And `text`, the router's tokenizer, which needs neither transformers nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ....adapters.kit.versions import check_version
from ....environment import pip_install
from ....errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ....wire import Sampling
    from ...engine_api import DecodeEngine, EngineConfig, PrefillEngine
    from ..generation import Generation


def create(config: EngineConfig) -> PrefillEngine | DecodeEngine:
    """The engine for `config.role`, of the checkpoint that its option `model` names. Raises ConfigError."""
    check()
    from .factory import create as load

    return load(config)


def generate_many(
    config: EngineConfig, requests: Sequence[tuple[NDArray[np.int64], Sampling]]
) -> list[Generation]:  # fmt: skip
    """What a single process answers, without transfers; as `factory.generate_many`."""
    check()
    from .factory import generate_many as generate

    return generate(config, requests)


def check() -> None:
    """Raises ConfigError, with what helps, where transformers is not installed, or of another version."""
    if find_spec("transformers") is None or find_spec("torch") is None:
        raise ConfigError(f"checkpoints are served by transformers: {pip_install('transformers')}")
    try:
        check_version(__name__, "transformers", "transformers", ((5, 23), (5, 999)), all_between=True)
    except ImportError as error:
        raise ConfigError(str(error)) from None
