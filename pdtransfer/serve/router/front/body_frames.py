"""How a body is read and what it becomes, and the frames in which both cross to another process and back. No I/O.

A reading is described by a small struct, so that it can be done in another process. What is large of its result is in
`parts`, which cross apart from the rest, so that they are never joined into one object.
"""

from __future__ import annotations

import struct
from typing import Protocol, TypeAlias, TypeVar

from msgspec import Struct

from .text import TextCodec

ASK = struct.Struct("<II")  # lengths of what to do, and of the body: both follow
ANSWER = struct.Struct("<BII")  # kind, length of what follows, and the number of parts behind it
PART = struct.Struct("<I")  # length of a part, which follows
READY, READ, REFUSED, FAILED = range(4)  # kinds of answers; READY comes once, before all others
Refusal: TypeAlias = tuple[str | None, str, str | None, int]  # param, text, code and status of a RefusedRequestError

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
        """Reads a body. Raises RefusedRequestError."""
        ...


class WrittenAnswer(Struct, kw_only=True):
    """The answer to a request that takes no worker: its JSON is the only part."""

    parts: list[bytes] = []
