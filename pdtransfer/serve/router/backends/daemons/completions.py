"""OpenAI's /v1/completions and /v1/chat/completions: parses bodies into the rooms that answer them; no I/O.

`read_body` does all work whose cost grows with the body, and its result is compact, so that another process can do it.
`completion_of` does the rest. What would constrain an answer and is not supported is refused, never ignored. Other
unknown fields are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct
from numpy.typing import NDArray

from .....limits import (
    CHOICES_MAX,
    ECHO_BYTES_MAX,
    LOGIT_BIASES_MAX,
    MESSAGES_MAX,
    NAME_LENGTH_MAX,
    PROMPT_BYTES_MAX,
    STOP_LENGTH_MAX,
    STOPS_MAX,
    TOKENS_MAX,
    TOP_LOGPROBS_MAX,
)
from .....wire import Sampling, pack_biases, pack_ids
from ...front.json_bodies import Read, RefusedRequestError, decoded, decoded_field
from ...front.text import TextCodec
from .router_rooms import CompletionRequest

PROMPT_TOKENS_MAX = PROMPT_BYTES_MAX // 4
MAX_TOKENS_DEFAULT = 16  # OpenAI's default of completions
CHAT_TOKENS_DEFAULT = 1_024  # of a chat, where the context has as many left: slots are leased for all of them at once
SALT_LENGTH_MAX = 4_096  # characters of a cache_salt, which is sent as a digest
SALT_BYTES = 32
_NEUTRAL_BYTES_MAX = 256  # a longer value of an unsupported field is none that changes nothing


class StreamOptions(Struct):
    """`include_usage`: the usage follows alone, in a last chunk without choices."""

    include_usage: bool | None = None


TokenId = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
Prompt = Annotated[str, Meta(min_length=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Stop = Annotated[str, Meta(max_length=STOP_LENGTH_MAX)]
MaxTokens = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]


class GenerationBody(Struct):
    """What bodies of both endpoints have. Null means absent."""

    model: Annotated[str, Meta(max_length=NAME_LENGTH_MAX)] | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=0xFFFF_FFFF)] | None = None  # 0 and -1 are all
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=LOGIT_BIASES_MAX)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=STOPS_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    enable_hisparse: bool | None = None
    enable_resume: bool | None = None
    # Requests with different salts share no cached prefix, so response times reveal nothing about others' prompts.
    cache_salt: Annotated[str, Meta(min_length=1, max_length=SALT_LENGTH_MAX)] | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """A text, or token ids, or a list of either: `prompt` is decoded by its shape."""

    prompt: Raw
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None


class ReadBody(Read, kw_only=True):
    """What a body asks for. `parts` are the packed ids of each prompt."""

    chat: bool
    fields: GenerationBody
    max_tokens: tuple[str, int | None]  # the field that bounds an answer's tokens, and its value
    logprobs: bool
    top_logprobs: int
    echoes: tuple[str, ...]  # with `echo` the text of each prompt


class TextPart(Struct, tag_field="type", tag="text"):
    """A part of a message; of other kinds only refusals are supported."""

    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    """A part of an assistant's message, which is a text as well."""

    text: str = msgspec.field(name="refusal")


class FunctionCall(Struct):
    """A function that the assistant has called."""

    name: str
    arguments: str

    def for_template(self) -> dict[str, object]:
        """As templates read a call: the arguments as an object, where their text is one."""
        try:
            arguments = msgspec.json.decode(self.arguments)
        except (msgspec.DecodeError, RecursionError):  # as a model wrote it
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(Struct):
    """A call with the id that a tool's message answers to."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Struct):
    """One message. What it has beside these fields is not shown to the model."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart | RefusalPart], Meta(max_length=MESSAGES_MAX)] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MESSAGES_MAX)] | None = None
    function_call: FunctionCall | None = None
    audio: Raw = Raw(b"null")

    def for_template(self, field: str) -> dict[str, object]:
        """As templates read it; the older `function` is a tool. Raises RefusedRequestError; `field` is its name."""
        if not _is_neutral(self.audio, _EMPTY):
            raise RefusedRequestError(f"{field}.audio", "is not supported")
        tools = self.tool_calls or ()
        calls = [{"id": call.id, "type": "function", "function": call.function.for_template()} for call in tools]
        if self.function_call is not None:
            calls.append({"type": "function", "function": self.function_call.for_template()})
        if self.content is None and not (calls or self.refusal or self.role == "function"):
            raise RefusedRequestError(f"{field}.content", "missing: a text, or a list of parts of type text")
        parts = self.content if isinstance(self.content, list) else ()
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        role = "tool" if self.role == "function" else self.role
        message: dict[str, object] = {"role": role, "content": text or self.refusal or ""}
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls or None}
        return message | {name: value for name, value in more.items() if value is not None}


