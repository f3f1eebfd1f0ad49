"""Processes that a benchmark starts, the orders that they take over a pipe, and what they answer."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, Self

import uvloop

from pdtransfer.errors import PDTransferError, WorldError
from pdtransfer.serve.process.setup import prepare


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


class Processes:
    """Processes that end when this context is left."""

    def __init__(self) -> None:
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes their pipes, which ends them."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.close()
        for process in self._processes:
            process.join(10.0)
            process.kill()

    def _start(self, make: Callable[..., PipeProcess], *arguments: object) -> Connection:
        """Starts one that serves `make(pipe, *arguments)`; returns this end of its pipe."""
        process, ours = begun(_serve, make, arguments)
        self._processes.append(process)
        self._pipes.append(ours)
        return ours


class PipeProcess:
    """What one of them is: a loop, and orders from a pipe: the name of a method, and its arguments. It ends when its
    pipe does."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._loop, self._over = pipe, asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(self._broke)

    async def serve(self) -> None:
        """Takes orders until the pipe ends."""
        self._loop.add_reader(self._pipe.fileno(), self._receive)
        os.set_blocking(self._pipe.fileno(), True)  # which the loop has changed: an answer may not fit into the pipe
        await self._over.wait()
        self._loop.remove_reader(self._pipe.fileno())

    def fail(self, text: str) -> None:
        """What was ordered cannot end as it should."""
        if not self._over.is_set():
            self._over.set()
            self._pipe.send(Failure(text))

    def _receive(self) -> None:
        try:
            name, *arguments = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._over.set()
            return
        getattr(self, name)(*arguments)

    def _broke(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A call on the loop raised something: the bench would wait for nothing."""
        error = context.get("exception")
        self.fail(f"{type(error).__name__}: {error}" if error is not None else str(context.get("message")))


def _serve(pipe: Connection, make: Callable[..., PipeProcess], arguments: tuple[object, ...]) -> None:
    async def serve() -> None:
        await make(pipe, *arguments).serve()

    prepare()
    # A failed room ends the benchmark. Lines of the log would only disturb what is measured.
    logging.getLogger("pdtransfer").setLevel(logging.CRITICAL)
    try:
        uvloop.run(serve())
    except PDTransferError as error:
        pipe.send(Failure(str(error)))
