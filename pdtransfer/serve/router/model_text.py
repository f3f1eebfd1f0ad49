"""Loads the tokenizer that `--model DIR` names. Its module is imported by name, and only then."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

from ...environment import pip_install
from ...errors import ConfigError
from ..settings.node import BUILT_IN
from .text import BytesText, TextCodec

MODEL_TEXT = "pdtransfer.serve.engines.transformers.text"


def load_text(model: str) -> TextCodec:
    """The tokenizer of a checkpoint directory, or bytes, for the models that need none. Raises ConfigError for a
    tokenizer that cannot be used."""
    if model in BUILT_IN:
        return BytesText()
    try:
        module = import_module(MODEL_TEXT)
    except ImportError as error:
        raise ConfigError(f"model = {model!r}: {error}; install it with: {pip_install('text')}") from None
    try:
        return cast("TextCodec", module.load(Path(model)))
    except ValueError as error:
        raise ConfigError(f"model = {model!r}: {error}") from None
