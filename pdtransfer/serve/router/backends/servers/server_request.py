"""A client's request for HTTP servers. No I/O.

A body's fields are kept as their JSON text: whatever the server supports passes through unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Raw

from ...front.json_bodies import Read, decoded_field

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


def choices_of(fields: Fields) -> int:
    """How many answers each prompt gets by the field `n`. Raises RefusedRequestError."""
    count = decoded_field("n", _COUNT, fields["n"]) if "n" in fields else None
    return 1 if count is None else count
