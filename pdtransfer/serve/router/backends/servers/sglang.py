"""SGLang's servers. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias, cast
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from .....errors import RemoteProtocolError
from .....limits import PEERS_MAX, TOKENS_MAX
from .....schema import parse
from ...fleet.roles import Role
from ...front.json_bodies import RefusedRequestError, decoded_field
from .dialect import FALSE, ONE, Dialect, Port, ServerOrder, Text
from .server_pool import ServerIdentity, Waiting
from .server_request import CHAT, COMPLETIONS, EITHER, GENERATE, OBJECTS, Fields, ServerRequest, choices_of


class _SglangInfo(Struct, frozen=True):
    disaggregation_mode: Text
    disaggregation_bootstrap_port: Port


class _PluginState(Struct, frozen=True):
    waiting: Waiting | None = None
    context_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] = 0


class _RankState(Struct, frozen=True):
    pdtransfer: _PluginState | None = None


class _SglangStates(Struct, frozen=True):
    internal_states: Annotated[list[_RankState], Meta(max_length=PEERS_MAX)] = []


_SGLANG_STATES = msgspec.json.Decoder(_SglangStates)
_SGLANG_INFO = msgspec.json.Decoder(_SglangInfo)
_NULL = Raw(b"null")

# Of /generate: an object, or one for each prompt.
_Sampling: TypeAlias = dict[str, Raw] | list[dict[str, Raw] | None] | None
_SAMPLING: msgspec.json.Decoder[_Sampling] = msgspec.json.Decoder(_Sampling)
_SEED = msgspec.json.Decoder(int | None)
SEEDS = 1 << 64  # SGLang's are signed
SERVER_CHOICES_MAX = 128  # requests that one with `n` becomes: as many choices as OpenAI's API has
SAMPLING_BYTES_MAX = 256 << 10  # of sampling parameters that are written for each of several choices


# Logprobs of a prompt.
_OF_PROMPT = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")  # in meta_info of /generate


class _Generated(Struct):
    """One answer of /generate; of what else it has nothing changes."""

    meta_info: dict[str, Raw]


class _ScoredChoice(Struct):
    logprobs: dict[str, list[Raw]] | None = None


class _Completion(Struct):
    choices: list[_ScoredChoice]


_FLAG, _FLAGS = msgspec.json.Decoder(bool | None), msgspec.json.Decoder(bool | list[bool | None] | None)
_INTEGER, _INTEGERS = msgspec.json.Decoder(int | None), msgspec.json.Decoder(int | list[int | None] | None)
_GENERATED: msgspec.json.Decoder[_Generated | list[_Generated]] = msgspec.json.Decoder(_Generated | list[_Generated])
_COMPLETION = msgspec.json.Decoder(_Completion)


class SglangDialect(Dialect):
    """SGLang's servers: `bootstrap_host`, `bootstrap_port` and `bootstrap_room`, the same on both sides.

    The room of the i-th of batched prompts is `bootstrap_room` + i. The first token is prefill's, so prefill gets all
    that a token depends on, and sends its own figures of the prompt to decode. SGLang chooses its ranks by the room.
    """

    paths: Mapping[str, tuple[str, ...]] = {
        COMPLETIONS: ("prompt",),
        CHAT: (),
        GENERATE: ("text", "input_ids", "input_embeds"),
    }
    reserved = frozenset({
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
        "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank",
    })  # fmt: skip
    info_path = metrics_path = longest_path = "/server_info"
    prefill_waits = True

    def longest(self, answer: bytes) -> int | None:
        """By what the plugin adds for each rank: /v1/models has the model's length, whatever the KV cache holds."""
        return min((state.context_tokens for state in _plugin_states(answer) if state.context_tokens), default=None)

    def waiting(self, metrics: bytes) -> Waiting | None:
        """By what the plugin adds for each rank."""
        waits = [state.waiting for state in _plugin_states(metrics) if state.waiting]
        whys = [wait.why for wait in waits if wait.why]
        return Waiting(sum(wait.requests for wait in waits), whys[0] if whys else "") if waits else None

    def identity(self, url: str, answer: bytes) -> ServerIdentity | None:
        """The bootstrap server runs beside the prefill server, on a port of its own."""
        info = parse(answer, _SGLANG_INFO)
        if info.disaggregation_mode != "prefill":
            return None
        return {"bootstrap_host": urlsplit(url).hostname, "bootstrap_port": info.disaggregation_bootstrap_port}

    def choices(self, path: str, fields: Fields, prompts: int) -> int:
        """Of /generate that of its sampling parameters, the same for all prompts; of the other paths `n`. Refuses a
        stream that asks for its prompt's logprobs, and all that `apart` could not make requests of."""
        asks_for_logprobs(path, fields)
        if path != GENERATE:
            return _count("n", [fields], seed="seed")
        sampling = _sampling(fields)
        if isinstance(sampling, list) and len(sampling) != prompts:
            raise RefusedRequestError("sampling_params", f"a list of {len(sampling)} for {prompts} prompts")
        of_prompts = [params or {} for params in (sampling if isinstance(sampling, list) else [sampling])]
        count = _count("sampling_params.n", of_prompts, seed="sampling_seed")
        size = memoryview(fields.get("sampling_params", _NULL)).nbytes
        if count > 1 and size > SAMPLING_BYTES_MAX:
            text = f"{size} bytes, at most {SAMPLING_BYTES_MAX} with several choices"
            raise RefusedRequestError("sampling_params", text)
        return count

    def apart(self, request: ServerRequest) -> Callable[[int], ServerRequest] | None:
        """SGLang gives all choices of a prompt one room, and a room is for one transfer."""
        return partial(_choice, request) if request.choices > 1 else None

    def named_by_client(self, request: ServerRequest) -> bool:
        """Other requests may have the same name."""
        return "rid" in request.spans

    def joins(self, request: ServerRequest) -> bool:
        """Decode has no logprobs of the prompt."""
        return asks_for_logprobs(request.path, request.fields)

    def joined(self, prefill: bytes, decode: bytes) -> bytes:
        """Decode's whole answer with the prompt's logprobs of prefill's. Raises RemoteProtocolError where the two are
        not of one request."""
        answer = parse(decode, EITHER)
        if not isinstance(answer, list) and "choices" in answer:
            choices = parse(answer["choices"], OBJECTS)
            of_prefill, of_decode = (parse(text, _COMPLETION).choices for text in (prefill, decode))
            _check_equal(len(of_prefill), len(of_decode))
            for choice, first, rest in zip(choices, of_prefill, of_decode, strict=True):
                choice["logprobs"] = Raw(msgspec.json.encode(_completed(first.logprobs, rest.logprobs)))
            answer["choices"] = Raw(msgspec.json.encode(choices))
            return msgspec.json.encode(answer)
        of_prefill, of_decode = (_list(parse(text, _GENERATED)) for text in (prefill, decode))
        answers: list[dict[str, Raw]] = _list(answer)
        _check_equal(len(of_prefill), len(answers))
        for generated, first, rest in zip(answers, of_prefill, of_decode, strict=True):
            of_prompt = {name: first.meta_info[name] for name in _OF_PROMPT if name in first.meta_info}
            generated["meta_info"] = Raw(msgspec.json.encode(rest.meta_info | of_prompt))
        return msgspec.json.encode(answer)

    def prefill_body(
        self, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None, *, early: bool = False
    ) -> bytes:
        """The whole body: SGLang's prefill ends by itself when it has sampled a token."""
        del early
        fields = {name: value for name, value in request.fields.items() if name != "stream_options"}
        return msgspec.json.encode(_named(request, transfer) | fields | {"stream": FALSE} | _room(transfer, identity))

    def decode_body(self, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None) -> bytes:
        """The whole body, and the room."""
        return msgspec.json.encode(_named(request, transfer) | request.fields | _room(transfer, identity))

    def given_up(self, role: Role, request: ServerRequest, transfer: bytes) -> ServerOrder | None:
        """SGLang looks every few seconds whether the client of a request is there."""
        del role
        if self.named_by_client(request):
            return None
        return ServerOrder("/abort_request", msgspec.json.encode(_named(request, transfer)))


