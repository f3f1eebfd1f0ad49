"""Logprobs of a prompt, which SGLang's prefill computes and decode's answer lacks. No I/O."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from msgspec import Raw, Struct

from .....errors import RemoteProtocolError
from .....schema import parse
from ...front.json_bodies import RefusedRequestError
from .server_request import COMPLETIONS, GENERATE, Fields

_OF_PROMPT = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")  # in meta_info of /generate


class _Generated(Struct):
    """One answer of /generate; of what else it has nothing changes."""

    meta_info: dict[str, Raw]


class _ScoredChoice(Struct):
    logprobs: dict[str, list[Raw]] | None = None


class _Completion(Struct):
    choices: list[_ScoredChoice]


_FLAG, _FLAGS = msgspec.json.Decoder(bool | None), msgspec.json.Decoder(bool | list[bool | None] | None)
_COUNT, _COUNTS = msgspec.json.Decoder(int | None), msgspec.json.Decoder(int | list[int | None] | None)
_ANSWERS = msgspec.json.Decoder(dict[str, Raw] | list[dict[str, Raw]])
_GENERATED: msgspec.json.Decoder[_Generated | list[_Generated]] = msgspec.json.Decoder(_Generated | list[_Generated])
_COMPLETION, _CHOICES = msgspec.json.Decoder(_Completion), msgspec.json.Decoder(list[dict[str, Raw]])


def asked(path: str, fields: Fields) -> bool:
    """Whether a request asks for them: completions by `echo` with `logprobs`, SGLang's own path by `return_logprob`
    from a place in the prompt on. Raises RefusedRequestError for a stream that does."""
    if path == GENERATE:
        starts = _list(_value(fields, "logprob_start_len", _COUNTS))
        from_prompt = any(start is not None and start >= 0 for start in starts)
        is_asked = from_prompt and any(_list(_value(fields, "return_logprob", _FLAGS)))
    else:
        is_asked = path == COMPLETIONS and _value(fields, "echo", _FLAG) and _value(fields, "logprobs", _COUNT)
    if not is_asked:
        return False
    if _value(fields, "stream", _FLAG):
        raise RefusedRequestError("stream", "must be false with a prompt's logprobs: they are prefill's")
    return True


def _value(fields: Fields, name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    """None for what a server will refuse."""
    try:
        return parse(fields[name], decoder) if name in fields else None
    except RemoteProtocolError:
        return None


def joined(prefill: bytes, decode: bytes) -> bytes:
    """Decode's whole answer with the prompt's logprobs of prefill's. Raises RemoteProtocolError for answers that are
    not of one request."""
    answer = parse(decode, _ANSWERS)
    if not isinstance(answer, list) and "choices" in answer:
        choices = parse(answer["choices"], _CHOICES)
        of_prefill, of_decode = (parse(text, _COMPLETION).choices for text in (prefill, decode))
        _check(len(of_prefill), len(of_decode))
        for choice, first, rest in zip(choices, of_prefill, of_decode, strict=True):
            choice["logprobs"] = Raw(msgspec.json.encode(_completed(first.logprobs, rest.logprobs)))
        answer["choices"] = Raw(msgspec.json.encode(choices))
        return msgspec.json.encode(answer)
    of_prefill, of_decode = (_list(parse(text, _GENERATED)) for text in (prefill, decode))
    answers: list[dict[str, Raw]] = _list(answer)
    _check(len(of_prefill), len(answers))
    for generated, first, rest in zip(answers, of_prefill, of_decode, strict=True):
        of_prompt = {name: first.meta_info[name] for name in _OF_PROMPT if name in first.meta_info}
        generated["meta_info"] = Raw(msgspec.json.encode(rest.meta_info | of_prompt))
    return msgspec.json.encode(answer)


def _completed(first: dict[str, list[Raw]] | None, rest: dict[str, list[Raw]] | None) -> dict[str, list[Raw]]:
    """The prompt's part of each list, without prefill's own token, and decode's."""
    if first is None or rest is None:
        raise RemoteProtocolError("logprobs", "missing")
    return {name: first.get(name, [])[:-1] + of_decode for name, of_decode in rest.items()}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _check(prefill: int, decode: int) -> None:
    if prefill != decode:
        raise RemoteProtocolError("answer", f"prefill has {prefill}, decode {decode}")
