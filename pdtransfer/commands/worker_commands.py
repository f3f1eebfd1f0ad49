"""The commands of `pdtransfer workers`, bound to flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from .bench_commands import Json

Admin = Annotated[str, Parameter(help="The URL of the router's --admin.")]
TokenFile = Annotated[Path, Parameter(help="The file of the router's --admin-token.")]
Wait = Annotated[bool, Parameter(help="Return once the worker's rooms of this router have ended.")]
ADMIN = "http://127.0.0.1:8001"

workers = App(name="workers", help="Lists, adds, drains and removes the workers of a running router.")


@workers.command(name="list")
def list_workers(*, admin_token: TokenFile, admin: Admin = ADMIN, json: Json = False) -> int:
    """Lists the workers."""
    from .workers import run

    return run(admin, admin_token, role=None, wait=False, json=json)


@workers.command
def add(
    role: Annotated[Literal["prefill", "decode"], Parameter(help="What it does.")],
    endpoint: Annotated[str, Parameter(help="As for the router's --prefill and --decode.")],
    /,
    *,
    admin_token: TokenFile,
    admin: Admin = ADMIN,
    json: Json = False,
) -> int:
    """Adds a worker, or takes a drained one in again."""
    from .workers import run

    return run(admin, admin_token, "", endpoint, role=role, wait=False, json=json)


@workers.command
def drain(
    worker: Annotated[str, Parameter(help="Its endpoint, or its node's name.")],
    /,
    *,
    admin_token: TokenFile,
    admin: Admin = ADMIN,
    wait: Wait = False,
    json: Json = False,
) -> int:
    """Gives a worker no new rooms; those under way run to their end."""
    from .workers import run

    return run(admin, admin_token, "/drain", worker, role=None, wait=wait, json=json)


@workers.command
def remove(
    worker: Annotated[str, Parameter(help="Its endpoint, or its node's name.")],
    /,
    *,
    admin_token: TokenFile,
    admin: Admin = ADMIN,
    wait: Wait = False,
    json: Json = False,
) -> int:
    """Drains a worker, and forgets it once its rooms have ended."""
    from .workers import run

    return run(admin, admin_token, "/remove", worker, role=None, wait=wait, json=json)
