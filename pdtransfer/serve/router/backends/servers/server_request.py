"""A client's request for HTTP servers. No I/O.

A body's fields are kept as their JSON text: whatever the server supports passes through unchanged. `read_relayed` does
all work whose cost grows with the body, and its result is compact, so that another process can do it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

import msgspec
import numpy as np
from msgspec import Raw

from .....handoff.prefix_keys import block_keys, root_key
from .....limits import BODY_FIELDS_MAX, PREFIX_PLACED_BLOCKS_MAX
from ...front.json_bodies import Read, RefusedRequestError, decoded, decoded_field

# In the order in which a server renders them; the last two are of SGLang's /generate.
_PREFIX_FIELDS = ("tools", "messages", "prompt", "text", "input_ids")
_LIST_OF = re.compile(rb'\[[ \t\n\r]*[\["{]')  # a list of lists, texts or objects, not of ids
_EMBEDDINGS = re.compile(rb"\[[ \t\n\r]*\[[ \t\n\r]*[^\[ \t\n\r]")  # of one prompt: it is a list of lists itself
OBJECT, OBJECTS = msgspec.json.Decoder(dict[str, Raw]), msgspec.json.Decoder(list[dict[str, Raw]])
EITHER = msgspec.json.Decoder(dict[str, Raw] | list[dict[str, Raw]])
LIST = msgspec.json.Decoder(list[Raw])
_COUNT = msgspec.json.Decoder(int | None)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATE = "/generate"  # of SGLang, where it reads sampling parameters; on the others it reads OpenAI's fields
Fields = Mapping[str, Raw]


class ServerRequest(Read, kw_only=True, omit_defaults=True):
    """One client's request. Reading its body finds where in it the value of each field lies, the keys of its text's
    blocks, and how many answers it asks for. `Servers.request` adds the rest."""

    spans: dict[str, tuple[int, int]]
    keys: tuple[bytes, ...] = ()
    prompts: int = 1
    choices: int = 1  # of each prompt
    body: bytes = b""
    path: str = ""
    request_id: str = ""
    headers: dict[str, str] = {}  # noqa: RUF012 -- that servers get; a Struct copies it
    changes: dict[str, Raw] = {}  # noqa: RUF012 -- fields with other values than the body's
    apart: int = 1  # requests that servers get instead of it, one for each choice

    @property
    def fields(self) -> dict[str, Raw]:
        """The body's, but for those that are the router's to set."""
        view = memoryview(self.body)
        fields = {name: Raw(view[begin : begin + length]) for name, (begin, length) in self.spans.items()}
        return fields | self.changes

    @property
    def answers(self) -> int:
        """Answers that a decode server generates for it."""
        return self.prompts * self.choices

    @property
    def kept_bytes(self) -> int:
        """The body, as often as it is sent."""
        return len(self.body) * self.apart


def read_relayed(
    body: bytes,
    *,
    block_tokens: int,
    reserved: Collection[str],
    prompts: Collection[str],
    choices: Callable[[Fields, int], int],
) -> ServerRequest:
    """Reads a body; `block_tokens` 0 makes no keys. Each of the fields `prompts` may be a list of prompts; `choices`
    gets the fields and the number of prompts. Raises RefusedRequestError.

    The servers check the fields. A client's own fields in `reserved` are dropped: they could name another's KV.
    """
    fields = decoded(OBJECT, body)
    if len(fields) > BODY_FIELDS_MAX:
        raise RefusedRequestError(None, f"{len(fields)} fields, at most {BODY_FIELDS_MAX}")
    for name in reserved:
        fields.pop(name, None)
    begin = _address(body)
    count = max(1, sum(_prompt_count(name, fields[name]) for name in prompts if name in fields))
    spans = {name: (_address(value) - begin, memoryview(value).nbytes) for name, value in fields.items()}
    return ServerRequest(
        spans=spans,
        keys=_keys(fields, block_tokens) if block_tokens else (),
        prompts=count,
        choices=max(1, choices(fields, count)),
    )


def choices_of(fields: Fields) -> int:
    """How many answers each prompt gets by the field `n`. Raises RefusedRequestError."""
    count = decoded_field("n", _COUNT, fields["n"]) if "n" in fields else None
    return 1 if count is None else count


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