def _plugin_states(answer: bytes) -> list[_PluginState]:
    try:
        states = parse(answer, _SGLANG_STATES).internal_states
    except RemoteProtocolError:
        return []
    return [state.pdtransfer for state in states if state.pdtransfer is not None]


def _count(name: str, of_prompts: Sequence[Fields], *, seed: str) -> int:
    """How many choices each prompt is to have. `name` is the field's for the client. Refuses what no choice can be made
    of."""
    counts = {choices_of(params) for params in of_prompts}
    if len(counts) > 1:
        raise RefusedRequestError(name, "must be the same for all prompts")
    (count,) = counts
    if not 1 <= count <= SERVER_CHOICES_MAX:
        raise RefusedRequestError(name, f"{count} choices, must be 1 to {SERVER_CHOICES_MAX}")
    for params in of_prompts if count > 1 else ():
        _seed(params, seed)
    return count


def _sampling(fields: Fields) -> _Sampling:
    return decoded_field("sampling_params", _SAMPLING, fields.get("sampling_params", _NULL))


def _choice(request: ServerRequest, number: int) -> ServerRequest:
    """The request for one choice of each prompt. A client's `rid` would name all of them, and is dropped."""
    fields = request.fields
    if request.path != GENERATE:
        changes = _of_one(fields, number, "seed")
    else:
        sampling = _sampling(fields)
        of_prompts = [
            params and params | _of_one(params, number, "sampling_seed")
            for params in (sampling if isinstance(sampling, list) else [sampling])
        ]
        written = msgspec.json.encode(of_prompts if isinstance(sampling, list) else of_prompts[0])
        changes = {"sampling_params": Raw(written)}
    spans = {name: span for name, span in request.spans.items() if name != "rid"}
    name = f"{request.request_id}-{number}"
    return replace(request, spans=spans, choices=1, request_id=name, changes=changes)


