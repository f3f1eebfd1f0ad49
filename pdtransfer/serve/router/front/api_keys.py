"""The API keys of the router's clients: who may ask. No I/O but reading the file.

A key itself is kept nowhere: only its digest under a secret of this process. So neither a look-up's time nor a dump of
an error reveals anything of it.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from pathlib import Path

from ....bus.keys import read_guarded
from ....errors import ConfigError
from ....limits import API_KEYS_MAX, LIMIT_COUNT, NAME_LENGTH_MAX
from .key_limits import ApiKey

KEY_LENGTHS = 16, 256
RATES = 1e-3, 1e6  # requests a second

_KEY = re.compile(r"[!-~]+")
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_LENGTH_MAX - 1}}}")
_FORM = "KEY [name] [open=N] [rate=N] [# comment]"


class ApiKeys:
    """All keys that a router knows. `read` may be called again: what is open under a key that stays counts on."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._keys: dict[bytes, ApiKey] = {}

    def __len__(self) -> int:
        return len(self._keys)

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
