"""One answer while its rooms generate: the HTTP task waits here for pieces of its choices, or for a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....tracing.ended_request import EndedRequest
from ...front.backend import AnswerFailedError
from ...front.client_request import ClientRequest
from .answer_text import AnswerText, TextPiece
from .answers import AnswerForm, EndedChoice, usage_of
from .completions import Completion
from .room_records import RoomAttempt, room_record
from .router_effects import Fail, Finish, Refusal, Retry

TURN_TOKENS_MAX = 256  # of one answer that become text before the loop serves others: some milliseconds


@dataclass(frozen=True, slots=True)
class ChoiceNews:
    """What one choice gains. `first`: nothing of it came before."""

    index: int
    piece: TextPiece
    first: bool
    ended: EndedChoice | None


class Choice:
    """One choice of an answer: its tokens wait here for the HTTP task, at most max_tokens of them, and become `text`.
    `news` is set at each change. `stop` ends its room where the text has met a stop string, and so the choice."""

    def __init__(
        self,
        client: ClientRequest,
        news: asyncio.Event,
        stop: Callable[[], None],
        text: AnswerText,
        *,
        echo: str,
        began_s: float,
    ) -> None:
        self.client, self.room, self._news, self._stop = client, RoomAttempt(began_s), news, stop
        self.began_s = self.first_s = self.token_s = began_s  # token_s: when the latest token came
        self.streaming = False
        self._ids: list[int] = []
        self._logprobs = bytearray()
        self.text, self._echo, self._begun = text, echo, False
        self.end: Finish | Fail | None = None  # of its last room
        self.ended: EndedChoice | None = None  # once its text is complete

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

    def room_ended(self, end: Finish | Fail | Retry, now: float) -> EndedRequest:
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

    def advance(self, index: int, ids: list[int], logprobs: bytes) -> ChoiceNews | None:
        """Makes text of what was taken; None where it has nothing new."""
        if not ids and (self.end is None or self.waiting):
            return None
        first, self._begun = not self._begun, True
        piece = self.text.feed(ids, logprobs)
        if self.text.stopped and self.end is None:
            self._stop()
        finish = None if self.waiting and not self.text.stopped else self.end
        if isinstance(finish, Finish):
            piece += self.text.end()
        if first and self._echo:
            piece = TextPiece(self._echo) + piece
        if isinstance(finish, Finish):
            decoded = finish.room.decode is None or finish.room.decode.reason == "stop"
            reason = "stop" if self.text.stopped or decoded else "length"
            self.ended = EndedChoice(reason, self.text.tokens, finish.room)
        return ChoiceNews(index, piece, first, self.ended)


class GrowingAnswer:
    """All choices of one answer."""

    def __init__(self, completion: Completion, choices: list[Choice], news: asyncio.Event) -> None:
        self.completion, self._choices, self._news = completion, choices, news
        self.failed: Fail | None = None  # one failure fails the answer

    @property
    def ended(self) -> bool:
        """Whether all choices are complete."""
        return len(self.choices) == len(self._choices)

    @property
    def choices(self) -> list[EndedChoice]:
        """Those that are complete."""
        return [choice.ended for choice in self._choices if choice.ended is not None]

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
            if isinstance(choice.end, Fail):
                self.failed = choice.end
                return []
            ids, logprobs = choice.take(left)
            left -= len(ids)
            if (gained := choice.advance(index, ids, logprobs)) is not None:
                news.append(gained)
            if choice.waiting and choice.ended is None:
                self._news.set()
        return news


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
        events = [form.chunk(new.index, new.piece, first=new.first, ended=new.ended) for new in news]
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