class ChatBody(GenerationBody, kw_only=True):
    """A chat."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    add_generation_prompt: bool | None = None


_OFF: tuple[object, ...] = (None, False)
_EMPTY: tuple[object, ...] = (None, "", [], {})
# Fields that would change an answer, with the values that do not.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "suffix": _EMPTY,
    "response_format": (None, {"type": "text"}),
    "tools": _EMPTY,
    "tool_choice": (None, "none", "auto"),
    "functions": _EMPTY,
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    **dict.fromkeys(("guided_json", "json_schema"), (None, "")),  # {} is the schema of any JSON
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), _EMPTY),
    **dict.fromkeys(("regex", "ebnf", "stop_token_ids", "bad_words", "allowed_token_ids"), _EMPTY),
    **dict.fromkeys(("prompt_embeds", "prompt_logprobs", "truncate_prompt_tokens", "logits_processors"), _EMPTY),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "documents"), _EMPTY),
    **dict.fromkeys(("use_beam_search", "continue_final_message"), _OFF),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (None, True)),
    "length_penalty": (None, 1),
    "lora_path": _EMPTY,
}
_OF_COMPLETIONS = {"echo": _OFF, "best_of": (None, 1)}  # likewise, in a chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A parsed body. Choice i is answered by `rooms[i]`; each prompt has `n` of them, one after the other."""

    chat: bool
    rooms: tuple[CompletionRequest, ...]
    n: int
    stops: tuple[str, ...]
    keep_stop: bool
    echoes: tuple[str, ...]  # one for each prompt, empty without `echo`
    stream: bool
    include_usage: bool

    @property
    def model(self) -> str | None:
        return self.rooms[0].model

    @property
    def answers(self) -> int:
        """One for each room."""
        return len(self.rooms)

    @property
    def kept_bytes(self) -> int:
        """Of all rooms: each has its prompt in messages of its own, and with `echo` in the answer. An answer that may
        go on in another room becomes a part of that one's prompt."""
        return sum(room.kept_bytes for room in self.rooms) + self.n * sum(len(echo) for echo in self.echoes)

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt once, as OpenAI counts them."""
        return sum(len(room.prompt) for room in self.rooms[:: self.n]) // 4


_COMPLETION, _CHAT = msgspec.json.Decoder(CompletionBody), msgspec.json.Decoder(ChatBody)
_TEXT_OR_IDS = msgspec.json.Decoder(Prompt | Annotated[list[TokenId], Meta(max_length=PROMPT_TOKENS_MAX)])
_TEXTS, _IDS = msgspec.json.Decoder(list[Prompt]), msgspec.json.Decoder(list[list[TokenId]])
_LIST_OF = re.compile(rb"\[[ \t\n\r]*([\[\"])")  # a list of lists, or of texts
_ID = re.compile(r"0|[1-9][0-9]{0,9}")


Served: TypeAlias = Mapping[str, int | None]
"""The tokens of a prompt and its answer at most, of each model that is served; None where nobody knows."""


def _unsupported(names: Mapping[str, tuple[object, ...]]) -> msgspec.json.Decoder[Struct]:
    """Decodes these fields, to their JSON text, and makes nothing of all others."""
    null = Raw(b"null")
    return msgspec.json.Decoder(msgspec.defstruct("UnsupportedFields", [(name, Raw, null) for name in names]))


_UNSUPPORTED_BY_CHAT = {
    chat: (names, _unsupported(names)) for chat, names in ((False, UNSUPPORTED), (True, UNSUPPORTED | _OF_COMPLETIONS))
}


def read_body(body: bytes, *, chat: bool, text: TextCodec) -> ReadBody:
    """Decodes and tokenises a body. Raises RefusedRequestError that names the field."""
    names, decoder = _UNSUPPORTED_BY_CHAT[chat]
    values = decoded(decoder, body)
    for name, neutral in names.items():
        if not _is_neutral(getattr(values, name), neutral):
            raise RefusedRequestError(name, "is not supported")
    echoes: list[str] = []
    if chat:
        fields = decoded(_CHAT, body)
        if fields.top_logprobs and not fields.logprobs:
            raise RefusedRequestError("top_logprobs", "only together with logprobs")
        ids = chat_ids(text, fields.messages, reply=fields.add_generation_prompt, special=fields.add_special_tokens)
        prompts, longest = [_packed("messages", ids, text)], ("max_completion_tokens", fields.max_completion_tokens)
        logprobs, top_logprobs = bool(fields.logprobs), fields.top_logprobs
    else:
        fields, longest = decoded(_COMPLETION, body), ("", None)
        _check_completion(fields)
        prompts, echoes = _prompts(fields, text)
        logprobs, top_logprobs = fields.logprobs is not None, fields.logprobs
    return ReadBody(
        chat=chat,
        fields=GenerationBody(**{name: getattr(fields, name) for name in GenerationBody.__struct_fields__}),
        max_tokens=("max_tokens", fields.max_tokens) if longest[1] is None else longest,
        logprobs=logprobs,
        top_logprobs=top_logprobs or 0,
        parts=prompts,
        echoes=tuple(echoes),
    )


def _is_neutral(value: Raw, neutral: tuple[object, ...]) -> bool:
    if memoryview(value).nbytes > _NEUTRAL_BYTES_MAX:
        return False
    try:
        content: object = msgspec.json.decode(value)
    except msgspec.DecodeError:  # a number beyond all numbers
        return False
    # False is 0 and True is 1 for Python.
    return any(type(content) is type(value) and content == value for value in neutral) or (
        type(content) is float and content in [value for value in neutral if type(value) is int]
    )


def _check_completion(fields: CompletionBody) -> None:
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise RefusedRequestError("best_of", f"{fields.best_of} is not supported: it must equal n")
    if fields.echo and fields.logprobs is not None:
        raise RefusedRequestError("echo", "is not supported together with logprobs: prompts have none")


def chat_ids(
    text: TextCodec, messages: Sequence[ChatMessage], *, reply: bool | None, special: bool | None
) -> NDArray[np.int64]:
    """The ids of a chat; templates write their own special tokens. Raises RefusedRequestError."""
    plain = [message.for_template(f"messages[{index}]") for index, message in enumerate(messages)]
    try:
        return text.encode(text.render(plain, reply=reply is not False), special=bool(special))
    except ValueError as error:
        raise RefusedRequestError("messages", str(error)) from None


def _prompts(fields: CompletionBody, text: TextCodec) -> tuple[list[bytes], list[str]]:
    """The packed ids of each prompt, and the texts for `echo`."""
    items: Sequence[str | list[int]]
    prompt, special = fields.prompt, fields.add_special_tokens is not False
    content = memoryview(prompt)
    shape = _LIST_OF.match(content)
    # Counted before anything is made of them: each bracket of ids is a list, and each comma ends one id at least.
    if shape is None:
        if bytes(content[:1]) == b"[" and (count := 1 + bytes(content).count(b",")) > PROMPT_TOKENS_MAX:
            raise RefusedRequestError("prompt", f"{count} tokens, must be 1 to {PROMPT_TOKENS_MAX}")
        items = [decoded_field("prompt", _TEXT_OR_IDS, prompt)]
    elif shape[1] == b"[":
        if (count := bytes(content).count(b"[") - 1) > CHOICES_MAX:
            raise RefusedRequestError("prompt", f"{count} prompts, at most {CHOICES_MAX}")
        items = decoded_field("prompt", _IDS, prompt)
    else:
        items = decoded_field("prompt", _TEXTS, prompt)
        if len(items) > CHOICES_MAX:
            raise RefusedRequestError("prompt", f"{len(items)} prompts, at most {CHOICES_MAX}")
    names = ["prompt"] if shape is None else [f"prompt[{index}]" for index in range(len(items))]
    every_ids = (text.encode(item, special=special) if isinstance(item, str) else item for item in items)
    packed = [_packed(name, ids, text) for name, ids in zip(names, every_ids, strict=True)]
    if not fields.echo:
        return packed, []
    echoes = [item if isinstance(item, str) else text.decode(item) for item in items]
    if (count := (fields.n or 1) * sum(len(echo.encode()) for echo in echoes)) > ECHO_BYTES_MAX:
        raise RefusedRequestError("echo", f"{count} bytes of prompts in the answer, at most {ECHO_BYTES_MAX}")
    return packed, echoes


def _packed(name: str, ids: NDArray[np.int64] | list[int], text: TextCodec) -> bytes:
    if not 1 <= len(ids) <= PROMPT_TOKENS_MAX:
        raise RefusedRequestError(name, f"{len(ids)} tokens, must be 1 to {PROMPT_TOKENS_MAX}")
    array = np.asarray(ids, np.int64)
    if text.vocabulary is not None and int(array.max()) >= text.vocabulary:
        raise RefusedRequestError(
            name, f"id {int(array.max())} must be below {text.vocabulary}, the size of the vocabulary"
        )
    return pack_ids(array)


def completion_of(
    read: ReadBody,
    *,
    seed: int,
    text: TextCodec,
    served: Served,
    enable_hisparse: bool = False,
    enable_resume: bool = False,
    early: bool = False,
    request_id: str = "",
    traceparent: str = "",
) -> Completion:
    """The rooms of what was read. `seed`, `enable_hisparse` and `enable_resume` hold where the body has none; `early`
    is for streams. Raises RefusedRequestError that names the field."""
    fields, chat = read.fields, read.chat
    model = _model(fields.model or None, served)
    n, stream = fields.n or 1, bool(fields.stream)
    if (count := len(read.parts)) * n > CHOICES_MAX:
        raise RefusedRequestError("n", f"{n} choices of {count} prompts, at most {CHOICES_MAX} in one request")
    if fields.stream_options is not None and not stream:
        raise RefusedRequestError("stream_options", "only together with stream")
    seed = seed if fields.seed is None else fields.seed
    salt = b"" if fields.cache_salt is None else blake2b(fields.cache_salt.encode(), digest_size=SALT_BYTES).digest()
    biases = _biases(fields.logit_bias or {}, text)
    context = _context(model, text, served) or TOKENS_MAX
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    rooms = [
        CompletionRequest(
            prompt=prompt,
            sampling=_sampling(read, _answer_tokens(prompt, read.max_tokens, context, chat=chat), seed + index, biases),
            model=model,
            enable_hisparse=enable_hisparse if fields.enable_hisparse is None else fields.enable_hisparse,
            enable_resume=enable_resume if fields.enable_resume is None else fields.enable_resume,
            early=early and stream,
            salt=salt,
            request_id=request_id,
            traceparent=traceparent,
        )
        for prompt in read.parts
        for index in range(n)
    ]
    return Completion(
        chat=chat,
        rooms=tuple(rooms),
        n=n,
        stops=tuple(stop for stop in stops if stop),
        keep_stop=bool(fields.include_stop_str_in_output),
        echoes=read.echoes,
        stream=stream,
        include_usage=fields.stream_options is not None and bool(fields.stream_options.include_usage),
    )


def _model(model: str | None, served: Served) -> str | None:
    """The model of a request. Raises RefusedRequestError for one that is not served, or for none among several."""
    if not served or model in served:
        return model
    if model is not None:
        text = f"{model!r} is not served: {', '.join(served)}"
        raise RefusedRequestError("model", text, code="model_not_found", status=404)
    if len(served) > 1:
        raise RefusedRequestError("model", f"missing, one of: {', '.join(served)}")
    return next(iter(served))


def _context(model: str | None, text: TextCodec, served: Served) -> int | None:
    """Tokens of a prompt and its answer at most, for the model that a body names, or else the only one."""
    return served.get(model or next(iter(served), ""), text.max_model_len)


def _answer_tokens(prompt: bytes, longest: tuple[str, int | None], context: int, *, chat: bool) -> int:
    """The most tokens of an answer. Raises RefusedRequestError where they do not fit behind the prompt."""
    field, max_tokens = longest
    count = len(prompt) // 4
    left = context - count
    if left < 1:
        name = "messages" if chat else "prompt"
        text_of = f"{count} tokens leave no room for an answer: the context has {context}"
        raise RefusedRequestError(name, text_of, code="context_length_exceeded")
    if max_tokens is None:
        return min(left, CHAT_TOKENS_DEFAULT if chat else MAX_TOKENS_DEFAULT)
    if max_tokens > left:
        text_of = f"{max_tokens} after {count} of prompt, the total limit is {context}"
        raise RefusedRequestError(field, text_of, code="context_length_exceeded")
    return max_tokens


def _sampling(read: ReadBody, max_tokens: int, seed: int, biases: bytes) -> Sampling:
    fields = read.fields
    if (fields.min_tokens or 0) > max_tokens:
        raise RefusedRequestError("min_tokens", f"{fields.min_tokens}, max_tokens is {max_tokens}")
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        seed=seed & (1 << 64) - 1,
        ignore_eos=bool(fields.ignore_eos),
        top_k=max(fields.top_k or 0, 0),
        min_p=fields.min_p or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        min_tokens=fields.min_tokens or 0,
        logit_bias=biases,
        logprobs=read.logprobs,
        top_logprobs=read.top_logprobs,
    )


def _biases(biases: dict[str, float], text: TextCodec) -> bytes:
    most = 0xFFFF_FFFF if text.vocabulary is None else text.vocabulary - 1
    for name in biases:
        if not _ID.fullmatch(name) or int(name) > most:
            raise RefusedRequestError("logit_bias", f"{name[:64]!r} is not a token id from 0 to {most}")
    return pack_biases({int(name): value for name, value in biases.items()})


# Beside the answers: /tokenize and /detokenize


class TokenizeBody(Struct):
    """A text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(Struct):
    """Token ids."""

    tokens: Annotated[list[TokenId], Meta(max_length=PROMPT_TOKENS_MAX)]


