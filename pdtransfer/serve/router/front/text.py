"""What the router needs of a tokenizer, the tokenizer of bytes, and how that of `--model DIR` is loaded. It imports no
torch: a checkpoint's module is imported by name, and only then.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....environment import pip_install
from ....errors import ConfigError
from ...settings.node import BUILT_IN

MODEL_TEXT = "pdtransfer.serve.engines.transformers.text"


class Detokenizer(Protocol):
    """Turns the ids of one answer into text, piece by piece."""

    def feed(self, token: int) -> str:
        """Returns the text that this id completes; an incomplete character is held back."""
        ...

    def end(self) -> str:
        """Returns what is held back, with U+FFFD for what is not a character."""
        ...


class TextCodec(Protocol):
    """A model's tokenizer and chat template. Its calls read no files."""

    vocabulary: int | None  # ids are below it; None where only the engine knows
    max_model_len: int | None  # tokens of prompt and answer together; None where only the workers know

    def encode(self, text: str, *, special: bool) -> NDArray[np.int64]:
        """The ids of a text, int64 (tokens,), with the tokens that begin or end every sequence where `special`."""
        ...

    def render(self, messages: Sequence[Mapping[str, object]], *, reply: bool) -> str:
        """A chat as one text, of messages with `role` and `content`, and what they have of `name`, `tool_calls` and
        `tool_call_id`. `reply`: it ends where the assistant begins. Raises ValueError for a chat that the template
        refuses."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all these ids, with the names of special tokens."""
        ...

    def detokenizer(self) -> Detokenizer: ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, of a special one its name; none for an unknown id."""
        ...


class BytesText:
    """The reference model's tokenizer: a text's UTF-8 bytes are the ids 0 to 255, and other ids have no text."""

    vocabulary: int | None = None
    max_model_len: int | None = None

    def encode(self, text: str, *, special: bool) -> NDArray[np.int64]:  # noqa: ARG002 -- there are no such tokens
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def render(self, messages: Sequence[Mapping[str, object]], *, reply: bool) -> str:
        calls = [msgspec.json.encode(message["tool_calls"]) if "tool_calls" in message else b"" for message in messages]
        lines = [
            f"{message['role']}: {message['content']}{call.decode()}\n"
            for message, call in zip(messages, calls, strict=True)
        ]
        return "".join(lines) + ("assistant: " if reply else "")

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in ids if token_id < 256).decode("utf-8", "replace")

    def detokenizer(self) -> Detokenizer:
        return _Utf8()

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


class _Utf8:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(bytes([token]) if token < 256 else b"")

    def end(self) -> str:
        return self._decoder.decode(b"", True)


def token_name(text: TextCodec, token: int) -> str:
    """A token as logprobs name it: its text, or what stands for it where it is none, as OpenAI writes that."""
    content = text.token_bytes(token)
    if not content:
        return f"token_id:{token}"
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


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
