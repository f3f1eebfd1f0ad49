"""JSON bodies of clients: decoded, with errors that name the field; and the error of what gets no answer. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from ....errors import Cause, PDTransferError

_NAMED_BYTES_MAX = 1 << 20  # of a body in which the field with half a character is looked for
_PATH = re.compile(r"^(.*) - at `\$\.?([^`]*?)(?:\[\.\.\.\][^`]*)?`$", re.DOTALL)  # a dict's keys are not in it
_MISSING = re.compile(r"^Object missing required field `(\w+)`")
Parsed = TypeVar("Parsed")

JSON = "application/json"
EVENT_END = b"\n\n"
STATUSES = {
    Cause.ABORTED: 499,
    Cause.DEADLINE: 504,
    Cause.PEER_LOST: 503,
    Cause.PEER_RESTARTED: 503,
    Cause.BREACH: 502,
    Cause.REFUSED: 400,
    Cause.FULL: 429,
    Cause.TRANSFER: 502,
    Cause.ENGINE: 500,
    Cause.SHUTDOWN: 503,
}  # of an answer that failed


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that is complete."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @classmethod
    def of_json(cls, body: bytes) -> WholeAnswer:
        """Of a request that was served."""
        return cls(200, {"Content-Type": JSON}, body)


class AnswerFailedError(PDTransferError):
    """A request gets no answer, or the rest of one does not come. `code` is OpenAI's error code. `retry_ms` is when to
    ask again, 0 for unknown; `answer` is what a server answered, which is passed on. `status` 0: the cause's."""

    param: str | None = None

    def __init__(
        self, text: str, cause: Cause | None, *, status: int = 0, retry_ms: int = 0, answer: WholeAnswer | None = None
    ) -> None:
        super().__init__(text)
        self.cause, self.retry_ms, self.answer = cause, retry_ms, answer
        self.code = None if cause is None else cause.value
        self.status = status or (400 if cause is None else STATUSES[cause])


class RefusedRequestError(AnswerFailedError):
    """The request is invalid, or beyond a limit. `param` is the field, None for the request as a whole."""

    def __init__(
        self, param: str | None, text: str, *, code: str | None = None, status: int = 400, retry_ms: int = 0
    ) -> None:
        super().__init__(f"{param}: {text}" if param else text, None, status=status, retry_ms=retry_ms)
        self.param, self.text, self.code = param, text, code


class Read(Struct, kw_only=True):
    """What was read of a body. Its large parts are in a list: as a whole answer, where it takes no worker."""

    parts: list[bytes] = []


def decoded(decoder: msgspec.json.Decoder[Parsed], body: bytes) -> Parsed:
    """Decodes a body. Raises RefusedRequestError that names the field."""
    try:
        body.decode()  # a Raw value's text stays unchecked
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _bad_request(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (halved := _with_half_a_character(body)) is not None:
            raise RefusedRequestError(halved, "half of a surrogate pair is not a character") from None
        raise RefusedRequestError(None, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise RefusedRequestError(None, "the body is nested too deeply") from None


def decoded_field(name: str, decoder: msgspec.json.Decoder[Parsed], value: Raw) -> Parsed:
    """Decodes one field of a body that was decoded. Raises RefusedRequestError that names it."""
    try:
        return decoder.decode(value)
    except msgspec.ValidationError as error:
        within = _bad_request(str(error))
        raise RefusedRequestError(joined_path(name, within.param or ""), within.text) from None
    except msgspec.DecodeError as error:
        raise RefusedRequestError(name, str(error)) from None
    except RecursionError:
        raise RefusedRequestError(name, "is nested too deeply") from None


def _with_half_a_character(body: bytes) -> str | None:
    """The field whose text has an unpaired surrogate: JSON allows its escape, and no text can have it. None for another
    fault, and for a large body, which Python's parser would make many objects of."""
    if b"\\u" not in body or len(body) > _NAMED_BYTES_MAX:
        return None
    try:
        content: object = json.loads(body)
        fields = cast("dict[str, object]", content if isinstance(content, dict) else {})
        for name, value in fields.items():
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                return name.encode(errors="replace").decode()
    except (ValueError, RecursionError):
        pass
    return None


def _bad_request(text: str) -> RefusedRequestError:
    """Splits msgspec's message into field and text."""
    match = _PATH.match(text)
    text, path = (match[1], match[2]) if match is not None else (text, "")
    if (missing := _MISSING.match(text)) is not None:
        return RefusedRequestError(joined_path(path, missing[1]), "missing")
    return RefusedRequestError(path or None, text)


def joined_path(field: str, within: str) -> str:
    """The name of a field within another one: messages[2].content."""
    return f"{field}.{within}" if field and within and not within.startswith("[") else field + within
