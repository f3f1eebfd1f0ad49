"""OpenAI's /v1/completions as bytes and objects: what a body may ask, and what is answered; no I/O.

The tokeniser is the reference model's: a text is its UTF-8 bytes as ids 0 to 255, and other ids stand for no text.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ..errors import LocalProtocolError
from ..limits import NAME_LENGTH_MAX, PROMPT_BYTES_MAX, TOKENS_MAX
from ..wire import Sampling, pack_ids
from .router_effects import Finish
from .router_rooms import Request

PROMPT_TOKENS_MAX = PROMPT_BYTES_MAX // 4
MAX_TOKENS_DEFAULT = 16  # OpenAI's
SALT_LENGTH_MAX = 4_096  # of a cache_salt, which travels as a digest
SALT_BYTES = 32


class BadRequestError(LocalProtocolError):
    """The body asks for what cannot be; `param` is the field, None where it is the body as a whole, `code` OpenAI's."""

    def __init__(self, param: str | None, text: str, *, code: str | None = None) -> None:
        super().__init__(f"{param}: {text}" if param else text)
        self.param, self.code = param, code


class StreamOptions(Struct):
    """Accepted for its clients' sake: the last chunk of a stream carries `usage` either way."""

    include_usage: bool | None = None


class Body(Struct):
    """The body's fields that mean something here; null is as good as absent, and others are ignored."""

    prompt: (
        Annotated[str, Meta(max_length=PROMPT_TOKENS_MAX)]
        | Annotated[list[Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]], Meta(max_length=PROMPT_TOKENS_MAX)]
    )
    model: Annotated[str, Meta(max_length=NAME_LENGTH_MAX)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    enable_hisparse: bool | None = None
    # Requests of different ones share no cached prefix, so that none can tell by its speed what another has asked.
    cache_salt: Annotated[str, Meta(min_length=1, max_length=SALT_LENGTH_MAX)] | None = None
    # What OpenAI has and this router has not: only the values that ask for nothing.
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    suffix: str | None = None


NOTHING_ASKED: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "stop": (None, "", []),
    "suffix": (None, ""),
}


@dataclass(frozen=True, slots=True)
class Completion:
    """What a body asks: the router's request, and how it is to be answered."""

    request: Request
    prompt_tokens: int
    stream: bool


_BODY = msgspec.json.Decoder(Body)
_PATH = re.compile(r"^(.*) - at `\$\.?([^`\[]*)[^`]*`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(\w+)`$")


def parse(body: bytes, *, seed: int, enable_hisparse: bool = False) -> Completion:
    """The completion that a body asks for; `seed` and `enable_hisparse` are used where it names none. BadRequestError
    names the field."""
    try:
        asked = _BODY.decode(body)
    except msgspec.ValidationError as error:
        raise _blame(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(None, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequestError(None, "the body is nested too deep") from None
    for name, values in NOTHING_ASKED.items():
        value: object = getattr(asked, name)
        if value not in values:
            raise BadRequestError(name, f"{str(value)[:64]!r} is not supported")
    return _completion(asked, seed, enable_hisparse=enable_hisparse)


def _completion(asked: Body, seed: int, *, enable_hisparse: bool) -> Completion:
    if isinstance(asked.prompt, str):
        prompt, unit = np.frombuffer(asked.prompt.encode(), np.uint8).astype("<u4").tobytes(), "bytes"
    else:
        prompt, unit = pack_ids(asked.prompt), "ids"
    count = len(prompt) // 4
    most = PROMPT_TOKENS_MAX
    if not 1 <= count <= most:
        raise BadRequestError("prompt", f"{count} {unit}, must be 1 to {most}")
    max_tokens = MAX_TOKENS_DEFAULT if asked.max_tokens is None else asked.max_tokens
    if count + max_tokens > TOKENS_MAX:
        raise BadRequestError("max_tokens", f"{max_tokens} after {count} of prompt, {TOKENS_MAX} in all is the limit")
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        seed=(seed if asked.seed is None else asked.seed) & (1 << 64) - 1,
        ignore_eos=bool(asked.ignore_eos),
    )
    salt = b"" if asked.cache_salt is None else blake2b(asked.cache_salt.encode(), digest_size=SALT_BYTES).digest()
    request = Request(
        prompt=prompt,
        sampling=sampling,
        model=asked.model or None,
        enable_hisparse=enable_hisparse if asked.enable_hisparse is None else asked.enable_hisparse,
        salt=salt,
    )
    return Completion(request, count, bool(asked.stream))


def _blame(text: str) -> BadRequestError:
    """msgspec's text, with the field that it names in front."""
    missing = _MISSING.match(text)
    if missing is not None:
        return BadRequestError(missing[1], "missing")
    found = _PATH.match(text)
    return BadRequestError(found[2] or None, found[1]) if found is not None else BadRequestError(None, text)


class Text:
    """Ids as text, piece by piece: half a character waits for its other half."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: list[int], *, final: bool = False) -> str:
        """The text that `ids` complete."""
        return self._decoder.decode(bytes(each for each in ids if each < 256), final)


@dataclass(frozen=True, slots=True)
class Answer:
    """Makes the objects that answer one request. `created` is Unix time in seconds."""

    request: int
    model: str
    created: int
    prompt_tokens: int

    def piece(self, text: str) -> bytes:
        """A chunk of a stream."""
        return msgspec.json.encode(self._object(text, None))

    def last(self, text: str, finish: Finish) -> bytes:
        """The whole answer, or the last chunk of a stream: usage, and what this project has to say."""
        tokens = finish.decode.tokens
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": finish.decode.prefix},
        }
        answer = self._object(text, "stop" if finish.decode.reason == "stop" else "length")
        return msgspec.json.encode({**answer, "usage": usage, "pdtransfer": extension(finish)})

    def _object(self, text: str, finish_reason: str | None) -> dict[str, object]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {
            "id": f"cmpl-{self.request:016x}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }


def extension(finish: Finish) -> dict[str, object]:
    """How the request fared. `handoff_us` is from the last byte written to READY, null where not both are known."""
    decode, prefill = finish.decode, finish.prefill
    stamped = prefill is not None and prefill.stamp_ns > 0 and decode.stamp_ns > 0
    return {
        "room": f"{finish.room:016x}",
        "kv_bytes": decode.kv_bytes,
        "copy_us": prefill.copy_us if prefill is not None else 0,
        "handoff_us": (decode.stamp_ns - prefill.stamp_ns) / 1e3 if stamped and prefill is not None else None,
        "tokens_digest": decode.tokens_digest.hex(),
        "logits_digest": decode.logits_digest.hex(),
        "kv_digest": decode.kv_digest.hex(),
        "prefill": finish.prefill_node,
        "decode": finish.decode_node,
        "enable_hisparse": finish.enable_hisparse,
    }


def error(status: int, text: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's error object."""
    kinds = {404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": text, "type": kind, "param": param, "code": code}})


def models(names: list[str], created: int) -> bytes:
    """The answer to /v1/models."""
    listed = [{"id": name, "object": "model", "created": created, "owned_by": "pdtransfer"} for name in names]
    return msgspec.json.encode({"object": "list", "data": listed})
