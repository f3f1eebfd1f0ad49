"""`pdtransfer workers`: lists, adds, drains and removes the workers of a running router, over its admin API."""

from __future__ import annotations

import time
from json import dumps
from pathlib import Path

import msgspec
from rich.console import Console

from ...errors import ConfigError, WorldError
from ..process.logs import printable
from ..router.fleet.admin import read_token
from ..router.fleet.status import WorkerStatus
from .http_client import HttpClient
from .top_view import worker_lines

POLL_S = 0.5


class _Listed(msgspec.Struct, frozen=True):
    workers: list[WorkerStatus]


class _Refused(msgspec.Struct, frozen=True):
    error: str


class AdminClient:
    """Calls one router's admin API."""

    def __init__(self, url: str, token: Path) -> None:
        """Raises ConfigError for what is not a URL, or a token that cannot be read."""
        self._router = HttpClient("admin", url, read_token(token).decode())

    def list(self) -> list[WorkerStatus]:
        """Returns the workers. Raises as `change`."""
        return self._ask("GET", "", None)

    def change(self, action: str, worker: str, role: str | None = None) -> list[WorkerStatus]:
        """Adds (`action` is empty), drains or removes; returns the workers. Raises WorldError for a router that
        does not answer, ConfigError for a change that it refuses."""
        return self._ask("POST", action, {"worker": worker} | ({} if role is None else {"role": role}))

    def _ask(self, method: str, action: str, change: dict[str, str] | None) -> list[WorkerStatus]:
        body = None if change is None else dumps(change).encode()
        status, answer = self._router.request(method, "/workers" + action, body)
        try:
            if status == 200:
                return msgspec.json.decode(answer, type=_Listed).workers
            reason = msgspec.json.decode(answer, type=_Refused).error
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise WorldError(
                f"{self._router.url}/workers answers {status}: this is not the admin API of a router"
            ) from None
        kind = ConfigError if status in (400, 401) else WorldError
        raise kind(printable(reason))


def run(url: str, token: Path, action: str = "", worker: str = "", *, role: str | None, wait: bool, json: bool) -> int:
    """One command; `action` is empty to list, or to add where there is a worker. Returns the exit status."""
    client = AdminClient(url, token)
    workers = client.change(action, worker, role) if worker else client.list()
    while wait and _busy(workers, worker):
        time.sleep(POLL_S)
        workers = client.list()
    if json:
        print(msgspec.json.encode({"workers": workers}).decode())
        return 0
    console = Console(highlight=False, markup=False, emoji=False)
    for line in worker_lines(workers, console.width, ascii_only=console.options.ascii_only):
        console.print(line, overflow="ellipsis", no_wrap=True)
    return 0


def _busy(workers: list[WorkerStatus], name: str) -> bool:
    """Whether the worker has rooms of this router, or is about to be forgotten."""
    address = name.rpartition("@")[2]
    return any(
        (status.rooms_here or status.leaves) and name in (status.node, address, status.address) for status in workers
    )
