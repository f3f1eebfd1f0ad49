"""The first token of a stream, as prefill has answered it, and decode's stream behind it. No I/O.

vLLM's decode computes the last token of a prompt again and picks the first token itself. With temperature 0 it picks
the same one, unless two tokens are so close that rounding decides between them: then decode's is waited for.

In which field of a chat the token's text stands is up to the server's parsers: reasoning or content. Both servers may
have been started with different ones, so the first chat of each kind is only compared: see `kind_of` and `agrees`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from .....errors import RemoteProtocolError
from .....schema import parse
from ...front.json_bodies import EVENT_END
from .server_request import CHAT, OBJECT, OBJECTS, ServerRequest

# By how much the first token's logprob has to be above the next one's. In bfloat16 the same logit is computed on the
# two sides with differences of some hundredths to tenths.
MARGIN_MIN = 1.0
EARLY_WRONG_MAX = 3  # answers that went on in another way: after this many, no first token is shown early any more
EARLY_KINDS_MAX = 256  # of chats that a decode server was asked for and that were compared: more are not shown early
TEXTS = ("text", "content", "reasoning", "reasoning_content")  # of an event, the first of completions

# Fields with which the first token and its text depend on nothing but the prompt. Others may bend what is picked
# (penalties, guided decoding), hold text back (stop strings, tools), or have each event say more (logprobs).
_FIELDS = frozenset({
    "model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature",
    "top_p", "top_k", "min_p", "seed", "n", "presence_penalty", "frequency_penalty", "ignore_eos", "user", "cache_salt",
    "add_special_tokens", "add_generation_prompt", "chat_template_kwargs", "reasoning_effort", "priority",
})  # fmt: skip
# Those of them that a chat's template is given, beside the messages.
_OF_TEMPLATES = ("model", "add_generation_prompt", "chat_template_kwargs", "reasoning_effort")
_UNSET = (b"null", b"false", b"[]")
_NO_PENALTY = {"repetition_penalty": (b"1", b"1.0")}  # as vLLM's benchmark sends it


class _StreamOptions(Struct, frozen=True):
    continuous_usage_stats: bool | None = False


class _Asked(Struct, frozen=True):
    """Request fields that decide whether a stream may begin with prefill's token."""

    stream: bool | None = False
    temperature: float | None = None
    stream_options: _StreamOptions | None = None


class _Scored(Struct, frozen=True):
    logprob: float


class _ScoredToken(Struct, frozen=True):
    logprob: float
    top_logprobs: list[_Scored]


class _Logprobs(Struct, frozen=True):
    """Of one choice: `content` of a chat, the others of completions."""

    content: list[_ScoredToken] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(Struct, frozen=True):
    delta: dict[str, Raw] | None = None  # of a chat
    text: str | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _TokenEvent(Struct, frozen=True):
    choices: Annotated[list[_Choice], Meta(max_length=1)] = []
    usage: Raw | None = None
    error: Raw | None = None


_ASKED, _EVENT = msgspec.json.Decoder(_Asked), msgspec.json.Decoder(_TokenEvent)
_TEXT = msgspec.json.Decoder(str)


def may_come_early(request: ServerRequest) -> bool:
    """True if prefill's first token is the one that decode picks, and may be seen before."""
    fields = request.fields
    counts = (name for name in fields if bytes(fields[name]) not in (*_UNSET, *_NO_PENALTY.get(name, ())))
    if request.answers != 1 or any(name not in _FIELDS for name in counts):
        return False
    decisive = {name: fields[name] for name in _Asked.__struct_fields__ if name in fields}
    try:
        asked = parse(msgspec.json.encode(decisive), _ASKED)
    except RemoteProtocolError:
        return False  # the server refuses it
    options = asked.stream_options
    return bool(asked.stream) and asked.temperature == 0 and not (options and options.continuous_usage_stats)


def scored(request: ServerRequest) -> dict[str, object]:
    """What asks a server for the logprobs of the two likeliest tokens."""
    return {"logprobs": True, "top_logprobs": 2} if request.path == CHAT else {"logprobs": 2}


def kind_of(request: ServerRequest) -> bytes | None:
    """Names chats whose templates, and so whose parsers, begin alike; None for what no parser reads."""
    if request.path != CHAT:
        return None
    fields = request.fields
    values = (bytes(fields.get(name, b"")) for name in _OF_TEMPLATES)
    return hashlib.blake2b(b"\0".join(values), digest_size=16).digest()


