"""A bench's processes: how one begins, what is asked of it over its pipe, and how it says that it cannot."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from ..errors import WorldError


class Batch(NamedTuple):
    """Rooms first .. first + rooms - 1 of `tokens` tokens each, `at_once` of them under way.

    Where `abort_s` is not empty decode aborts its i-th room so many seconds after it was expected, and prefill opens
    all of them at once. `shared` is how many tokens of every prompt are the same, -1: decode knows no prompts.
    """

    first: int
    rooms: int
    tokens: int
    at_once: int
    abort_s: tuple[float, ...] = ()
    shared: int = -1


class GiveUp(NamedTuple):
    """Prefill ends what is left of its batch: it has heard nothing of rooms that were aborted before their grants."""


class Stall(NamedTuple):
    """Rooms that hold a grant of this source's, and of which nothing is ever written; their ends are no failures.

    Prefill answers when every one is leased.
    """

    rooms: int
    tokens: int
    source: str


class Echoes(NamedTuple):
    """So many bare round trips, one after the other: drained on the loop as a bus is, or with blocking sockets.

    Prefill is asked for the blocking ones alone, and says twice that it has heard: before and after.
    """

    trips: int
    blocking: bool


class Memcpy(NamedTuple):
    """One memcpy of so many bytes of the pool."""

    byte_count: int


class Fragment(NamedTuple):
    """Decode holds every second run of so many slots of its arena from now on, in place of what it held before."""

    run: int


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
    """What the process at the pipe's other end says next. WorldError, naming it as `who`, where it says a Failure, or
    nothing, or has died."""
    if not pipe.poll(within_s):
        raise WorldError(f"{who} has said nothing for {within_s:.0f} s")
    try:
        said = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise WorldError(f"{who} has died") from None
    if isinstance(said, Failure):
        raise WorldError(said.text)
    return said
