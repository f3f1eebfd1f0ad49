"""What each engine's HTTP servers get about a hand-off: all that differs between engines. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from .....errors import RemoteProtocolError
from .....limits import TOKENS_MAX
from .....schema import parse
from ...fleet.roles import Role
from .server_pool import ServerIdentity, Waiting
from .server_request import OBJECT, OBJECTS, Fields, ServerRequest, choices_of

ONE = Raw(b"1")
FALSE = Raw(b"false")

Text = Annotated[str, Meta(max_length=256)]
Port = Annotated[int, Meta(ge=1, le=0xFFFF)]


class Dialect:
    """How one engine's servers are spoken to; what it has nothing of stands here. `transfer` are 16 random bytes, the
    same for both sides of an attempt."""

    # Where requests are posted, and the fields there of which each may be a list of prompts.
    paths: Mapping[str, tuple[str, ...]]
    # Fields that name whose KV a request gets: the router sets them, and drops a client's.
    reserved: frozenset[str]
    # Where a prefill server reports its identity; None where each of its answers does.
    info_path: str | None = None
    # Where a server names its data parallel ranks (`ranks`), if it does.
    ranks_path: str | None = None
    # Where decode counts its hand-offs (hand_offs.py), and the requests that wait for its memory.
    metrics_path: str
    # Whether prefill answers only once decode has the KV, so that its silence may be decode's.
    prefill_waits = False

    # Where a server reports the longest request that it takes.
    longest_path = "/v1/models"

    def longest(self, answer: bytes) -> int | None:
        """The tokens of a prompt and its answer that a server takes, by that page; None where it does not say."""
        models = _models(answer)
        return min((length for model in models if (length := _length(model)) is not None), default=None)

    def waiting(self, metrics: bytes) -> Waiting | None:
        """Which requests wait for a decode server's memory; None where it does not say."""
        raise NotImplementedError

    def ranks(self, metrics: bytes) -> int:  # noqa: ARG002
        """How many engines a server has by its metrics, each of which RANK_HEADER may name."""
        return 1

    def identity(self, url: str, answer: bytes) -> ServerIdentity | None:
        """Returns the identity of the prefill server at `url` by what it answered, None where it hands nothing over.
        Raises RemoteProtocolError for an answer that is not this engine's."""
        raise NotImplementedError

    def choices(self, path: str, fields: Fields, prompts: int) -> int:  # noqa: ARG002
        """How many answers each prompt gets on this path, as OpenAI's API has it. Raises RefusedRequestError for what
        these servers cannot hand over."""
        return choices_of(fields)

    def apart(self, request: ServerRequest) -> Callable[[int], ServerRequest] | None:  # noqa: ARG002
        """Returns what makes the request for choice i, where the servers get one for each choice; None where they get
        the request whole."""
        return None

    def named_by_client(self, request: ServerRequest) -> bool:  # noqa: ARG002
        """True if servers know the request by a name of the client's own, by which it may be aborted."""
        return False

    def joins(self, request: ServerRequest) -> bool:  # noqa: ARG002
        """True if prefill's answer has a part of a request's answer, which is not a stream then."""
        return False

    def joined(self, prefill: bytes, decode: bytes) -> bytes:
        """Returns a request's answer, made of the whole answers of both. Raises RemoteProtocolError."""
        raise NotImplementedError

    def prompt_figures(self, prefill: bytes) -> dict[bytes, bytes] | None:  # noqa: ARG002
        """Returns what prefill's answer reports of the prompt, in place of decode's figures (hand_offs.py); None where
        decode's are right."""
        return None

    def answers_early(self, request: ServerRequest) -> bool:  # noqa: ARG002
        """True if prefill may answer with a stream of the first token, which decode's stream will begin with too
        (early_token.py), before decode has the KV."""
        return False

    def prefill_body(
        self, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None, *, early: bool = False
    ) -> bytes:
        """Returns the body for a prefill server. Its answer is not streamed, and nobody reads it, unless it is to
        answer `early`."""
        raise NotImplementedError

    def decode_body(self, request: ServerRequest, transfer: bytes, identity: ServerIdentity | None) -> bytes:
        """Returns the body for a decode server; without an identity it computes the prompt itself."""
        raise NotImplementedError

    def given_up(self, role: Role, request: ServerRequest, transfer: bytes) -> ServerOrder | None:
        """Returns the order that informs a server of this role that nobody waits for an attempt any more. Closing its
        connection may do that late or not at all. None where there is nothing to send."""
        raise NotImplementedError


def with_longest(answer: bytes, longest: int) -> bytes:
    """A list of models, each as long as that where it has a length."""
    models = _models(answer)
    if longest == TOKENS_MAX or not any(_length(model) for model in models):
        return answer
    as_long = [model | ({"max_model_len": longest} if _length(model) else {}) for model in models]
    return msgspec.json.encode(parse(answer, OBJECT) | {"data": as_long})


def _models(answer: bytes) -> list[dict[str, Raw]]:
    """Those of an answer to /v1/models; none of an answer of another form."""
    try:
        return parse(bytes(parse(answer, OBJECT).get("data", b"[]")), OBJECTS)
    except RemoteProtocolError:
        return []


def _length(model: dict[str, Raw]) -> int | None:
    length = bytes(model.get("max_model_len", b""))
    return int(length) if length.isdigit() and len(length) <= 9 else None


@dataclass(frozen=True, slots=True)
class ServerOrder:
    """A POST for a server: a part of a request, or what it is sent beside its requests."""

    path: str
    body: bytes
