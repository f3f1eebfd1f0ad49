"""One answer while its rooms generate: its choices become text, and the HTTP task waits for what they gain."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import msgspec

from .....errors import SUCCESSES
from .....wire import End, Sampling, unpack_logprobs
from ....tracing.ended_request import EndedRequest
from ...front.client_request import ClientRequest, spans_of
from ...front.json_bodies import AnswerFailedError
from ...front.text import TextCodec
from .answers import LOGPROBS_INLINE_MAX, ScoredToken, TextPiece, extension, logprobs
from .completions import Completion
from .router_effects import RoomEnded


class AnswerText:
    """Turns the ids of one choice into pieces. Text that may be the beginning of a stop string is held back, and so are
    the logprobs of its tokens. `stops` count from the end of the text of the first `min_tokens` on."""

    def __init__(self, codec: TextCodec, sampling: Sampling, stops: tuple[str, ...], *, keep_stop: bool) -> None:
        self._detokenizer, self._sampling = codec.detokenizer(), sampling
        self._stops, self._keep_stop = stops, keep_stop
        self._begun = [0] * len(stops)  # how many characters of each stop string the held text ends with
        self._held = ""  # text that may begin a stop string
        self._scored: list[ScoredToken] = []  # of text that is held back
        self._released = 0  # characters
        self.tokens = 0
        self.stopped = False  # a stop string was met: nothing follows

    def feed(self, ids: list[int], logprobs: bytes) -> TextPiece:
        """Takes the next ids. Those after a stop string are dropped and not counted."""
        scores = unpack_logprobs("logprobs", logprobs, self._sampling, len(ids))
        text = ""
        for index, token in enumerate(ids):
            if self.stopped:
                break
            self.tokens += 1
            if scores:
                self._scored.append(ScoredToken(token, self._released + len(self._held), scores[index]))
            text += self._release(self._detokenizer.feed(token), examine=self.tokens > self._sampling.min_tokens)
        return self._piece(text)

    def end(self) -> TextPiece:
        """Returns all that was held back."""
        text = ""
        if not self.stopped:
            text = self._release(self._detokenizer.end(), examine=self.tokens > self._sampling.min_tokens)
        if not self.stopped:
            self._released += len(self._held)
            text, self._held = text + self._held, ""
        return self._piece(text)

    def _release(self, new: str, *, examine: bool) -> str:
        """Returns the text that can go out."""
        self._held += new
        upto, end = len(self._held), len(self._held)
        if self._stops and examine:
            matches = [(position, stop) for stop in self._stops if (position := self._held.find(stop)) >= 0]
            if matches:
                upto, stop = min(matches)
                upto += len(stop) if self._keep_stop else 0
                self.stopped, end = True, upto
            else:
                self._begun = [_begun(*begun, new) for begun in zip(self._stops, self._begun, strict=True)]
                upto -= max(self._begun)
        text, self._held = self._held[:upto], self._held[upto:end]
        self._released += len(text)
        return text

    def _piece(self, text: str) -> TextPiece:
        # Without held text, tokens without any are out as well: special ones, and parts of a character.
        count = len(self._scored)
        if self._held or self.stopped:
            count = bisect_left(self._scored, self._released, key=lambda scored: scored.offset)
        out = tuple(self._scored[:count])
        del self._scored[: None if self.stopped else count]
        return TextPiece(text, out)


def _begun(stop: str, begun: int, new: str) -> int:
    """How many characters of the stop string a text ends with that ended with `begun` of them and gains `new`, by the
    algorithm of Knuth, Morris and Pratt. Its time does not grow with the stop's length. `new` completes no stop."""
    borders = _borders(stop)
    for character in new:
        while begun and stop[begun] != character:
            begun = borders[begun - 1]
        begun += stop[begun] == character
    return begun


@lru_cache(maxsize=1_024)
def _borders(stop: str) -> list[int]:
    """For each beginning of a stop string, the longest shorter one that it ends with."""
    borders = [0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length - 1]
        borders.append(length + (stop[length] == character))
    return borders


TURN_TOKENS_MAX = 256  # of one answer that become text before the loop serves others: some milliseconds


