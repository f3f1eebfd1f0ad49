"""Parts of the JSON objects that answer OpenAI's endpoints, and lists of models; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from .....wire import End, Logprobs
from ...front.text import TextCodec, token_name
from .router_effects import RoomEnded

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


def logprobs(text: TextCodec, tokens: Sequence[ScoredToken], *, chat: bool) -> dict[str, object]:
    """The logprobs of these tokens, as the endpoint has them. Written one by one: one call for all would hold the
    interpreter's lock for as long."""
    if chat:
        return {"content": [Raw(msgspec.json.encode(_scored(text, token))) for token in tokens], "refusal": None}
    return {
        "tokens": [token_name(text, token.id) for token in tokens],
        "token_logprobs": [token.logprobs.own for token in tokens],
        "top_logprobs": [Raw(msgspec.json.encode(_by_name(text, token))) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _by_name(text: TextCodec, token: ScoredToken) -> dict[str, float]:
    """The alternatives, and the token itself; of several with one text the likeliest."""
    named: dict[str, float] = {}
    for token_id, value in (*token.logprobs.top, (token.id, token.logprobs.own)):
        named.setdefault(token_name(text, token_id), value)
    return named


def _scored(text: TextCodec, token: ScoredToken) -> dict[str, object]:
    top = [_named(text, token_id, value) for token_id, value in token.logprobs.top]
    return {**_named(text, token.id, token.logprobs.own), "top_logprobs": top}


def _named(text: TextCodec, token: int, logprob: float) -> dict[str, object]:
    content = text.token_bytes(token)
    return {"token": token_name(text, token), "logprob": logprob, "bytes": list(content) if content else None}


def extension(room: RoomEnded) -> dict[str, object]:
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


def model(name: str, created: int, max_model_len: int | None) -> dict[str, object]:
    """Returns one entry of /v1/models, which is the answer to /v1/models/NAME; None where nobody knows the length."""
    return {
        "id": name, "object": "model", "created": created, "owned_by": "pdtransfer", "max_model_len": max_model_len,
    }  # fmt: skip
