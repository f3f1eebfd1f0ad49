"""The JSON objects that answer OpenAI's endpoints, whole and in chunks; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from .....wire import End, Logprobs
from ...front.text import TextCodec, token_name
from .completions import Completion
from .router_effects import RoomReport

LOGPROBS_INLINE_MAX = 256  # tokens whose logprobs are written as JSON on the loop: some milliseconds


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token with its logprobs; its text begins at character `offset` of the generated text."""

    id: int
    offset: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What a choice gains: text, and the tokens that have logprobs."""

    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()

    def __add__(self, more: TextPiece) -> TextPiece:
        return TextPiece(self.text + more.text, self.tokens + more.tokens)

    @staticmethod
    def joined(pieces: Sequence[TextPiece]) -> TextPiece:
        """All pieces in one."""
        return TextPiece("".join(piece.text for piece in pieces), tuple(t for piece in pieces for t in piece.tokens))


@dataclass(frozen=True, slots=True)
class EndedChoice:
    """A choice that is complete."""

    finish_reason: str
    tokens: int
    room: RoomReport


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What all objects of one answer have in common. `created` is Unix time in seconds."""

    completion: Completion
    request: int
    created: int
    text: TextCodec

    def chunk(self, index: int, piece: TextPiece, *, first: bool, ended: EndedChoice | None = None) -> bytes:
        """One chunk of a stream; the last of a choice has its finish reason and the `pdtransfer` extension."""
        choice = {
            "index": index,
            **({"delta": _delta(piece.text, first=first)} if self.completion.chat else {"text": piece.text}),
            "logprobs": self._logprobs(piece.tokens),
            "finish_reason": None if ended is None else ended.finish_reason,
        }
        more: dict[str, object] = {"usage": None} if self.completion.include_usage else {}
        if ended is not None:
            more["pdtransfer"] = extension(ended.room)
        return self._object([choice], chunk=True, more=more)

    def usage_chunk(self, ended: Sequence[EndedChoice]) -> bytes:
        """The usage alone, which ends a stream where it was asked for."""
        return self._object([], chunk=True, more={"usage": self._usage(ended)})

    def _usage(self, ended: Sequence[EndedChoice]) -> dict[str, object]:
        """OpenAI's usage. Cached tokens are those of the first choice of each prompt, and missing where a stop string
        ended one of these, since decode reports them at its own end, or where one was resumed."""
        prompt_tokens, completion_tokens = self.completion.prompt_tokens, sum(choice.tokens for choice in ended)
        ends = [None if choice.room.resumptions else choice.room.decode for choice in ended[:: self.completion.n]]
        prefixes = [room.prefix for room in ends if room is not None]
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(prefixes)} if len(prefixes) == len(ends) else None,
        }

    def whole(self, texts: Sequence[TextPiece], ended: Sequence[EndedChoice]) -> bytes:
        """The answer in one object. `pdtransfer` is one extension, or a list where there are several choices."""
        choices = [
            {
                "index": index,
                **({"message": _message(text.text)} if self.completion.chat else {"text": text.text}),
                "logprobs": self._logprobs(text.tokens),
                "finish_reason": choice.finish_reason,
            }
            for index, (text, choice) in enumerate(zip(texts, ended, strict=True))
        ]
        extensions = [extension(choice.room) for choice in ended]
        more = {"usage": self._usage(ended), "pdtransfer": extensions if len(extensions) > 1 else extensions[0]}
        return self._object(choices, chunk=False, more=more)

    def _object(self, choices: Sequence[object], *, chunk: bool, more: Mapping[str, object]) -> bytes:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.completion.chat else "text_completion"
        return msgspec.json.encode(
            {
                "id": f"{'chatcmpl' if self.completion.chat else 'cmpl'}-{self.request:016x}",
                "object": kind,
                "created": self.created,
                "model": self.completion.model or "",
                "choices": choices,
                **more,
            }
        )

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, object] | None:
        if not self.completion.rooms[0].sampling.logprobs:
            return None
        if self.completion.chat:
            # Written one by one: one call for all would hold the interpreter's lock for as long.
            content = [msgspec.Raw(msgspec.json.encode(self._scored(token))) for token in tokens]
            return {"content": content, "refusal": None}
        return {
            "tokens": [token_name(self.text, token.id) for token in tokens],
            "token_logprobs": [token.logprobs.own for token in tokens],
            "top_logprobs": [msgspec.Raw(msgspec.json.encode(self._by_name(token))) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _by_name(self, token: ScoredToken) -> dict[str, float]:
        """The alternatives, and the token itself; of several with one text the likeliest."""
        named: dict[str, float] = {}
        for token_id, value in (*token.logprobs.top, (token.id, token.logprobs.own)):
            named.setdefault(token_name(self.text, token_id), value)
        return named

    def _scored(self, token: ScoredToken) -> dict[str, object]:
        top = [self._named(token_id, value) for token_id, value in token.logprobs.top]
        return {**self._named(token.id, token.logprobs.own), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, object]:
        content = self.text.token_bytes(token)
        return {"token": token_name(self.text, token), "logprob": logprob, "bytes": list(content) if content else None}


def _delta(text: str, *, first: bool) -> dict[str, object]:
    return {**({"role": "assistant"} if first else {}), "content": text}


def _message(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text, "refusal": None}


def extension(room: RoomReport) -> dict[str, object]:
    """Returns this project's fields. `handoff_us` is from the last byte written to READY, null where the two are not
    read from one clock. What decode reports at its end is null where a stop string ended the choice. Of a resumed
    choice it is the last room's, and null where it covers that room's tokens alone."""
    decode, prefill = room.decode, room.prefill
    whole = decode if not room.resumptions else None
    return {
        "room": f"{room.id:016x}",
        "kv_bytes": decode.kv_bytes if decode is not None else None,
        "copy_us": prefill.copy_us if prefill is not None else 0,
        "handoff_us": _handoff_us(prefill, decode),
        "tokens_digest": whole.tokens_digest.hex() if whole is not None else None,
        "logits_digest": whole.logits_digest.hex() if whole is not None else None,
        "kv_digest": decode.kv_digest.hex() if decode is not None else None,
        "prefill": room.prefill_node,
        "decode": room.decode_node,
        "enable_hisparse": room.enable_hisparse,
        "resumptions": room.resumptions,
    }


def _handoff_us(prefill: End | None, decode: End | None) -> float | None:
    """From the last byte written to READY. The difference of two hosts' clocks, or of two time namespaces', is no
    time: None, as it is where either is not known."""
    if prefill is None or decode is None or not prefill.clock or prefill.clock != decode.clock:
        return None
    if not prefill.stamp_ns or decode.stamp_ns < prefill.stamp_ns:
        return None
    return (decode.stamp_ns - prefill.stamp_ns) / 1e3


def _model(name: str, created: int, max_model_len: int | None) -> dict[str, object]:
    """Returns one entry of /v1/models; None where nobody knows the length."""
    return {
        "id": name, "object": "model", "created": created, "owned_by": "pdtransfer", "max_model_len": max_model_len,
    }  # fmt: skip


def models(served: Mapping[str, int | None], created: int) -> bytes:
    """Returns the answer to /v1/models, of each model with its length."""
    listed = [_model(name, created, longest) for name, longest in served.items()]
    return msgspec.json.encode({"object": "list", "data": listed})


def one_model(name: str, created: int, max_model_len: int | None) -> bytes:
    """Returns the answer to /v1/models/NAME."""
    return msgspec.json.encode(_model(name, created, max_model_len))
