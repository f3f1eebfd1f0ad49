"""The API keys of the router's clients: who may ask, and for how much at once. No I/O but reading the file.

A key itself is kept nowhere: only its digest under a secret of this process. So neither a look-up's time nor a dump of
an error reveals anything of it.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ....bus.keys import read_guarded
from ....errors import ConfigError
from ....limits import API_KEYS_MAX, LIMIT_COUNT, NAME_LENGTH_MAX
from .json_bodies import RefusedRequestError

KEY_LENGTHS = 16, 256
RATES = 1e-3, 1e6  # requests a second

_KEY = re.compile(r"[!-~]+")
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_LENGTH_MAX - 1}}}")
_FORM = "KEY [name] [open=N] [rate=N] [# comment]"


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


class ApiKeys:
    """All keys that a router knows. `read` may be called again: what is open under a key that stays counts on."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys: dict[bytes, ApiKey] = {}

    def read(self, path: Path) -> None:
        """Reads the file and replaces all keys. Raises ConfigError, and changes nothing then."""
        text = read_guarded(path, forbidden=0o007, advice=f"others may read or change it: chmod o-rwx {path}")
        self.replace(text, source=str(path))

    def replace(self, text: str, *, source: str) -> None:
        """Takes the keys from this text, one a line: `KEY [name] [open=N] [rate=N]`. Raises ConfigError."""
        keys: dict[bytes, ApiKey] = {}
        lines: dict[bytes | str, int] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition(" #")[0].split()
            if not words or words[0].startswith("#"):
                continue
            where = f"{source}:{number}"
            key = self._parse(words, where, number)
            if key.digest in keys:
                raise ConfigError(f"{where}: key: the same as in line {lines[key.digest]}")
            if key.name in lines:
                raise ConfigError(f"{where}: name: {key.name!r} is already in line {lines[key.name]}")
            if len(keys) >= API_KEYS_MAX:
                raise ConfigError(f"{where}: more than {API_KEYS_MAX} keys")
            keys[key.digest], lines[key.digest], lines[key.name] = key, number, number
        if not keys:
            raise ConfigError(f"{source}: no key: a line is '{_FORM}'")
        for digest, key in keys.items():
            if (before := self._keys.get(digest)) is not None:
                # The object stays, since open requests hold it.
                before.name, before.open_max, before.rate = key.name, key.open_max, key.rate
                keys[digest] = before
        self._keys = keys

    def find(self, authorization: str | None) -> ApiKey | None:
        """Returns the key of an Authorization header; None for none that is known. The header is `Bearer KEY`, or
        `Basic` as browsers send it, with the key as the password."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() == "basic":
            scheme, key = "bearer", _password(key)
        if scheme.lower() == "bearer" and len(key) <= KEY_LENGTHS[1] and _KEY.fullmatch(key):
            digest = self._digest(key)
            api_key = self._keys.get(digest)
            if api_key is not None and hmac.compare_digest(api_key.digest, digest):
                return api_key
        return None

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("ascii"), "sha256")

    def _parse(self, words: list[str], where: str, number: int) -> ApiKey:
        """One line; an error never shows the key."""
        key, low, high = words[0], *KEY_LENGTHS
        if not _KEY.fullmatch(key) or not low <= len(key) <= high:
            raise ConfigError(f"{where}: key: must be {low} to {high} printable ASCII characters without spaces")
        api_key = ApiKey(self._digest(key), f"line-{number}")
        for index, word in enumerate(words[1:]):
            setting, equals, value = word.partition("=")
            if not equals and index == 0:
                if not _NAME.fullmatch(word):
                    raise ConfigError(f"{where}: name: {word[:64]!r} is not letters, digits, '.', '_', '-'")
                api_key.name = word
            elif setting == "open" and equals:
                api_key.open_max = int(_number(value, f"{where}: open", *LIMIT_COUNT, whole=True))
            elif setting == "rate" and equals:
                api_key.rate = _number(value, f"{where}: rate", *RATES, whole=False)
            else:
                raise ConfigError(f"{where}: word {index + 2}: a line is '{_FORM}'")
        return api_key


def _password(credentials: str) -> str:
    """The password of Basic credentials; empty where they are none."""
    if len(credentials) > 2 * KEY_LENGTHS[1]:
        return ""
    try:
        return base64.b64decode(credentials, validate=True).decode("ascii").partition(":")[2]
    except ValueError:
        return ""


def _number(text: str, where: str, low: float, high: float, *, whole: bool) -> float:
    form = r"\d{1,7}" if whole else r"\d{1,7}(\.\d{1,6})?"
    if re.fullmatch(form, text, re.ASCII) is None or not low <= float(text) <= high:
        raise ConfigError(f"{where}: {text[:32]!r} is not a number from {low:g} to {high:g}")
    return float(text)
