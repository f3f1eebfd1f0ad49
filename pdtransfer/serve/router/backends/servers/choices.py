"""Several choices of a prompt, where a hand-off is for one: a request for each of them, and one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from .....errors import Cause, RemoteProtocolError
from ...front.json_bodies import AnswerFailedError
from .attempt import Relay, forget
from .joined_choices import JoinedAnswers, JoinedEvents
from .server_request import ServerRequest

JOINED_INLINE_BYTES_MAX = 32 << 10  # what is joined on the loop; more in a thread


class Choices:
    """As AnswerStream. `begin` comes first. A request that fails ends the others.

    Those behind the first one are sent once its prompt is computed: the same prefill server has it in its prefix cache.
    Each is made in a turn of the loop of its own, since it may have a large body.
    """

    def __init__(self, relay: Relay, of_choice: Callable[[int], ServerRequest]) -> None:
        """`of_choice` makes the request for choice i of those of `relay`."""
        self._count, self._relay, self._of_choice = relay.request.choices, relay, of_choice
        self._requests: dict[int, Relay] = {}
        self._turn = asyncio.Lock()
        self._reads: dict[asyncio.Task[bytes], int] = {}  # of those that have not ended
        self._joined: JoinedAnswers | JoinedEvents | None = None
        self._piece, self._ended = b"", False
        self.length, self.events = None, False
        self.headers: Mapping[str, str] = {}

    async def begin(self) -> None:
        """Waits for the first events of a stream, or for all of an answer. Raises AnswerFailedError."""
        self._reads = {asyncio.create_task(self._begin(number)): number for number in range(self._count)}
        try:
            self._piece = await self.more()
        except BaseException:
            self.close(complete=False)
            raise
        if not self.events:
            self.length = len(self._piece)

    async def more(self) -> bytes:
        """As AnswerStream.more."""
        piece, self._piece = self._piece, b""
        try:
            while not piece and not self._ended:
                piece = await self._next()
        except RemoteProtocolError as error:
            raise AnswerFailedError(f"the answers to its choices do not fit: {error}", Cause.BREACH) from None
        return piece

    def close(self, *, complete: bool) -> None:
        """As AnswerStream.close. After an error event some have not ended."""
        for task in self._reads:
            task.cancel()
            task.add_done_callback(forget)
        unfinished = set(self._reads.values())
        for number, request in self._requests.items():
            request.close(complete=complete and number not in unfinished)

    async def _begin(self, number: int) -> bytes:
        """Returns the first bytes of an answer."""
        if number > 0:
            await self._relay.computed.wait()
        async with self._turn:
            await asyncio.sleep(0)
            request = self._requests[number] = replace(self._relay, request=self._of_choice(number))
        try:
            await request.begin()
        except AnswerFailedError as failed:
            if failed.answer is None:
                raise
            text = f"choice {number}: {failed}: {failed.answer.body[:256].decode(errors='replace')}"
            raise AnswerFailedError(text, failed.cause, status=failed.status, answer=failed.answer) from None
        self._relay.computed.set()
        return await request.more()

    async def _next(self) -> bytes:
        """Waits for the next bytes of any answer; returns what the client gets of them. Raises AnswerFailedError and
        RemoteProtocolError."""
        done, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
        new = b""
        for task in done:
            piece, number = task.result(), self._reads.pop(task)
            request = self._requests[number]
            if self._joined is None:
                self.headers, self.events = request.headers, request.events
                self._joined = (JoinedEvents if self.events else JoinedAnswers)(self._count)
            new += self._joined.take(number, piece)
            if self._joined.failed:
                break
            if piece:
                self._reads[asyncio.create_task(request.more())] = number
        assert self._joined is not None
        if not self._reads or self._joined.failed:
            self._ended = True
            in_thread = self._joined.kept_bytes > JOINED_INLINE_BYTES_MAX
            new += await asyncio.to_thread(self._joined.end) if in_thread else self._joined.end()
        return new
