"""One answer while its rooms generate: the HTTP task waits here for pieces of its choices, or for a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....tracing.ended_request import EndedRequest
from ...front.backend import AnswerFailedError
from ...front.client_request import ClientRequest
from ...front.text import TextCodec
from .answer_text import AnswerText, TextPiece
from .answers import AnswerForm, EndedChoice, usage_of
from .completions import Completion
from .room_records import RoomAttempt, room_record
from .router_effects import Fail, Finish, Refusal, Retry

TURN_TOKENS_MAX = 256  # of one answer that become text before the loop serves others: some milliseconds


class Reply:
    """One choice: its tokens wait here for its HTTP task, at most max_tokens of them. `news` is set at each change."""

    def __init__(self, client: ClientRequest, news: asyncio.Event, began_s: float) -> None:
        self.client, self.room = client, RoomAttempt(began_s)
        self.began_s = self.first_s = self.token_s = began_s  # token_s: when the latest token came
        self.streaming = False
        self._ids: list[int] = []
        self._logprobs = bytearray()
        self._news = news
        self.end: Finish | Fail | None = None

    def put(self, ids: list[int], logprobs: bytes, now: float) -> None:
        """Appends ids, with their packed logprobs."""
        if not self.streaming:
            self.first_s, self.client.first_s = now, self.client.first_s or now
        if self.room.first_s is None:
            self.room.first_s = now
        self.room.tokens += len(ids)
        self.streaming, self.token_s = True, now
        self._ids += ids
        self._logprobs += logprobs
        self._news.set()

    def ended(self, end: Finish | Fail | Retry, now: float) -> EndedRequest:
        """Its room has ended, and with Retry the choice has another one now. Returns the room's record."""
        record = room_record(self.client, self.room, end, now)
        self.client.ended_rooms.append(record)
        if isinstance(end, Retry):
            self.room = RoomAttempt(now)
            self.client.retried = True
            self.client.rooms.append(end.next_room)
            self.client.resumptions += end.resumed
        else:
            self.end = end
            self._news.set()
        return record

    @property
    def waiting(self) -> int:
        """Ids that were not taken."""
        return len(self._ids)

    def take(self, most: int) -> tuple[list[int], bytes]:
        """Returns the next ids, and their logprobs."""
        count = min(most, len(self._ids))
        of_logprobs = count * (len(self._logprobs) // max(1, len(self._ids)))
        taken = self._ids[:count], bytes(self._logprobs[:of_logprobs])
        del self._ids[:count], self._logprobs[:of_logprobs]
        return taken


@dataclass(slots=True, eq=False)
class _Choice:
    """One choice: its room's id at the router's core, and what came of it."""

    request: int
    reply: Reply
    text: AnswerText
    echo: str
    begun: bool = False
    ended: EndedChoice | None = None


@dataclass(frozen=True, slots=True)
class ChoiceNews:
    """What one choice gains. `first`: nothing of it came before."""

    index: int
    piece: TextPiece
    first: bool
    ended: EndedChoice | None


class GrowingAnswer:
    """All choices of one answer. `stop` ends a room whose answer has met a stop string; it closes the room's reply."""

    def __init__(
        self,
        completion: Completion,
        replies: dict[int, Reply],
        news: asyncio.Event,
        text: TextCodec,
        stop: Callable[[int], None],
    ) -> None:
        self.completion, self._news, self._stop = completion, news, stop
        self.failed: Fail | None = None  # one failure fails the answer
        echoes = [each for each in completion.echoes or ("",) * len(completion.rooms) for _ in range(completion.n)]
        self._choices = [
            _Choice(
                request,
                reply,
                AnswerText(text, room.sampling, completion.stops, keep_stop=completion.keep_stop),
                echo,
            )
            for (request, reply), room, echo in zip(replies.items(), completion.rooms, echoes, strict=False)
        ]
        self._left = len(self._choices)

    @property
    def ended(self) -> bool:
        """Whether all choices are complete."""
        return not self._left

    @property
    def choices(self) -> list[EndedChoice]:
        """All choices, once they are complete."""
        return [each.ended for each in self._choices if each.ended is not None]

    async def next(self) -> list[ChoiceNews]:
        """Waits for the next pieces, of TURN_TOKENS_MAX tokens together. None come once the answer has failed."""
        if self._news.is_set():
            await asyncio.sleep(0)  # A client that was slow to read left many tokens: others have their turn first.
        await self._news.wait()
        self._news.clear()
        news: list[ChoiceNews] = []
        left = TURN_TOKENS_MAX
        for index, choice in enumerate(self._choices):
            if choice.ended is not None:
                continue
            if isinstance(choice.reply.end, Fail):
                self.failed = choice.reply.end
                return []
            ids, logprobs = choice.reply.take(left)
            left -= len(ids)
            gained = self._advance(index, choice, ids, logprobs)
            if gained is not None:
                news.append(gained)
            if choice.reply.waiting and choice.ended is None:
                self._news.set()
        return news

    def _advance(self, index: int, choice: _Choice, ids: list[int], logprobs: bytes) -> ChoiceNews | None:
        if not ids and (choice.reply.end is None or choice.reply.waiting):
            return None
        first, choice.begun = not choice.begun, True
        piece = choice.text.feed(ids, logprobs)
        if choice.text.stopped and choice.reply.end is None:
            self._stop(choice.request)
        finish = None if choice.reply.waiting and not choice.text.stopped else choice.reply.end
        if isinstance(finish, Finish):
            piece += choice.text.end()
        if first and choice.echo:
            piece = TextPiece(choice.echo) + piece
        if isinstance(finish, Finish):
            decoded = finish.room.decode is None or finish.room.decode.reason == "stop"
            reason = "stop" if choice.text.stopped or decoded else "length"
            choice.ended = EndedChoice(piece, reason, choice.text.tokens, finish.room)
            self._left -= 1
        return ChoiceNews(index, piece, first, choice.ended)


def failed_answer(end: Fail | Refusal) -> AnswerFailedError:
    """The error of a room that failed, or was not accepted."""
    return AnswerFailedError(end.detail, end.cause, retry_ms=end.retry_ms)


class AnswerEvents:
    """As AnswerStream: an answer as server-sent events. `close` is called at its end."""

    status, length, events = 200, None, True
    headers: Mapping[str, str] = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}

    def __init__(self, form: AnswerForm, answer: GrowingAnswer, close: Callable[[], None]) -> None:
        self._form, self._answer, self._close = form, answer, close
        self._news: list[ChoiceNews] = []
        self._complete = False

    async def begin(self) -> None:
        """Waits for the first pieces. Raises AnswerFailedError: nothing was sent yet, so a status can report it."""
        while not self._news:
            self._news = await self._answer.next()
            if self._answer.failed is not None:
                raise failed_answer(self._answer.failed)

    async def more(self) -> bytes:
        """As AnswerStream.more."""
        if self._complete:
            return b""
        await self.begin()
        form, news, self._news = self._form, self._news, []
        events = [form.chunk(each.index, each.piece, first=each.first, ended=each.ended) for each in news]
        if self._answer.ended:
            self._complete, completion = True, self._answer.completion
            if completion.include_usage:
                usage = usage_of(completion.prompt_tokens, self._answer.choices, completion.n)
                events.append(form.usage_chunk(usage))
            events.append(b"[DONE]")
        return b"".join(b"data: " + event + b"\n\n" for event in events)

    def close(self, *, complete: bool) -> None:
        """As AnswerStream.close. A room knows itself whether it is complete."""
        del complete
        self._close()
