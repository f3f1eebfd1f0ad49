"""TLS of an HTTP listener: a certificate and its key, which may be replaced while the listener serves."""

from __future__ import annotations

import ssl
from pathlib import Path

from ..bus.keys import read_guarded
from ..errors import ConfigError

HANDSHAKE_S = 10.0  # a connection whose handshake takes longer is closed


class ServerTls:
    """The TLS context of a listener; connections that begin after `read` get what it has read."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises ConfigError as `read`."""
        self._cert, self._key = cert, key
        self._latest = self._load()
        self.context = _context()
        self.context.sni_callback = self._hand_over

    def read(self) -> None:
        """Reads both files again. Raises ConfigError where they are no pair, and changes nothing then."""
        self._latest = self._load()

    def _hand_over(self, connection: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        """A connection begins, with a name or without. A context that has had another certificate may keep it: one for
        each type of key."""
        connection.context = self._latest

    def _load(self) -> ssl.SSLContext:
        context = _context()
        try:
            read_guarded(self._key, forbidden=0o007, advice=f"others may read or change it: chmod o-rwx {self._key}")
        except ConfigError as error:
            raise ConfigError(f"tls_key: {error}") from None
        try:
            # An encrypted key would ask for its password on the terminal: this one is wrong.
            context.load_cert_chain(self._cert, self._key, password="")
        except ssl.SSLError as error:
            text = (error.reason or "no certificate with its key, in PEM").lower().replace("_", " ")
            raise ConfigError(f"tls_cert = '{self._cert}', tls_key = '{self._key}': {text}") from None
        except (OSError, ValueError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(f"tls_cert = '{self._cert}': {text}") from None
        return context


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
