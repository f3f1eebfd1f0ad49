"""What the HTTP side of every router shares: bounded bodies, unfinished requests, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ....errors import Cause
from ....limits import HTTP_BODIES_BYTES_MAX, HTTP_BODY_BYTES_MAX, Limits
from ...settings.router import RouterConfig
from .api_keys import KeyUse, check_answers
from .body_readers import BodyReaders, BodyReading
from .client_request import REQUEST_ID, ClientRequest
from .json_bodies import JSON, AnswerFailedError, Read, RefusedRequestError, WholeAnswer

API_KEY_USE = web.RequestKey("api_key_use", KeyUse)  # whose request it is, where API keys are on
CLIENT = web.RequestKey("client_request", ClientRequest)  # of a request to generate
BODY_S = 20.0  # time limit for a body
Result = TypeVar("Result", bound=Read)


class OpenRequests:
    """The requests of one router, from their body to their end: bounded in number and in bytes."""

    def __init__(self, limits: Limits, readers: BodyReaders) -> None:
        self._limits, self._readers = limits, readers
        self.count = 0
        self.bodies_bytes = 0  # of bodies being received, waiting to be read, or being read
        self.prompts_bytes = 0  # of unfinished requests
        self.draining = False
        self._begun = 0  # requests, from before their body is received
        self._idle = asyncio.Event()  # set while there are none
        self._idle.set()

    @contextmanager
    def begun(self) -> Generator[None]:
        """A request is unfinished in this scope: `drain` waits for its end."""
        self._begun += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._begun -= 1
            if not self._begun:
                self._idle.set()

    async def read(self, http: web.Request, reading: BodyReading[Result]) -> tuple[Result, bytes]:
        """Receives the body and reads it; returns what was read, and the body. Raises RefusedRequestError, also where
        it is late or all bodies together are too large, and HTTPRequestEntityTooLarge."""
        try:
            async with asyncio.timeout(BODY_S):
                body = await self._received(http)
        except TimeoutError:
            raise RefusedRequestError(None, "the body did not come in time", status=408) from None
        self.bodies_bytes += len(body)

        def ended() -> None:
            self.bodies_bytes -= len(body)

        return await self._readers.read(reading, body, ended), body

    async def _received(self, http: web.Request) -> bytes:
        body, length = bytearray(), http.content_length or 0
        if length > HTTP_BODY_BYTES_MAX:
            raise web.HTTPRequestEntityTooLarge(HTTP_BODY_BYTES_MAX, length)
        try:
            async for piece in http.content.iter_any():
                body += piece
                self.bodies_bytes += len(piece)
                if len(body) > HTTP_BODY_BYTES_MAX:
                    raise web.HTTPRequestEntityTooLarge(HTTP_BODY_BYTES_MAX, len(body))
                if self.bodies_bytes > HTTP_BODIES_BYTES_MAX:
                    raise _full("too many request bodies at once", 1_000)
        finally:
            self.bodies_bytes -= len(body)
        return bytes(body)

    @contextmanager
    def hold(self, http: web.Request, prompt_bytes: int, *, answers: int) -> Generator[None]:
        """Counts a request for this many answers until its end. Raises RefusedRequestError beyond a limit of its API
        key, and beyond `rooms_max` or `prompts_bytes_max`: of 429 only where it could be served later."""
        limits = self._limits
        check_answers(answers, limits.rooms_max, "this router")
        if prompt_bytes > limits.prompts_bytes_max:
            text = f"{prompt_bytes} bytes of prompts for {answers} answers, at most {limits.prompts_bytes_max}"
            raise RefusedRequestError("n" if answers > 1 else None, text)
        if (use := http.get(API_KEY_USE)) is not None:
            use.widen(answers, asyncio.get_running_loop().time())
        if self.count + answers > limits.rooms_max or self.prompts_bytes + prompt_bytes > limits.prompts_bytes_max:
            raise _full("too many answers are still being read", 0)
        self.count += answers
        self.prompts_bytes += prompt_bytes
        try:
            yield
        finally:
            self.count -= answers
            self.prompts_bytes -= prompt_bytes

    async def drain(self, hurry: asyncio.Event) -> None:
        """Waits for the end of all requests, until the room deadline or `hurry`. Sets `draining`."""
        self.draining = True
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, hurry)]
        timeout_s = self._limits.room_deadline_ms / 1e3
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def _full(text: str, retry_ms: int) -> RefusedRequestError:
    return RefusedRequestError(None, text, code=Cause.FULL.value, status=429, retry_ms=retry_ms)


def accept(http: web.Request, config: RouterConfig) -> ClientRequest:
    """Takes a request to generate in: from now on it has its ids, which its answer gets by `stamp`."""
    use = http.get(API_KEY_USE)
    client = ClientRequest.accept(config.node, http.path, http.headers, traced=bool(config.otlp))
    client.key_name = "" if use is None else use.key.name
    client.authorization = http.headers.get("Authorization", "")
    client.tracestate = ",".join(http.headers.getall("tracestate", []))
    http[CLIENT] = client
    return client


async def stamp(http: web.Request, response: web.StreamResponse) -> None:
    """Names the request in the head of its answer."""
    if (client := http.get(CLIENT)) is not None:
        response.headers[REQUEST_ID] = client.request_id


def error(status: int, text: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """Returns OpenAI's error object."""
    kinds = {404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": text, "type": kind, "param": param, "code": code}})


def error_response(
    status: int, text: str, *, param: str | None = None, code: str | None = None, retry_ms: int = 0
) -> web.Response:
    """Returns OpenAI's error object; 429 and 503 carry Retry-After."""
    headers = {"Retry-After": str(max(1, math.ceil(retry_ms / 1e3)))} if status in (429, 503) else {}
    body = error(status, text, param=param, code=code)
    return web.Response(status=status, body=body, headers=headers, content_type=JSON)


def written(answer: WholeAnswer) -> web.Response:
    """Returns a whole answer as HTTP's."""
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)


def failure(failed: AnswerFailedError) -> web.Response:
    """Returns the answer to a request that failed before anything of its answer was sent."""
    if failed.answer is not None:
        return written(failed.answer)
    return error_response(failed.status, str(failed), param=failed.param, code=failed.code, retry_ms=failed.retry_ms)


def openai_errors(paths: str, others: tuple[str, ...] = ()) -> Middleware:
    """Returns a middleware that answers what failed in OpenAI's form, the HTTP library's refusals on OpenAI's paths and
    on `others`; `paths` names those that this router has."""

    @web.middleware
    async def through(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except AnswerFailedError as failed:
            return failure(failed)
        except web.HTTPException as refused:
            if not request.path.startswith(("/v1/", *others)):
                raise
            text = refused.text or refused.reason
            if refused.status in (404, 405):
                text += f"; this router has {paths}"
            return error_response(refused.status, text)

    return through
