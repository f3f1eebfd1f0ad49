"""One streamed completion as its client reads it: server-sent events to token times, usage and errors. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

LINE_BYTES_MAX = 4 << 20  # of one event
COUNT_MAX = (1 << 53) - 1
_Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]


class _Details(Struct):
    cached_tokens: _Count | None = None


class _Usage(Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None


class _StreamChoice(Struct):
    text: str | None = ""
    finish_reason: str | None = None


class _Chunk(Struct):
    choices: list[_StreamChoice] = []
    usage: _Usage | None = None
    error: Any = None


_CHUNK = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class CompletionStream:
    """`feed` takes bytes as they arrive, with the time."""

    times_s: list[float] = field(default_factory=list[float])  # of the events with tokens
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    done: bool = False
    error: str = ""  # a word for the report
    _left: bytes = b""

    def feed(self, data: bytes, now: float) -> None:
        """Takes the next bytes."""
        *lines, self._left = (self._left + data).split(b"\n")
        if len(self._left) > LINE_BYTES_MAX:
            self.error, self._left = self.error or "not an event stream", b""
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _CHUNK.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            self.error = self.error or "not a completion's events"
            return
        if chunk.error is not None:
            self.error = self.error or "error in the stream"
        if chunk.choices and (chunk.choices[0].text or chunk.choices[0].finish_reason is None):
            self.times_s.append(now)
        if chunk.usage is not None:
            self.prompt_tokens, self.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                self.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
