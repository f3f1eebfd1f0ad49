"""One choice of an answer as it grows: its text up to a stop string, and the logprobs of its tokens. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .....wire import Logprobs, Sampling, unpack_logprobs
from ...front.text import TextCodec


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token with its logprobs; its text begins at character `offset` of the generated text."""

    id: int
    offset: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What a choice gains: text, and the tokens that have logprobs."""

    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()

    def __add__(self, more: TextPiece) -> TextPiece:
        return TextPiece(self.text + more.text, self.tokens + more.tokens)

    @staticmethod
    def joined(pieces: Sequence[TextPiece]) -> TextPiece:
        """All pieces in one."""
        return TextPiece("".join(piece.text for piece in pieces), tuple(t for piece in pieces for t in piece.tokens))


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
    algorithm of Knuth, Morris and Pratt: its time does not grow with the stop's length. `new` completes no stop."""
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
