"""`pdtransfer workers`: lists, adds, drains and removes the workers of a running router, over its admin API."""

from __future__ import annotations

import time
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, Parameter
from rich.console import Console

from ...errors import ConfigError, WorldError
from ..process.logs import printable
from ..router.fleet.admin import read_token
from ..router.fleet.status import WorkerStatus
from ..settings.node import Json
from .http_client import HttpClient
from .top_view import worker_lines

POLL_S = 0.5


class _Listed(msgspec.Struct, frozen=True):
    workers: list[WorkerStatus]


class _Refused(msgspec.Struct, frozen=True):
    error: str


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AdminFlags:
    """Which router, and how it is asked."""

    admin_token: Annotated[Path, Parameter(help="The file of the router's --admin-token.")]
    admin: Annotated[str, Parameter(help="The URL of the router's --admin.")] = "http://127.0.0.1:8001"
    json: Json = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DepartureFlags(AdminFlags):
    """The same, of a worker that is to get no more rooms."""

    wait: Annotated[bool, Parameter(help="Return once the worker's rooms of this router have ended.")] = False


Named = Annotated[str, Parameter(help="Its endpoint, or its node's name.")]

workers = App(name="workers", help="Lists, adds, drains and removes the workers of a running router.")


@workers.command(name="list")
def list_workers(*, flags: AdminFlags) -> int:
    """Lists the workers."""
    return _show(_ask(_client(flags)), flags)


@workers.command
def add(
    role: Annotated[Literal["prefill", "decode"], Parameter(help="The worker's role.")],
    endpoint: Annotated[str, Parameter(help="As for the router's --prefill and --decode.")],
    /,
    *,
    flags: AdminFlags,
) -> int:
    """Adds a worker, or takes a drained one in again."""
    return _show(_ask(_client(flags), "", {"worker": endpoint, "role": role}), flags)


@workers.command
def drain(worker: Named, /, *, flags: DepartureFlags) -> int:
    """Gives a worker no new rooms; those under way run to their end."""
    return _depart("/drain", worker, flags)


@workers.command
def remove(worker: Named, /, *, flags: DepartureFlags) -> int:
    """Drains a worker, and forgets it once its rooms have ended."""
    return _depart("/remove", worker, flags)


def _depart(how: str, worker: str, flags: DepartureFlags) -> int:
    router = _client(flags)
    listed = _ask(router, how, {"worker": worker})
    while flags.wait and _busy(listed, worker):
        time.sleep(POLL_S)
        listed = _ask(router)
    return _show(listed, flags)


def _client(flags: AdminFlags) -> HttpClient:
    """Raises ConfigError for what is not a URL, or a token that cannot be read."""
    return HttpClient("admin", flags.admin, read_token(flags.admin_token).decode())


def _ask(router: HttpClient, action: str = "", change: dict[str, str] | None = None) -> list[WorkerStatus]:
    """The workers after any change. WorldError if the router does not answer, ConfigError if it refuses the change."""
    body = None if change is None else dumps(change).encode()
    status, answer = router.request("GET" if body is None else "POST", "/workers" + action, body)
    try:
        if status == 200:
            return msgspec.json.decode(answer, type=_Listed).workers
        reason = msgspec.json.decode(answer, type=_Refused).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise WorldError(f"{router.url}/workers answers {status}: this is not the admin API of a router") from None
    kind = ConfigError if status in (400, 401) else WorldError
    raise kind(printable(reason))


def _show(listed: list[WorkerStatus], flags: AdminFlags) -> int:
    if flags.json:
        print(msgspec.json.encode({"workers": listed}).decode())
        return 0
    console = Console(highlight=False, markup=False, emoji=False)
    for line in worker_lines(listed, console.width, ascii_only=console.options.ascii_only):
        console.print(line, overflow="ellipsis", no_wrap=True)
    return 0


def _busy(listed: list[WorkerStatus], name: str) -> bool:
    """True if the worker has rooms of this router, or is about to be forgotten."""
    address = name.rpartition("@")[2]
    named = [status for status in listed if name in (status.node, address, status.address)]
    return any(status.rooms_here or status.leaves for status in named)
