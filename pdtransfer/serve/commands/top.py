"""A live view of a fleet in the terminal: the status document of its router, drawn again and again."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ...errors import ConfigError, RemoteProtocolError, WorldError
from ...schema import parse
from ..router.fleet.status import FleetStatus
from .http_client import HttpClient, read_api_key
from .top_view import view

_Document = TypeVar("_Document")


def status_document(router: HttpClient, kind: type[_Document]) -> _Document:
    """Returns a router's status document as it is now. Raises WorldError."""
    status, body = router.ask("GET", "/status")
    if status != 200:
        raise WorldError(f"{router.url}/status answers {status}: this is not a pdtransfer router, or an older one")
    try:
        return parse(body, msgspec.json.Decoder(kind))
    except RemoteProtocolError as error:
        raise WorldError(f"{router.url}/status: {error}") from None


def top(
    *,
    router: Annotated[str, Parameter(help="The router's URL.")] = "http://127.0.0.1:8000",
    api_key: Annotated[Path | None, Parameter(help="A file with an API key, for a router that asks for one.")] = None,
    interval: Annotated[float, Parameter(help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, Parameter(help="Print once and end, as when the output is not a terminal.")] = False,
    json: Annotated[bool, Parameter(help="Print the router's status document once.")] = False,
) -> int:
    """The command `pdtransfer top`; returns its exit status. Raises ConfigError and WorldError."""
    if not 0.1 <= interval <= 3_600:
        raise ConfigError(f"interval = {interval}: must be 0.1 to 3600 seconds")
    source = HttpClient("router", router, read_api_key(api_key))
    console = Console(highlight=False, markup=False, emoji=False)
    try:
        if json:
            shown = status_document(source, dict[str, Any])  # with fields that only a newer version knows
            print(msgspec.json.encode(shown).decode())
            return 0
        if once or not console.is_terminal:
            console.print(_picture(console, status_document(source, FleetStatus), source.url, height=None))
            return 0
        with _single_keys() as keyboards:
            _watch(source, console, interval, keyboards)
        return 0
    finally:
        source.close()


def _picture(console: Console, status: FleetStatus | None, url: str, why: str = "", *, height: int | None) -> Text:
    return view(status, url, why, width=console.width, height=height, ascii_only=console.options.ascii_only)


def _watch(source: HttpClient, console: Console, interval_s: float, keyboards: list[TextIO]) -> None:
    """Draws until `q` is pressed. A router that does not answer is asked again."""
    status: FleetStatus | None = None
    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        while True:
            began_s, why = time.monotonic(), ""
            try:
                status = status_document(source, FleetStatus)
            except WorldError as error:
                why = str(error)
            live.update(_picture(console, status, source.url, why, height=console.height), refresh=True)
            readable, _, _ = select.select(keyboards, [], [], max(0.0, began_s + interval_s - time.monotonic()))
            if any(keyboard.read(1) in ("q", "Q") for keyboard in readable):
                return


@contextmanager
def _single_keys() -> Generator[list[TextIO]]:
    """Lets keys be read one by one, without an echo. Yields standard input where it is a terminal, and restores it."""
    if not sys.stdin.isatty():
        yield []
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield [sys.stdin]
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
