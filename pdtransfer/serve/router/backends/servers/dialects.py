"""The engines whose HTTP servers a router may stand in front of, and how a body for one is read. No I/O."""

from __future__ import annotations

import re

import numpy as np
from msgspec import Raw

from .....handoff.prefix_keys import block_keys, root_key
from .....limits import BODY_FIELDS_MAX, PREFIX_PLACED_BLOCKS_MAX
from ...front.json_bodies import RefusedRequestError, decoded, decoded_field
from ...front.text import TextCodec
from .dialect import Dialect
from .server_request import LIST, OBJECT, Fields, ServerRequest
from .sglang import SglangDialect
from .vllm import VllmDialect

DIALECTS: dict[str, Dialect] = {"vllm": VllmDialect(), "sglang": SglangDialect()}

# In the order in which a server renders them; the last two are of SGLang's /generate.
_PREFIX_FIELDS = ("tools", "messages", "prompt", "text", "input_ids")
_LIST_OF = re.compile(rb'\[[ \t\n\r]*[\["{]')  # a list of lists, texts or objects, not of ids
_EMBEDDINGS = re.compile(rb"\[[ \t\n\r]*\[[ \t\n\r]*[^\[ \t\n\r]")  # of one prompt: it is a list of lists itself


def read_for_servers(body: bytes, *, text: TextCodec, engine: str, block_tokens: int, path: str) -> ServerRequest:
    """Reads a body for HTTP servers of `engine`, which have tokenizers of their own; `block_tokens` 0 makes no keys.
    Raises RefusedRequestError. It does all work whose cost grows with the body, and its result is compact, so that
    another process can do it.

    The servers check the fields. A client's own fields in `reserved` are dropped: they could name another's KV.
    """
    del text
    dialect, fields = DIALECTS[engine], decoded(OBJECT, body)
    if len(fields) > BODY_FIELDS_MAX:
        raise RefusedRequestError(None, f"{len(fields)} fields, at most {BODY_FIELDS_MAX}")
    for name in dialect.reserved:
        fields.pop(name, None)
    begin = _address(body)
    count = max(1, sum(_prompt_count(name, fields[name]) for name in dialect.paths[path] if name in fields))
    spans = {name: (_address(value) - begin, memoryview(value).nbytes) for name, value in fields.items()}
    return ServerRequest(
        spans=spans,
        keys=_keys(fields, block_tokens) if block_tokens else (),
        prompts=count,
        choices=max(1, dialect.choices(path, fields, count)),
    )


def _address(data: bytes | Raw) -> int:
    """Of the first byte: a value's JSON text lies within its body."""
    return np.frombuffer(data, np.uint8).__array_interface__["data"][0]


def _prompt_count(name: str, value: Raw) -> int:
    content = memoryview(value)
    is_one = _LIST_OF.match(content) is None or (name == "input_embeds" and _EMBEDDINGS.match(content) is not None)
    return 1 if is_one else len(decoded_field(name, LIST, value))


def _keys(fields: Fields, block_tokens: int) -> tuple[bytes, ...]:
    """Keys of the text's blocks, 4 bytes for each of `block_tokens`: the JSON of what a server renders first."""
    model, salt = (bytes(fields.get(name, b"")) for name in ("model", "cache_salt"))
    text = b"".join(bytes(fields[name]) for name in _PREFIX_FIELDS if name in fields)
    root = root_key(model.decode(), b"", salt)
    return block_keys(root, text, block_tokens=block_tokens, blocks_max=PREFIX_PLACED_BLOCKS_MAX)
