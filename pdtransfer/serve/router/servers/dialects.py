"""What each engine's HTTP servers are told of a hand-off: all that differs between vLLM's and SGLang's. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import asdict

from ....limits import FACTS_MAX, PEERS_MAX, TEXT_LENGTH_MAX
from ....schema import parse
from ..completions import BadRequestError, decoded_field
from ..pool_worker import Role
from .server_request import Fields, ServerRequest, choices_of

ONE = Raw(b"1")
FALSE = Raw(b"false")

# How decode reaches a prefill server's KV: fields that are equal for all requests of one process.
ServerIdentity = dict[str, object]

Text = Annotated[str, Meta(max_length=256)]
Port = Annotated[int, Meta(ge=1, le=0xFFFF)]
Size = Annotated[int, Meta(ge=1, le=0xFFFF)]
FactText = Annotated[str, Meta(max_length=TEXT_LENGTH_MAX)]


class Dialect(Protocol):
    """How one engine's servers are spoken to. `transfer` are 16 random bytes, the same for both sides of an attempt."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Where requests are posted."""
        ...

    @property
    def reserved(self) -> frozenset[str]:
        """Fields that name whose KV a request gets: the router sets them, and drops a client's."""
        ...

    @property
    def info_path(self) -> str | None:
        """Where a prefill server tells its identity; None where each of its answers does."""
        ...

    @property
    def metrics_path(self) -> str | None:
        """Where a decode server counts its hand-offs (hand_offs.py); None where it does not."""
        ...

    def identity(self, url: str, answer: bytes) -> ServerIdentity | None:
        """Returns the identity of the prefill server at `url` by what it answered, None where it hands nothing over.
        Raises RemoteProtocolError for an answer that is not this engine's."""
        ...

    def choices(self, fields: Fields) -> int:
        """How many answers each prompt gets. Raises BadRequestError for what these servers cannot hand over."""
        ...

    def prefill_body(self, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None) -> bytes:
        """Returns the body for a prefill server, whose answer is not streamed and nobody reads."""
        ...

    def decode_body(self, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None) -> bytes:
        """Returns the body for a decode server; without an identity it computes the prompt itself."""
        ...

    def given_up(self, role: Role, request: ServerRequest, transfer: bytes) -> ServerOrder | None:
        """Returns what tells a server of this role that nobody waits for an attempt any more, which closing its
        connection may do late or not at all; None where there is nothing to tell."""
        ...


@dataclass(frozen=True, slots=True)
class ServerOrder:
    """A POST that a server gets beside its requests."""

    path: str
    body: bytes


class _VllmParams(Struct, frozen=True):
    """Of the returned kv_transfer_params those that belong to the process; vLLM adds others."""

    remote_engine_id: Text | None = None
    remote_host: Text | None = None
    remote_port: Port | None = None
    remote_endpoints: Annotated[list[Text], Meta(max_length=PEERS_MAX)] | None = None
    tp_size: Size | None = None
    pp_size: Size | None = None
    dcp_size: Size | None = None
    transfer_mode: Text | None = None
    facts: Annotated[dict[Text, FactText], Meta(max_length=FACTS_MAX)] | None = None  # what its peers compare


class _VllmAnswer(Struct, frozen=True):
    kv_transfer_params: _VllmParams | None = None


_VLLM_ANSWER = msgspec.json.Decoder(_VllmAnswer)
_VLLM_NOT_FOR_PREFILL = ("min_tokens", "stream_options")  # they contradict one token that is not streamed


class VllmDialect:
    """vLLM's servers with a KV connector: `kv_transfer_params`, which a prefill server's connector also returns."""

    paths = ("/v1/completions", "/v1/chat/completions")
    reserved = frozenset({"kv_transfer_params"})
    info_path = None
    metrics_path = "/metrics"

    def identity(self, url: str, answer: bytes) -> ServerIdentity | None:
        """The fields of the process that were returned; none where no engine is named."""
        del url
        params = parse(answer, _VLLM_ANSWER).kv_transfer_params
        if params is None or params.remote_engine_id is None:
            return None
        return {name: value for name, value in asdict(params).items() if value is not None}

    def choices(self, fields: Fields) -> int:
        """As OpenAI's API has it."""
        return choices_of(fields)

    def prefill_body(self, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None) -> bytes:
        """One token. Prefill does not need its own identity."""
        del identity
        fields = {name: value for name, value in request.fields.items() if name not in _VLLM_NOT_FOR_PREFILL}
        counts = {name: ONE for name in ("max_completion_tokens",) if name in fields}
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": _transfer_id(transfer)}
        one = {"max_tokens": ONE, "n": ONE, "stream": FALSE, "kv_transfer_params": params}
        return msgspec.json.encode(fields | counts | one)

    def decode_body(self, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None) -> bytes:
        """The whole body, and whose KV it gets."""
        if identity is None:
            return msgspec.json.encode(request.fields)
        own = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": _transfer_id(transfer),
            "remote_request_id": request.request_id,
        }
        reach = {name: value for name, value in identity.items() if name != "facts"}
        return msgspec.json.encode(request.fields | {"kv_transfer_params": {"transfer_mode": "push"} | reach | own})

    def given_up(self, role: Role, request: ServerRequest, transfer: bytes) -> ServerOrder | None:
        """A prefill server that has answered keeps the KV for decode. Its connector learns of it by the parameters of a
        request, of one token."""
        del request
        if role != "prefill":
            return None
        params = {"abort_transfer_id": _transfer_id(transfer)}
        order = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
        return ServerOrder("/v1/completions", msgspec.json.encode(order))