class Choice:
    """Choice `index` of an answer: its tokens wait here for the HTTP task, at most max_tokens of them, become `text`.
    `news` is set at each change. `stop` ends its room where the text has met a stop string, and so the choice. Times
    are those of the router's monotonic clock."""

    def __init__(
        self,
        index: int,
        client: ClientRequest,
        news: asyncio.Event,
        stop: Callable[[], None],
        text: AnswerText,
        *,
        echo: str,
    ) -> None:
        self.index, self.client, self._news, self._stop = index, client, news, stop
        self.began_s = self.token_s = now = time.monotonic()  # token_s: when the latest token came
        self.first_s: float | None = None
        self._ids: list[int] = []
        self._logprobs = bytearray()
        self.text, self._echo, self.shown = text, echo, False  # shown: a stream has a part of it
        self.end: RoomEnded | None = None  # of its last room
        self.finish_reason: str | None = None  # once its text is complete
        self._begin_room(now)

    def _begin_room(self, now: float) -> None:
        self._room_began_s, self._room_tokens = now, 0
        self._room_first_s: float | None = None

    def put(self, ids: list[int], logprobs: bytes, now: float) -> None:
        """Appends ids, with their packed logprobs."""
        self.token_s, self.first_s = now, self.first_s or now
        self.client.first_s, self._room_first_s = self.client.first_s or now, self._room_first_s or now
        self._room_tokens += len(ids)
        self._ids += ids
        self._logprobs += logprobs
        self._news.set()

    def room_ended(self, end: RoomEnded, now: float) -> EndedRequest:
        """Its room has ended. Returns the room's record."""
        record = self._record(end, now)
        self.client.ended_rooms.append(record)
        if end.next_room is not None:
            self._begin_room(now)
            self.client.retried = True
            self.client.rooms.append(end.next_room)
            self.client.resumptions += end.resumed
        else:
            self.end = end
            self._news.set()
        return record

    def _record(self, end: RoomEnded, now: float) -> EndedRequest:
        prefill, decode, total_s = end.prefill, end.decode, now - self._room_began_s
        first_s = None if self._room_first_s is None else self._room_first_s - self._room_began_s
        # Without an End of decode the router ended the answer itself, at a stop string.
        success = "stop" if decode is None else decode.reason
        return self.client.record(
            rooms=(end.id,),
            prefill=end.prefill_node,
            decode=end.decode_node,
            prompt_tokens=end.prompt_tokens,
            tokens=self._room_tokens,
            reason=success if end.cause is None else "",
            cause=end.cause,
            detail=end.detail,
            retried=end.next_room is not None,
            resumptions=end.resumptions,
            enable_hisparse=end.enable_hisparse,
            total_s=total_s,
            first_token_s=first_s,
            spans=spans_of(end.id, first_s, total_s),
            cached_tokens=decode.prefix if decode is not None and decode.reason in SUCCESSES else None,
            kv_bytes=0 if decode is None else decode.kv_bytes,
            queue_s=_seconds(prefill, "queue_us"),
            prefill_s=_seconds(prefill, "compute_us"),
            transfer_s=_seconds(prefill, "transfer_us"),
            admission_s=_seconds(decode, "admission_us"),
            copy_s=_seconds(prefill, "copy_us"),
        )

    @property
    def waiting(self) -> int:
        """Ids that were not taken."""
        return len(self._ids)

    @property
    def room(self) -> RoomEnded:
        """What is known of its last room, once its text is complete."""
        assert self.end is not None
        return self.end

    def advance(self, most: int) -> tuple[TextPiece | None, int]:
        """Makes text of the next ids; None where it has nothing new. Returns how many ids they were, too."""
        count = min(most, len(self._ids))
        if not count and (self.end is None or self.waiting):
            return None, 0
        of_logprobs = count * (len(self._logprobs) // max(1, len(self._ids)))
        ids, logprobs = self._ids[:count], bytes(self._logprobs[:of_logprobs])
        del self._ids[:count], self._logprobs[:of_logprobs]
        piece = self.text.feed(ids, logprobs)
        if self.text.stopped and self.end is None:
            self._stop()
        finish = None if self.waiting and not self.text.stopped else self.end
        if finish is not None and finish.cause is None:
            piece += self.text.end()
            decoded = finish.decode is None or finish.decode.reason == "stop"
            self.finish_reason = "stop" if self.text.stopped or decoded else "length"
        if self._echo:
            piece, self._echo = TextPiece(self._echo) + piece, ""
        return piece, count


def _seconds(end: End | None, field: str) -> float | None:
    """What a worker measured, in microseconds; 0 stands for what is not known."""
    return None if end is None else getattr(end, field) / 1e6 or None


class Answer:
    """All choices of one answer: as AnswerStream its server-sent events, or all of it. One failure fails the answer.
    `stop` ends the room of a choice whose text has met a stop string, and `end` all that have not ended."""

    length: int | None = None
    events = True
    headers: Mapping[str, str] = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}

    def __init__(
        self,
        completion: Completion,
        client: ClientRequest,
        codec: TextCodec,
        stop: Callable[[int], None],
        end: Callable[[Answer], None],
    ) -> None:
        self.completion, self.client, self._codec, self._stop, self._end = completion, client, codec, stop, end
        self.choices: dict[int, Choice] = {}  # by their first rooms
        self._created, self._news = int(time.time()), asyncio.Event()
        self._pieces: dict[Choice, TextPiece] = {}
        self._complete = False

    def add(self, room: int) -> Choice:
        """The next choice, whose room has begun."""
        completion, index = self.completion, len(self.choices)
        sampling = completion.rooms[index].sampling
        text = AnswerText(self._codec, sampling, completion.stops, keep_stop=completion.keep_stop)
        echo = completion.echoes[index // completion.n] if completion.echoes else ""
        self.client.rooms.append(room)
        stop = partial(self._stop, room)
        choice = self.choices[room] = Choice(index, self.client, self._news, stop, text, echo=echo)
        return choice

    @property
    def ended(self) -> bool:
        """True if all choices are complete."""
        return None not in [choice.finish_reason for choice in self.choices.values()]

    async def _next(self) -> dict[Choice, TextPiece]:
        """Waits for the next pieces: of TURN_TOKENS_MAX tokens together. Raises AnswerFailedError."""
        if self._news.is_set():
            await asyncio.sleep(0)  # A client that was slow to read left many tokens: others have their turn first.
        await self._news.wait()
        self._news.clear()
        pieces: dict[Choice, TextPiece] = {}
        left = TURN_TOKENS_MAX
        for choice in self.choices.values():
            if choice.finish_reason is not None:
                continue
            if choice.end is not None and choice.end.cause is not None:
                raise AnswerFailedError(choice.end.detail, choice.end.cause, retry_ms=choice.end.retry_ms)
            piece, count = choice.advance(left)
            left -= count
            if piece is not None:
                pieces[choice] = piece
            if choice.waiting and choice.finish_reason is None:
                self._news.set()
        return pieces

    async def whole(self) -> bytes:
        """All of it, in one object. Raises AnswerFailedError."""
        pieces: dict[Choice, list[TextPiece]] = {choice: [] for choice in self.choices.values()}
        while not self.ended:
            for choice, piece in (await self._next()).items():
                pieces[choice].append(piece)
        texts = {choice: TextPiece.joined(of_choice) for choice, of_choice in pieces.items()}
        if sum(len(text.tokens) for text in texts.values()) <= LOGPROBS_INLINE_MAX:
            return self._written(texts)
        return await asyncio.to_thread(self._written, texts)

    async def begin(self) -> None:
        """Waits for the first pieces. Raises AnswerFailedError: nothing was sent yet, so a status can report it."""
        while not self._pieces:
            self._pieces = await self._next()

    async def more(self) -> bytes:
        """As AnswerStream.more."""
        if self._complete:
            return b""
        await self.begin()
        pieces, self._pieces = self._pieces, {}
        events = [self._chunk(choice, piece) for choice, piece in pieces.items()]
        if self.ended:
            self._complete = True
            if self.completion.include_usage:
                events.append(self._object([], {"usage": self._usage()}, chunk=True))
            events.append(b"[DONE]")
        return b"".join(b"data: " + event + b"\n\n" for event in events)

    def close(self, *, complete: bool) -> None:
        """As AnswerStream.close. A room knows itself whether it is complete."""
        del complete
        self._end(self)

    # Its objects

    def _chunk(self, choice: Choice, piece: TextPiece) -> bytes:
        """One chunk of a stream; the last of a choice has its finish reason and the `pdtransfer` extension."""
        delta = {"content": piece.text} if choice.shown else {"role": "assistant", "content": piece.text}
        choice.shown = True
        more: dict[str, object] = {"usage": None} if self.completion.include_usage else {}
        if choice.finish_reason is not None:
            more["pdtransfer"] = extension(choice.room)
        content = {"delta": delta} if self.completion.chat else {"text": piece.text}
        return self._object([self._of_choice(choice, piece, content)], more, chunk=True)

    def _written(self, texts: Mapping[Choice, TextPiece]) -> bytes:
        """The answer in one object. `pdtransfer` is one extension, or a list where there are several choices."""
        choices: list[object] = []
        for choice, piece in texts.items():
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            content = {"message": message} if self.completion.chat else {"text": piece.text}
            choices.append(self._of_choice(choice, piece, content))
        extensions = [extension(choice.room) for choice in texts]
        more = {"usage": self._usage(), "pdtransfer": extensions if len(extensions) > 1 else extensions[0]}
        return self._object(choices, more, chunk=False)

    def _of_choice(self, choice: Choice, piece: TextPiece, content: Mapping[str, object]) -> dict[str, object]:
        completion, scores = self.completion, None
        if completion.rooms[0].sampling.logprobs:
            scores = logprobs(self._codec, piece.tokens, chat=completion.chat)
        return {"index": choice.index, **content, "logprobs": scores, "finish_reason": choice.finish_reason}

    def _usage(self) -> dict[str, object]:
        """OpenAI's usage. Cached tokens are those of the first choice of each prompt. They are missing where one was
        resumed, or where a stop string ended one, since decode reports them at its own end."""
        prompt_tokens = self.completion.prompt_tokens
        choices = list(self.choices.values())
        completion_tokens = sum(choice.text.tokens for choice in choices)
        rooms = [choice.room for choice in choices[:: self.completion.n]]
        prefixes = [room.decode.prefix for room in rooms if room.decode is not None and not room.resumptions]
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(prefixes)} if len(prefixes) == len(rooms) else None,
        }

    def _object(self, choices: Sequence[object], more: Mapping[str, object], *, chunk: bool) -> bytes:
        chat = self.completion.chat
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"
        return msgspec.json.encode(
            {
                "id": f"{'chatcmpl' if chat else 'cmpl'}-{next(iter(self.choices)):016x}",
                "object": kind,
                "created": self._created,
                "model": self.completion.model or "",
                "choices": choices,
                **more,
            }
        )
