"""The bodies of OpenAI's requests as vLLM's servers with a KV connector take them. No I/O.

A body's fields are kept as their JSON text: whatever the server supports passes through unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import Raw, Struct

from ...handoff.prefix import block_keys, root_key
from ...limits import NAME_LENGTH_MAX, PREFIX_PLACED_BLOCKS_MAX
from ..completions import BadRequestError

ONE = Raw(b"1")
FALSE = Raw(b"false")
_NOT_FOR_PREFILL = ("min_tokens", "stream_options")  # they contradict one token that is not streamed
_PREFIX_FIELDS = ("tools", "messages", "prompt")  # in the order in which a server renders them


# How decode reaches a prefill server's KV: of the kv_transfer_params that its connector returns, those that are equal
# for all requests of one process. vLLM adds others, which differ.
ServerIdentity = dict[str, object]
_IDENTITY = frozenset({
    "remote_engine_id", "remote_host", "remote_port", "remote_endpoints", "tp_size", "pp_size", "dcp_size",
    "transfer_mode",
})  # fmt: skip


class _Answer(Struct):
    kv_transfer_params: ServerIdentity | None = None


_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_ANSWER = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """One client's request. `fields` are the body's, `keys` those of its text's blocks."""

    path: str
    request_id: str
    fields: dict[str, Raw]
    keys: tuple[bytes, ...]

    def prefill_body(self, transfer_id: str) -> bytes:
        """Returns the body for a prefill server: one token, which nobody reads."""
        fields = {name: value for name, value in self.fields.items() if name not in _NOT_FOR_PREFILL}
        counts = {name: ONE for name in ("max_completion_tokens",) if name in fields}
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        one = {"max_tokens": ONE, "n": ONE, "stream": FALSE, "kv_transfer_params": params}
        return msgspec.json.encode(fields | counts | one)

    def decode_body(self, transfer_id: str, identity: ServerIdentity | None) -> bytes:
        """Returns the body for a decode server; without an identity it computes the prompt itself."""
        if identity is None:
            return msgspec.json.encode(self.fields)
        params = (
            {"transfer_mode": "push"}
            | identity
            | {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": transfer_id,
                "remote_request_id": self.request_id,
            }
        )
        return msgspec.json.encode(self.fields | {"kv_transfer_params": params})


def checked_request_id(text: str) -> str:
    """Returns it. Raises BadRequestError for one that a server may not take."""
    if not 1 <= len(text) <= NAME_LENGTH_MAX or not text.isascii() or not text.isprintable():
        raise BadRequestError("X-Request-Id", f"must be 1 to {NAME_LENGTH_MAX} printable ASCII characters")
    return text


def parse_request(path: str, body: bytes, *, request_id: str, block_tokens: int) -> ServerRequest:
    """Parses a body; `block_tokens` 0 makes no keys. Raises BadRequestError.

    The servers check the fields. A client's own kv_transfer_params are dropped: they could name another's KV.
    """
    try:
        body.decode()  # the decoder below leaves the text of values unchecked
        fields = _FIELDS.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequestError(None, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(None, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequestError(None, "the body is nested too deeply") from None
    fields.pop("kv_transfer_params", None)
    return ServerRequest(path, request_id, fields, _keys(fields, block_tokens) if block_tokens else ())


def identity_of(answer: bytes) -> ServerIdentity | None:
    """Returns the identity in a prefill server's answer, None where it hands nothing over."""
    try:
        params = _ANSWER.decode(answer).kv_transfer_params
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not params or "remote_engine_id" not in params:
        return None
    return {name: value for name, value in params.items() if name in _IDENTITY}


def _keys(fields: dict[str, Raw], block_tokens: int) -> tuple[bytes, ...]:
    """Keys of the text's blocks, 4 bytes for each of `block_tokens`: the JSON of what a server renders first."""
    model, salt = (bytes(fields.get(name, b"")) for name in ("model", "cache_salt"))
    text = b"".join(bytes(fields[name]) for name in _PREFIX_FIELDS if name in fields)
    root = root_key(model.decode(), b"", salt)
    return block_keys(root, text, block_tokens=block_tokens, blocks_max=PREFIX_PLACED_BLOCKS_MAX)
