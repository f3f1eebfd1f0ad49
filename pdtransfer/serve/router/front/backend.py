"""What the HTTP side asks of the backend behind it: our own daemons, or HTTP servers of other engines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..fleet.membership import WorkerSite
from .body_readers import BodyReading
from .client_request import ClientRequest
from .json_bodies import Read, WholeAnswer
from .text import TextCodec


class AnswerStream(Protocol):
    """An answer of status 200 that comes piece by piece."""

    headers: Mapping[str, str]
    length: int | None  # of all pieces together, where it is known
    events: bool  # a stream of events: one that fails ends with an error as its last event

    async def more(self) -> bytes:
        """Waits for the next piece; empty at the end. Raises AnswerFailedError."""
        ...

    def close(self, *, complete: bool) -> None:
        """Releases what it holds; what generates a part that nobody reads any more is cancelled. Called once."""
        ...


class GenerationRequest(Protocol):
    """A request to generate, once its body has been read."""

    @property
    def answers(self) -> int:
        """Answers that it asks for, and counts as."""
        ...

    @property
    def kept_bytes(self) -> int:
        """What the router keeps of it until its end."""
        ...


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths of a backend: requests to generate, texts that take no worker, and what is looked up with GET."""

    generate: tuple[str, ...]
    texts: tuple[str, ...] = ()
    lookups: tuple[str, ...] = ()  # as aiohttp's patterns

    @property
    def text(self) -> str:
        """Those that a client may see."""
        generate, texts = ([f"POST {path}" for path in paths] for paths in (self.generate, self.texts))
        named = [*generate, "GET /v1/models", *texts]
        return f"{', '.join(named[:-1])} and {named[-1]}"


class Backend(WorkerSite, Protocol):
    """What generates. Only `answer` and `look_up` wait for workers."""

    paths: Paths
    text: TextCodec  # the tokenizer by which bodies are read
    inline_bytes_max: int  # bodies up to here are read on the loop: some milliseconds whatever their shape
    reloads: Collection[Callable[[], None]]  # what SIGHUP reads again

    async def open(self) -> None:
        """Begins to reach its workers. Raises ConfigError or WorldError."""
        ...

    def stop(self) -> None:
        """Fails all requests."""
        ...

    async def close(self) -> None:
        """Releases everything, after `stop`."""
        ...

    def reading(self, path: str) -> BodyReading[Read]:
        """How a body that was posted to this path is read."""
        ...

    def request(self, read: Any, body: bytes, client: ClientRequest) -> GenerationRequest:
        """The request of a body that was read. Raises RefusedRequestError."""
        ...

    async def answer(self, request: Any, client: ClientRequest) -> WholeAnswer | AnswerStream:
        """Has a request generated, until the whole answer is there or its first piece. Raises AnswerFailedError."""
        ...

    async def look_up(self, path: str, authorization: str) -> WholeAnswer:
        """Answers a GET; `authorization` is the client's header. Raises AnswerFailedError."""
        ...

    def usable(self) -> bool:
        """True if it can serve a request."""
        ...

    def health(self) -> dict[str, object]:
        """Details for /health."""
        ...

    def state(self) -> dict[str, Any]:
        """Its fields of RouterStatus: the models, rooms by what their clients wait for, and retries."""
        ...
