"""A process that a benchmark starts, and what it answers over its pipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from ..errors import WorldError


class Failure(NamedTuple):
    """Why there is no answer, for a person."""

    text: str


def begun(run: Callable[..., None], *arguments: object) -> tuple[SpawnProcess, Connection]:
    """A process of its own that runs `run(pipe, *arguments)`, and this end of the pipe; it ends with this process."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=run, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def answer(pipe: Connection, *, who: str, within_s: float) -> Any:
    """The next object from the pipe. Raises WorldError, which names the process as `who`, where it sends a Failure or
    nothing, or has died."""
    if not pipe.poll(within_s):
        raise WorldError(f"{who} has sent nothing for {within_s:.0f} s")
    try:
        received = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise WorldError(f"{who} has died") from None
    if isinstance(received, Failure):
        raise WorldError(received.text)
    return received
