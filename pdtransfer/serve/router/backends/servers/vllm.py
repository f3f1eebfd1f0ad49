"""vLLM's servers. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

from .....limits import FACTS_MAX, PEERS_MAX, TEXT_LENGTH_MAX
from .....schema import parse
from ...fleet.roles import Role
from .dialect import FALSE, ONE, Dialect, Port, ServerOrder, Text
from .early_token import may_come_early, scored
from .hand_offs import prompt_figures
from .server_pool import ServerIdentity, Waiting
from .server_request import CHAT, COMPLETIONS, ServerRequest

Size = Annotated[int, Meta(ge=1, le=0xFFFF)]
FactText = Annotated[str, Meta(max_length=TEXT_LENGTH_MAX)]


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
    first_token: bool | None = None  # whether what it generates is the token behind the prompt; so it is if None


class _VllmAnswer(Struct, frozen=True):
    kv_transfer_params: _VllmParams | None = None


# Of each engine behind this HTTP server; with vLLM's external load balancing that is one.
_ENGINE = re.compile(rb'^vllm:num_requests_running\{[^\n]*\bengine="(\d{1,6})"', re.MULTILINE)
_WAITING = re.compile(
    rb'^vllm:num_requests_waiting_by_reason\{[^\n]{0,512}\breason="capacity"[^\n]{0,512}\} (\d{1,9}(?:\.\d{1,9})?)$',
    re.MULTILINE,
)
_VLLM_ANSWER = msgspec.json.Decoder(_VllmAnswer)
_VLLM_NOT_FOR_DECODE = ("facts", "first_token")  # of an identity
_VLLM_NOT_FOR_PREFILL = ("min_tokens", "stream_options")  # they contradict one token that is not streamed


class VllmDialect(Dialect):
    """vLLM's servers with a KV connector: `kv_transfer_params`, which a prefill server's connector also returns."""

    paths: Mapping[str, tuple[str, ...]] = {COMPLETIONS: ("prompt", "prompt_embeds"), CHAT: ()}
    reserved = frozenset({"kv_transfer_params"})
    ranks_path = metrics_path = "/metrics"

    def waiting(self, metrics: bytes) -> Waiting | None:
        """By vLLM's reason, which older versions do not give."""
        counts = _WAITING.findall(metrics)
        return Waiting(int(sum(map(float, counts))), "blocks or places of vLLM's scheduler") if counts else None

    def ranks(self, metrics: bytes) -> int:
        """By the label that each engine's metrics have. vLLM numbers the ranks of the header in their order."""
        return max(1, min(len(set(_ENGINE.findall(metrics))), PEERS_MAX))

    def identity(self, url: str, answer: bytes) -> ServerIdentity | None:
        """The fields of the process that were returned; none where no engine is named."""
        del url
        params = parse(answer, _VLLM_ANSWER).kv_transfer_params
        if params is None or params.remote_engine_id is None:
            return None
        return {name: value for name, value in asdict(params).items() if value is not None}

    def prompt_figures(self, prefill: bytes) -> dict[bytes, bytes]:
        """Both are asked at once, so decode cannot have prefill's."""
        return prompt_figures(prefill)

    def answers_early(self, request: ServerRequest) -> bool:
        """A prefill server answers when the prompt is computed; its KV follows."""
        return may_come_early(request)

    def prefill_body(
        self, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None, *, early: bool = False
    ) -> bytes:
        """One token. Prefill does not need its own identity."""
        del identity
        fields = {name: value for name, value in request.fields.items() if name not in _VLLM_NOT_FOR_PREFILL}
        counts = {name: ONE for name in ("max_completion_tokens",) if name in fields}
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": _transfer_id(transfer)}
        one_token = {"max_tokens": ONE, "n": ONE, "stream": FALSE, "kv_transfer_params": params}
        options = {name: value for name, value in request.fields.items() if name == "stream_options"}  # for its usage
        streamed = {"stream": True} | scored(request) | options if early else {}
        return msgspec.json.encode(fields | counts | one_token | streamed)

    def decode_body(self, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None) -> bytes:
        """The whole body, and whose KV it gets."""
        if identity is None:
            return msgspec.json.encode(request.fields)
        ids = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": _transfer_id(transfer),
            "remote_request_id": request.request_id,
        }
        reach = {name: value for name, value in identity.items() if name not in _VLLM_NOT_FOR_DECODE}
        return msgspec.json.encode(request.fields | {"kv_transfer_params": {"transfer_mode": "push"} | reach | ids})

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
