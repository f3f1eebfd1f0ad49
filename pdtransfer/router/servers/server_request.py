"""A client's request for HTTP servers. No I/O.

A body's fields are kept as their JSON text: whatever the server supports passes through unchanged.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from ...handoff.prefix import block_keys, root_key
from ...limits import NAME_LENGTH_MAX, PREFIX_PLACED_BLOCKS_MAX
from ..completions import BadRequestError, decoded

# In the order in which a server renders them; the last two are of SGLang's /generate.
_PREFIX_FIELDS = ("tools", "messages", "prompt", "text", "input_ids")
_FIELDS = msgspec.json.Decoder(dict[str, Raw])


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """One client's request. `fields` are the body's, `keys` those of its text's blocks."""

    path: str
    request_id: str
    fields: dict[str, Raw]
    keys: tuple[bytes, ...]


def checked_request_id(text: str) -> str:
    """Returns it. Raises BadRequestError for one that a server may not take."""
    if not 1 <= len(text) <= NAME_LENGTH_MAX or not text.isascii() or not text.isprintable():
        raise BadRequestError("X-Request-Id", f"must be 1 to {NAME_LENGTH_MAX} printable ASCII characters")
    return text


def parse_request(
    path: str, body: bytes, *, request_id: str, block_tokens: int, reserved: Collection[str]
) -> ServerRequest:
    """Parses a body; `block_tokens` 0 makes no keys. Raises BadRequestError.

    The servers check the fields. A client's own fields in `reserved` are dropped: they could name another's KV.
    """
    fields = decoded(_FIELDS, body)
    for name in reserved:
        fields.pop(name, None)
    return ServerRequest(path, request_id, fields, _keys(fields, block_tokens) if block_tokens else ())


def _keys(fields: dict[str, Raw], block_tokens: int) -> tuple[bytes, ...]:
    """Keys of the text's blocks, 4 bytes for each of `block_tokens`: the JSON of what a server renders first."""
    model, salt = (bytes(fields.get(name, b"")) for name in ("model", "cache_salt"))
    text = b"".join(bytes(fields[name]) for name in _PREFIX_FIELDS if name in fields)
    root = root_key(model.decode(), b"", salt)
    return block_keys(root, text, block_tokens=block_tokens, blocks_max=PREFIX_PLACED_BLOCKS_MAX)
