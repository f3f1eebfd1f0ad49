"""OpenAI's /v1/completions: parses request bodies and builds answers; no I/O.

The tokeniser is the reference model's: a text's UTF-8 bytes are the ids 0 to 255, and other ids have no text.
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
from .router_rooms import CompletionRequest

PROMPT_TOKENS_MAX = PROMPT_BYTES_MAX // 4
MAX_TOKENS_DEFAULT = 16  # OpenAI's default
SALT_LENGTH_MAX = 4_096  # characters of a cache_salt, which is sent as a digest
SALT_BYTES = 32


class BadRequestError(LocalProtocolError):
    """The request is invalid. `param` is the field, None for the body as a whole; `code` is OpenAI's error code."""

    def __init__(self, param: str | None, text: str, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(f"{param}: {text}" if param else text)
        self.param, self.code, self.status = param, code, status


class StreamOptions(Struct):
    """Accepted for compatibility: the last chunk of a stream always carries `usage`."""

    include_usage: bool | None = None


class Body(Struct):
    """The supported fields of the body. Null means absent; unknown fields are ignored."""

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
    # Requests with different salts share no cached prefix, so response times reveal nothing about others' prompts.
    cache_salt: Annotated[str, Meta(min_length=1, max_length=SALT_LENGTH_MAX)] | None = None
    # Not supported: only the values in UNSUPPORTED are accepted.
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    suffix: str | None = None


UNSUPPORTED: dict[str, tuple[object, ...]] = {
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
    """A parsed body: the router's request, and the form of the answer."""

    request: CompletionRequest
    prompt_tokens: int
    stream: bool


_BODY = msgspec.json.Decoder(Body)
_PATH = re.compile(r"^(.*) - at `\$\.?([^`\[]*)[^`]*`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(\w+)`$")


def parse(body: bytes, *, seed: int, enable_hisparse: bool = False) -> Completion:
    """Parses a body; `seed` and `enable_hisparse` are defaults. Raises BadRequestError that names the field."""
    try:
        fields = _BODY.decode(body)
    except msgspec.ValidationError as error:
        raise _bad_request(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(None, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequestError(None, "the body is nested too deeply") from None
    for name, values in UNSUPPORTED.items():
        value: object = getattr(fields, name)
        if value not in values:
            raise BadRequestError(name, f"{str(value)[:64]!r} is not supported")
    return _completion(fields, seed, enable_hisparse=enable_hisparse)


def _completion(fields: Body, seed: int, *, enable_hisparse: bool) -> Completion:
    if isinstance(fields.prompt, str):
        prompt, unit = np.frombuffer(fields.prompt.encode(), np.uint8).astype("<u4").tobytes(), "bytes"
    else:
        prompt, unit = pack_ids(fields.prompt), "ids"
    count = len(prompt) // 4
    most = PROMPT_TOKENS_MAX
    if not 1 <= count <= most:
        raise BadRequestError("prompt", f"{count} {unit}, must be 1 to {most}")
    max_tokens = MAX_TOKENS_DEFAULT if fields.max_tokens is None else fields.max_tokens
    if count + max_tokens > TOKENS_MAX:
        raise BadRequestError("max_tokens", f"{max_tokens} after {count} of prompt, the total limit is {TOKENS_MAX}")
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        seed=(seed if fields.seed is None else fields.seed) & (1 << 64) - 1,
        ignore_eos=bool(fields.ignore_eos),
    )
    salt = b"" if fields.cache_salt is None else blake2b(fields.cache_salt.encode(), digest_size=SALT_BYTES).digest()
    request = CompletionRequest(
        prompt=prompt,
        sampling=sampling,
        model=fields.model or None,
        enable_hisparse=enable_hisparse if fields.enable_hisparse is None else fields.enable_hisparse,
        salt=salt,
    )
    return Completion(request, count, bool(fields.stream))


def _bad_request(text: str) -> BadRequestError:
    """Splits msgspec's message into field and text."""
    missing = _MISSING.match(text)
    if missing is not None:
        return BadRequestError(missing[1], "missing")
    found = _PATH.match(text)
    return BadRequestError(found[2] or None, found[1]) if found is not None else BadRequestError(None, text)


class Text:
    """Decodes ids to text incrementally: an incomplete character is held back."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: list[int], *, final: bool = False) -> str:
        """Returns the text that `ids` complete."""
        return self._decoder.decode(bytes(each for each in ids if each < 256), final)


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """Builds the JSON objects that answer one request. `created` is Unix time in seconds."""

    request: int
    model: str
    created: int
    prompt_tokens: int

    def piece(self, text: str) -> bytes:
        """Returns one chunk of a stream."""
        return msgspec.json.encode(self._object(text, None))

    def last(self, text: str, finish: Finish) -> bytes:
        """Returns the whole answer, or the last chunk of a stream, with `usage` and the `pdtransfer` extension."""
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
    """Returns this project's fields. `handoff_us` is from the last byte written to READY, null if either is unknown."""
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
    """Returns OpenAI's error object."""
    kinds = {404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": text, "type": kind, "param": param, "code": code}})


def models(names: list[str], created: int) -> bytes:
    """Returns the answer to /v1/models."""
    listed = [{"id": name, "object": "model", "created": created, "owned_by": "pdtransfer"} for name in names]
    return msgspec.json.encode({"object": "list", "data": listed})
