"""What a router reads of a request's body, by its kind. No I/O.

A reading is described by a small struct, so that it can be done in another process. What is large of its result is in
`parts`, which cross apart from the rest, so that nobody makes one object of all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from .completions import BadRequestError, ReadBody, detokenized, read_body, tokenized
from .text import TextCodec

if TYPE_CHECKING:
    from .servers.server_request import RelayedBody

Result_co = TypeVar("Result_co", bound="Read", covariant=True)


class Read(Protocol):
    """What was read: a struct that has its large parts in a list."""

    parts: list[bytes]


class BodyReading(Protocol[Result_co]):
    """One kind of reading."""

    @property
    def result(self) -> type[Result_co]:
        """The type of what is read."""
        ...

    def read(self, body: bytes, text: TextCodec) -> Result_co:
        """Reads a body. Raises BadRequestError."""
        ...


class WrittenAnswer(Struct, kw_only=True):
    """The answer to a request that takes no worker: its JSON is the only part."""

    parts: list[bytes] = []


class ReadCompletion(Struct, frozen=True, tag=True):
    """Of /v1/completions and /v1/chat/completions."""

    chat: bool

    @property
    def result(self) -> type[ReadBody]:
        return ReadBody

    def read(self, body: bytes, text: TextCodec) -> ReadBody:
        """Decodes, renders and tokenises."""
        return read_body(body, chat=self.chat, text=text)


class ReadText(Struct, frozen=True, tag=True):
    """Of /tokenize and /detokenize, whose answers it writes."""

    ids: bool  # whether ids are the answer, or the text
    served: dict[str, int | None]

    @property
    def result(self) -> type[WrittenAnswer]:
        return WrittenAnswer

    def read(self, body: bytes, text: TextCodec) -> WrittenAnswer:
        """Answers."""
        return WrittenAnswer(parts=[(tokenized if self.ids else detokenized)(body, text, self.served)])


class ReadRelayed(Struct, frozen=True, tag=True):
    """Of a request that is passed on to HTTP servers of `engine`."""

    engine: str
    block_tokens: int

    @property
    def result(self) -> type[RelayedBody]:
        from .servers.server_request import RelayedBody

        return RelayedBody

    def read(self, body: bytes, text: TextCodec) -> RelayedBody:  # noqa: ARG002 -- servers have their own
        """Finds its fields."""
        from .servers.dialects import DIALECTS
        from .servers.server_request import read_relayed

        dialect = DIALECTS[self.engine]
        return read_relayed(body, block_tokens=self.block_tokens, reserved=dialect.reserved, choices=dialect.choices)


class RefusedBody(Struct, frozen=True):
    """A BadRequestError, as it crosses."""

    param: str | None
    text: str
    code: str | None
    status: int

    @classmethod
    def of(cls, error: BadRequestError) -> RefusedBody:
        """The error as a struct."""
        return cls(error.param, error.text, error.code, error.status)

    def error(self) -> BadRequestError:
        """The struct as an error."""
        return BadRequestError(self.param, self.text, code=self.code, status=self.status)


AnyReading: TypeAlias = ReadCompletion | ReadText | ReadRelayed
READINGS = msgspec.msgpack.Decoder(AnyReading)
