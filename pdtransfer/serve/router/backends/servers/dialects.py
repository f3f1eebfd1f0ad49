"""The engines whose HTTP servers a router may stand in front of, and how a body for one is read. No I/O."""

from __future__ import annotations

from functools import partial

from ...front.text import TextCodec
from .dialect import Dialect
from .server_request import ServerRequest, read_relayed
from .sglang import SglangDialect
from .vllm import VllmDialect

DIALECTS: dict[str, Dialect] = {"vllm": VllmDialect(), "sglang": SglangDialect()}


def read_for_servers(body: bytes, *, text: TextCodec, engine: str, block_tokens: int, path: str) -> ServerRequest:
    """Finds the fields of a body that is passed on to HTTP servers of `engine`, which have tokenizers of their own."""
    del text
    dialect = DIALECTS[engine]
    choices, prompts = partial(dialect.choices, path), dialect.paths[path]
    return read_relayed(body, block_tokens=block_tokens, reserved=dialect.reserved, prompts=prompts, choices=choices)
