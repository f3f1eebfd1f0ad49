"""The engines whose HTTP servers a router may stand in front of, and how a body for one is read. No I/O."""

from __future__ import annotations

from functools import partial

from msgspec import Struct

from ...front.text import TextCodec
from .dialect import Dialect
from .server_request import ServerRequest, read_relayed
from .sglang import SglangDialect
from .vllm import VllmDialect

DIALECTS: dict[str, Dialect] = {"vllm": VllmDialect(), "sglang": SglangDialect()}


class ReadRelayed(Struct, frozen=True, tag=True):
    """The reading of a request that is passed on to HTTP servers of `engine`."""

    engine: str
    block_tokens: int
    path: str

    @property
    def result(self) -> type[ServerRequest]:
        return ServerRequest

    def read(self, body: bytes, text: TextCodec) -> ServerRequest:
        """Finds its fields. The servers have tokenizers of their own."""
        del text
        dialect = DIALECTS[self.engine]
        choices = partial(dialect.choices, self.path)
        return read_relayed(
            body, block_tokens=self.block_tokens, reserved=dialect.reserved, prompts=dialect.paths[self.path],
            choices=choices,
        )  # fmt: skip