def _of_one(fields: Fields, number: int, seed_name: str) -> dict[str, Raw]:
    """What changes of fields where one choice is asked for. Choice i has the seed + i: SGLang's deterministic inference
    draws by the seed alone, and with one seed all choices would be the same."""
    changes = {"n": ONE} if "n" in fields else {}
    seed = _seed(fields, seed_name)
    if seed is not None and number > 0:
        changes[seed_name] = Raw(str((seed + number + SEEDS // 2) % SEEDS - SEEDS // 2).encode())
    return changes


def _seed(fields: Fields, name: str) -> int | None:
    return decoded_field(name, _SEED, fields[name]) if name in fields else None


def _named(request: ServerRequest, transfer: bytes) -> dict[str, object]:
    """SGLang's name of a request, in its log: X-Request-Id, and the number of the attempt."""
    return {"rid": f"{request.request_id}-{transfer[:4].hex()}"}


def _room(transfer: bytes, identity: ServerIdentity | None) -> dict[str, object]:
    """Fields of both sides; a room has 63 bits, as of SGLang's own router."""
    assert identity is not None, "SGLang's decode computes no prompt"
    return identity | {"bootstrap_room": int.from_bytes(transfer[:8]) >> 1}


def asks_for_logprobs(path: str, fields: Fields) -> bool:
    """True if a request asks for logprobs of its prompt, which prefill computes and decode's answer lacks. Completions
    do by `echo` with `logprobs`, SGLang's own path by `return_logprob` from a place in the prompt on. Raises
    RefusedRequestError for a stream that does."""
    if path == GENERATE:
        starts = _list(_value(fields, "logprob_start_len", _INTEGERS))
        from_prompt = any(start is not None and start >= 0 for start in starts)
        is_asked = from_prompt and any(_list(_value(fields, "return_logprob", _FLAGS)))
    else:
        is_asked = path == COMPLETIONS and _value(fields, "echo", _FLAG) and _value(fields, "logprobs", _INTEGER)
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


def _completed(first: dict[str, list[Raw]] | None, rest: dict[str, list[Raw]] | None) -> dict[str, list[Raw]]:
    """The prompt's part of each list, without prefill's own token, and decode's."""
    if first is None or rest is None:
        raise RemoteProtocolError("logprobs", "missing")
    return {name: first.get(name, [])[:-1] + of_decode for name, of_decode in rest.items()}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _check_equal(prefill: int, decode: int) -> None:
    if prefill != decode:
        raise RemoteProtocolError("answer", f"prefill has {prefill}, decode {decode}")
