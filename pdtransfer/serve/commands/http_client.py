"""Asks a router or an engine over HTTP, for commands that run beside it."""

from __future__ import annotations

import http.client
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import ConfigError, WorldError
from ..process.logs import printable

WAIT_S = 5.0  # for one answer
ANSWER_BYTES_MAX = 16 << 20


class HttpClient:
    """One connection to a server, made anew when it breaks."""

    def __init__(self, name: str, url: str, token: str = "", *, wait_s: float = WAIT_S) -> None:
        """`name` is the flag of the URL, `token` for a server that asks for one. ConfigError if it is not a URL."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{name} = {url!r}: must be http://host:port ({error})") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{name} = {url!r}: must be http://host:port")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._path = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"
        self._connection = kind(host, port, timeout=wait_s)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Returns the status and the body; what is sent is JSON. Raises WorldError where there is no answer."""
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        try:
            self._connection.request(method, self._path + path, body, headers)
            answer = self._connection.getresponse()
            body_read = answer.read(ANSWER_BYTES_MAX + 1)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            reason = printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)
            raise WorldError(f"{self.url} does not answer: {reason}") from None
        if len(body_read) > ANSWER_BYTES_MAX:
            self._connection.close()
            raise WorldError(f"{self.url}{path}: its answer is longer than {ANSWER_BYTES_MAX} bytes")
        return answer.status, body_read

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """As `request`, of a server that may ask for an API key."""
        status, answer = self.request(method, path, body)
        if status == 401:
            raise WorldError(f"{self.url} asks for an API key: name a file that has one with --api-key")
        return status, answer

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def read_api_key(path: Path | None) -> str:
    """Reads an API key; empty without a file. Raises ConfigError."""
    if path is None:
        return ""
    try:
        key = path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key = '{path}': {getattr(error, 'strerror', None) or error}") from None
    if not key.isascii() or not key.isprintable() or len(key.split()) != 1:
        raise ConfigError(f"api_key = '{path}': must be one word of ASCII characters")
    return key