class EarlyToken:
    """What a client was shown of prefill's answer. `behind` passes on what decode's stream has beside it."""

    def __init__(self, events: bytes, shown: Mapping[str, str]) -> None:
        self.events = events
        self._owed = dict(shown)  # texts by field, as far as decode has not sent them yet

    @classmethod
    def of(cls, stream: bytes) -> EarlyToken | None:
        """Reads prefill's stream of one token; None where it may not be shown."""
        events, shown, margin = bytearray(), dict[str, str](), 0.0
        try:
            for event in stream.split(EVENT_END):
                body = event.removeprefix(b"data: ")
                if not body or body == b"[DONE]":
                    continue
                read = parse(body, _EVENT)
                if read.error is not None:
                    return None
                for choice in read.choices:
                    if choice.finish_reason not in (None, "length"):
                        return None  # the answer ends with this token
                    for name, text in _texts(choice).items():
                        shown[name] = shown.get(name, "") + text
                    margin = max(margin, _margin(choice.logprobs))
                    events += _event(body, {}, {"finish_reason": None, "logprobs": None})
        except RemoteProtocolError:
            return None
        text = "".join(shown.get(name, "") for name in TEXTS)
        # What is no word may be held back: the begin of a mark that the server cuts out, or of a character.
        plain = any(character.isalnum() for character in text) and "\ufffd" not in text
        return cls(bytes(events), shown) if plain and margin >= MARGIN_MIN else None

    @property
    def repeated(self) -> bool:
        """True if decode has sent all of it again."""
        return not any(self._owed.values())

    def behind(self, event: bytes) -> bytes:
        """Returns what is new in an event of decode, empty for nothing. Raises RemoteProtocolError where decode goes on
        in another way than the client was shown."""
        body = event.removeprefix(b"data: ").rstrip()
        if body == b"[DONE]":
            raise RemoteProtocolError("stream", "ends before the first token")
        read = parse(body, _EVENT)
        if read.error is not None:
            self._owed.clear()
        if not read.choices:
            return event
        (choice,) = read.choices
        rest = {name: self._rest(name, text) for name, text in _texts(choice).items()}
        if not self.repeated and (any(rest.values()) or choice.finish_reason is not None):
            raise RemoteProtocolError("stream", "goes on without the first token")
        if not any(rest.values()) and choice.finish_reason is None:
            return b""
        return _event(body, rest, {})

    def agrees(self, stream: bytes) -> bool:
        """True if decode's stream begins with what prefill has answered, which nobody was shown."""
        try:
            for event in stream.split(EVENT_END)[:-1]:
                if self.repeated:
                    break
                self.behind(event)
        except RemoteProtocolError:
            return False
        return self.repeated

    def _rest(self, name: str, text: str) -> str:
        """What of a text the client was not shown."""
        owed = self._owed.get(name, "")
        if not text.startswith(owed) and not owed.startswith(text):
            raise RemoteProtocolError(name, f"begins with {text[:64]!r}, prefill's with {owed[:64]!r}")
        self._owed[name] = owed[len(text) :]
        return text[len(owed) :]


def _texts(choice: _Choice) -> dict[str, str]:
    """The texts of an event by field, with the role. Raises RemoteProtocolError where a chat's event has more."""
    if choice.delta is None:
        return {"text": choice.text or ""}
    values = {name: value for name, value in choice.delta.items() if bytes(value) not in _UNSET}
    return {name: parse(bytes(value), _TEXT) for name, value in values.items()}


def _margin(logprobs: _Logprobs | None) -> float:
    """By how much the first token is likelier than any other; 0 where it is not the likeliest, or that is not said."""
    match logprobs:
        case _Logprobs(content=[_ScoredToken(logprob, top)]):
            values = [token.logprob for token in top]
        case _Logprobs(token_logprobs=[float(logprob)], top_logprobs=[dict(named)]):
            values = list(named.values())
        case _:
            return 0.0
    values = sorted(values, reverse=True)
    return logprob - values[1] if len(values) > 1 and logprob == values[0] else 0.0


def _event(body: bytes, texts: Mapping[str, str], fields: Mapping[str, object]) -> bytes:
    """Writes an event of one choice anew, with these texts and fields in place of its own."""
    event = parse(body, OBJECT)
    choice: dict[str, object] = dict(*parse(bytes(event["choices"]), OBJECTS))
    given = {name: text for name, text in texts.items() if text or name in TEXTS}
    if isinstance(delta := choice.get("delta"), Raw):
        kept = {name: value for name, value in parse(bytes(delta), OBJECT).items() if name not in texts}
        choice["delta"] = kept | given
    else:
        choice |= given
    choice |= {name: value for name, value in fields.items() if name in choice}
    return b"data: " + msgspec.json.encode(event | {"choices": [choice]}) + EVENT_END