def _transfer_id(transfer: bytes) -> str:
    return f"pdtransfer-{transfer.hex()}"


class _SglangInfo(Struct, frozen=True):
    disaggregation_mode: Text
    disaggregation_bootstrap_port: Port


_SGLANG_INFO = msgspec.json.Decoder(_SglangInfo)
_NULL = Raw(b"null")


class _SglangSampling(Struct):
    n: int | None = None


# Of /generate: an object, or one for each prompt. What else it has is for the servers, and nothing is made of it here.
_SGLANG_SAMPLING: msgspec.json.Decoder[_SglangSampling | list[_SglangSampling | None] | None] = msgspec.json.Decoder(
    _SglangSampling | list[_SglangSampling | None] | None
)


class SglangDialect:
    """SGLang's servers: `bootstrap_host`, `bootstrap_port` and `bootstrap_room`, the same on both sides.

    The room of the i-th of batched prompts is `bootstrap_room` + i. The first token is prefill's, so prefill gets all
    that a token depends on.
    """

    paths = ("/v1/completions", "/v1/chat/completions", "/generate")
    reserved = frozenset({
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size",
        "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank",
    })  # fmt: skip
    info_path = "/server_info"
    metrics_path = None

    def identity(self, url: str, answer: bytes) -> ServerIdentity | None:
        """The bootstrap server runs beside the prefill server, on a port of its own."""
        told = parse(answer, _SGLANG_INFO)
        if told.disaggregation_mode != "prefill":
            return None
        return {"bootstrap_host": urlsplit(url).hostname, "bootstrap_port": told.disaggregation_bootstrap_port}

    def choices(self, fields: Fields) -> int:
        """Refuses several choices of a prompt: SGLang gives all of them one room, and a room is for one transfer."""
        sampling = decoded_field("sampling_params", _SGLANG_SAMPLING, fields.get("sampling_params", _NULL))
        counts = [each.n for each in (sampling if isinstance(sampling, list) else [sampling]) if each is not None]
        if any(count not in (None, 1) for count in (choices_of(fields), *counts)):
            raise BadRequestError("n", "must be 1: SGLang hands over one choice of a prompt")
        return 1

    def prefill_body(self, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None) -> bytes:
        """The whole body: SGLang's prefill ends by itself when it has sampled a token."""
        fields = {name: value for name, value in request.fields.items() if name != "stream_options"}
        return msgspec.json.encode(_named(request, transfer) | fields | {"stream": FALSE} | _room(transfer, identity))

    def decode_body(self, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None) -> bytes:
        """The whole body, and the room."""
        return msgspec.json.encode(_named(request, transfer) | request.fields | _room(transfer, identity))

    def given_up(self, role: Role, request: ServerRequest, transfer: bytes) -> ServerOrder | None:
        """SGLang looks every few seconds whether the client of a request is there."""
        del role
        if "rid" in request.fields:
            return None  # the client's own name, which others may have as well
        return ServerOrder("/abort_request", msgspec.json.encode(_named(request, transfer)))


def _named(request: ServerRequest, transfer: bytes) -> dict[str, object]:
    """SGLang's name of a request, in its log: X-Request-Id, and what tells attempts apart."""
    return {"rid": f"{request.request_id}-{transfer[:4].hex()}"}


def _room(transfer: bytes, identity: ServerIdentity | None) -> dict[str, object]:
    """Fields of both sides; a room has 63 bits, as of SGLang's own router."""
    if identity is None:
        raise ValueError("a room of nobody")
    return identity | {"bootstrap_room": int.from_bytes(transfer[:8]) >> 1}


DIALECTS: dict[str, Dialect] = {"vllm": VllmDialect(), "sglang": SglangDialect()}
