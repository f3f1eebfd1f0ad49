"""Loads the tokenizer that `--model DIR` names. Its module is imported by name, and only then."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

from ..errors import ConfigError
from .text import BytesText, TextCodec

MODEL_TEXT = "pdtransfer.adapters.transformers.text"


def load_text(model: Path | None) -> TextCodec:
    """The tokenizer of a checkpoint directory, or that of bytes. Raises ConfigError for one that cannot be used."""
    if model is None:
        return BytesText()
    try:
        module = import_module(MODEL_TEXT)
    except ImportError as error:
        raise ConfigError(f"model = {str(model)!r}: {error}; install it with: pip install '.[text]'") from None
    try:
        return cast("TextCodec", module.load(model))
    except ValueError as error:
        raise ConfigError(f"model = {str(model)!r}: {error}") from None
