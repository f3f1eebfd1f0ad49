"""Serves Hugging Face checkpoints by the package transformers: `--model DIR` of prefill and decode daemons."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...engine_api import DecodeEngine, EngineConfig, PrefillEngine


def create(config: EngineConfig) -> PrefillEngine | DecodeEngine:
    """The engine for `config.role`, of the checkpoint that its option `model` names. Raises ConfigError."""
    from .factory import create as made

    return made(config)