_TOKENIZE, _DETOKENIZE = msgspec.json.Decoder(TokenizeBody), msgspec.json.Decoder(DetokenizeBody)


def tokenized(body: bytes, *, text: TextCodec, served: Served) -> Read:
    """Answers /tokenize. Raises RefusedRequestError."""
    fields = decoded(_TOKENIZE, body)
    if (fields.prompt is None) == (fields.messages is None):
        raise RefusedRequestError("prompt", "either prompt or messages must be given")
    if fields.messages is not None:
        special = fields.add_special_tokens
        ids = chat_ids(text, fields.messages, reply=fields.add_generation_prompt, special=special)
    else:
        ids = text.encode(fields.prompt or "", special=fields.add_special_tokens is not False)
    if len(ids) > PROMPT_TOKENS_MAX:
        raise RefusedRequestError(
            "prompt" if fields.messages is None else "messages", f"{len(ids)} tokens, at most {PROMPT_TOKENS_MAX}"
        )
    longest = _context(fields.model, text, served)
    return Read(parts=[msgspec.json.encode({"count": len(ids), "max_model_len": longest, "tokens": ids.tolist()})])


def detokenized(body: bytes, *, text: TextCodec) -> Read:
    """Answers /detokenize. Raises RefusedRequestError."""
    return Read(parts=[msgspec.json.encode({"prompt": text.decode(decoded(_DETOKENIZE, body).tokens)})])
