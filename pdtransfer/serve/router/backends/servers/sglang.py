"""SGLang's servers. No I/O."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec
from msgspec import Raw, Struct

from .....schema import parse
from ...fleet.roles import Role
from ...fleet.server import ServerIdentity
from ...front.json_bodies import RefusedRequestError, decoded_field
from . import prompt_logprobs
from .dialect import FALSE, Port, ServerOrder, Text
from .server_request import Fields, ServerRequest, choices_of


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

    def ranks(self, metrics: bytes) -> int:
        """SGLang chooses its ranks itself, by the room."""
        del metrics
        return 1

    def identity(self, url: str, answer: bytes) -> ServerIdentity | None:
        """The bootstrap server runs beside the prefill server, on a port of its own."""
        info = parse(answer, _SGLANG_INFO)
        if info.disaggregation_mode != "prefill":
            return None
        return {"bootstrap_host": urlsplit(url).hostname, "bootstrap_port": info.disaggregation_bootstrap_port}

    def choices(self, fields: Fields) -> int:
        """Refuses several choices of a prompt: SGLang gives all of them one room, and a room is for one transfer. And a
        stream that asks for its prompt's logprobs."""
        sampling = decoded_field("sampling_params", _SGLANG_SAMPLING, fields.get("sampling_params", _NULL))
        counts = [params.n for params in (sampling if isinstance(sampling, list) else [sampling]) if params is not None]
        if any(count not in (None, 1) for count in (choices_of(fields), *counts)):
            raise RefusedRequestError("n", "must be 1: SGLang hands over one choice of a prompt")
        prompt_logprobs.asked(fields)
        return 1

    def joins(self, request: ServerRequest) -> bool:
        """Decode has no logprobs of the prompt."""
        return prompt_logprobs.asked(request.fields)

    def joined(self, prefill: bytes, decode: bytes) -> bytes:
        """Decode's, with the logprobs of the prompt."""
        return prompt_logprobs.joined(prefill, decode)

    def answers_early(self, request: ServerRequest) -> bool:
        """A prefill server answers only when decode has the KV."""
        del request
        return False

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
        if "rid" in request.fields:
            return None  # the client's own name, which others may have as well
        return ServerOrder("/abort_request", msgspec.json.encode(_named(request, transfer)))


def _named(request: ServerRequest, transfer: bytes) -> dict[str, object]:
    """SGLang's name of a request, in its log: X-Request-Id, and the number of the attempt."""
    return {"rid": f"{request.request_id}-{transfer[:4].hex()}"}


def _room(transfer: bytes, identity: ServerIdentity | None) -> dict[str, object]:
    """Fields of both sides; a room has 63 bits, as of SGLang's own router."""
    if identity is None:
        raise ValueError("a room of nobody")
    return identity | {"bootstrap_room": int.from_bytes(transfer[:8]) >> 1}
