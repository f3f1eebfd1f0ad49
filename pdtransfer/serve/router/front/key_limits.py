"""How much a client may ask for at once by its API key. No I/O."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from .json_bodies import RefusedRequestError


def _over(text: str, retry_ms: int) -> RefusedRequestError:
    return RefusedRequestError(None, text, code="rate_limit_exceeded", status=429, retry_ms=retry_ms)


def check_answers(answers: int, most: int, where: str) -> None:
    """Raises RefusedRequestError for a request of more answers than may ever be open at once."""
    if answers > most:
        raise RefusedRequestError("n", f"{answers} answers, {where} takes at most {most} at once")


@dataclass(slots=True, eq=False)
class ApiKey:
    """One key's limits and its use. They count answers: a request has one, or `n` for each of its prompts. `tokens` is
    what its rate has left at `filled_at`, in answers; a request of more than a second's takes it below zero."""

    digest: bytes
    name: str
    open_max: int | None = None  # answers at once
    rate: float | None = None  # answers a second; as many may come at once as in a second
    open_count: int = 0
    tokens: float = 0.0
    filled_at: float = float("-inf")

    @contextmanager
    def use(self, now: float) -> Generator[KeyUse]:
        """Counts a request as one open answer in this scope, or as more by `KeyUse.widen`. Raises RefusedRequestError
        beyond a limit."""
        use = KeyUse(self)
        use.widen(1, now)
        try:
            yield use
        finally:
            self.open_count -= use.answers

    def take(self, more: int, answers: int, now: float) -> None:
        """Counts `more` answers of a request of `answers`. Raises RefusedRequestError, and counts nothing then."""
        if self.open_max is not None and self.open_count + more > self.open_max:
            check_answers(answers, self.open_max, "this API key")
            text = f"{self.open_count} answers of this API key are open, and {more} more are asked for"
            raise _over(f"{text}: at most {self.open_max}", 1_000)
        if self.rate is not None:
            burst = max(1.0, self.rate)
            self.tokens = min(burst, self.tokens + max(0.0, now - self.filled_at) * self.rate)
            self.filled_at = now
            needed = min(burst, answers) - (answers - more)
            if self.tokens < needed:
                wait_ms = int((needed - self.tokens) / self.rate * 1e3) + 1
                raise _over(f"this API key may ask for {self.rate:g} answers a second", wait_ms)
            self.tokens -= more
        self.open_count += more


@dataclass(slots=True, eq=False)
class KeyUse:
    """One request of a key, and how many answers it counts as."""

    key: ApiKey
    answers: int = 0

    def widen(self, answers: int, now: float) -> None:
        """Counts the request as this many answers from now on. Raises RefusedRequestError beyond a limit: what it took
        of the key's rate is given back then."""
        try:
            self.key.take(answers - self.answers, answers, now)
        except RefusedRequestError:
            self.key.tokens += self.answers
            raise
        self.answers = answers
