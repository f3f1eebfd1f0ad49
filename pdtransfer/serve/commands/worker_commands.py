"""The commands of `pdtransfer workers`, bound to flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from .flags import Json


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
    from .workers import run

    return run(flags.admin, flags.admin_token, role=None, wait=False, json=flags.json)


@workers.command
def add(
    role: Annotated[Literal["prefill", "decode"], Parameter(help="What it does.")],
    endpoint: Annotated[str, Parameter(help="As for the router's --prefill and --decode.")],
    /,
    *,
    flags: AdminFlags,
) -> int:
    """Adds a worker, or takes a drained one in again."""
    from .workers import run

    return run(flags.admin, flags.admin_token, "", endpoint, role=role, wait=False, json=flags.json)


@workers.command
def drain(worker: Named, /, *, flags: DepartureFlags) -> int:
    """Gives a worker no new rooms; those under way run to their end."""
    return _depart("/drain", worker, flags)


@workers.command
def remove(worker: Named, /, *, flags: DepartureFlags) -> int:
    """Drains a worker, and forgets it once its rooms have ended."""
    return _depart("/remove", worker, flags)


def _depart(how: str, worker: str, flags: DepartureFlags) -> int:
    from .workers import run

    return run(flags.admin, flags.admin_token, how, worker, role=None, wait=flags.wait, json=flags.json)
