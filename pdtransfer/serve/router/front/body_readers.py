"""Reads bodies of requests: a small one at once, a large one in another process.

Decoders and tokenisers hold the interpreter while they work, so the loop reads no body whose shape could make that take
longer than some milliseconds. A process that a body has broken, or that takes too long, is killed and replaced. Its
request alone fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeAlias, TypeVar

import msgspec

from ....environment import child_environment
from .json_bodies import Read, RefusedRequestError
from .text import TextCodec

ASK = struct.Struct("<II")  # lengths of what to do, and of the body: both follow
ANSWER = struct.Struct("<BI")  # kind, and length of what follows
READY, READ, REFUSED, FAILED = range(4)  # kinds of answers; READY comes once, before all others
Refusal: TypeAlias = tuple[str | None, str, str | None, int]  # param, text, code and status of a RefusedRequestError

Result_co = TypeVar("Result_co", bound=Read, covariant=True)


@dataclass(frozen=True, slots=True)
class BodyReading(Generic[Result_co]):
    """How a body is read: by a function that reading processes know by its name, with these arguments."""

    function: Callable[..., Result_co]
    result: type[Result_co]
    arguments: Mapping[str, object]

    def read(self, body: bytes, text: TextCodec) -> Result_co:
        """Reads a body. Raises RefusedRequestError."""
        return self.function(body, text=text, **self.arguments)


log = logging.getLogger(__name__)

READ_S = 20.0  # for one body
START_S = 60.0  # a large vocabulary takes some seconds
BUFFER_BYTES = 1 << 20  # of an answer, beyond which its process waits for the loop
# One thread each, since there are several processes.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
Result = TypeVar("Result", bound=Read)


class BodyReaders:
    """The reading processes of one router: at most `processes`, each started when it is needed first. The shortest
    body that waits is read next, so that large ones delay no small one."""

    def __init__(self, model: str, text: TextCodec, *, processes: int, inline_bytes_max: int) -> None:
        """Bodies up to `inline_bytes_max` are read by the caller."""
        self._model, self._text = model, text
        self._inline_bytes_max = inline_bytes_max
        self.idle = [ReadingProcess(model) for _ in range(processes)]  # those that have started are the last ones
        self.waiting: list[tuple[int, int, asyncio.Future[ReadingProcess]]] = []
        self._arrivals = count()
        self.under_way: dict[asyncio.Task[object], ReadingProcess] = {}

    async def read(self, reading: BodyReading[Result], body: bytes, ended: Callable[[], None]) -> Result:
        """Reads a body. Raises RefusedRequestError. `ended` is called once nobody needs the body any more: after a
        client that leaves meanwhile, since its body is read to the end."""
        if len(body) <= self._inline_bytes_max:
            try:
                return reading.read(body, self._text)
            finally:
                ended()
        try:
            process = await self._turn(len(body))
        except BaseException:
            ended()
            raise
        task = asyncio.create_task(_read(process, reading, body))
        self.under_way[task] = process
        task.add_done_callback(lambda _: self._done(task, ended))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Ends all processes."""
        tasks = dict(self.under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(reader.close() for reader in (*self.idle, *tasks.values())))

    async def _turn(self, length: int) -> ReadingProcess:
        """Waits until a process is free, and takes it."""
        if self.idle:
            return self.idle.pop()
        waits = length, next(self._arrivals), asyncio.get_running_loop().create_future()
        heappush(self.waiting, waits)
        try:
            return await waits[2]
        except asyncio.CancelledError:
            if waits in self.waiting:
                self.waiting.remove(waits)
                heapify(self.waiting)
            elif not waits[2].cancelled():  # it had its turn
                self._next(waits[2].result())
            raise

    def _next(self, process: ReadingProcess) -> None:
        """The process has become free: the next body gets it."""
        while self.waiting:
            turn = heappop(self.waiting)[2]
            if not turn.done():  # its request has not just left
                turn.set_result(process)
                return
        self.idle.append(process)

    def _done(self, task: asyncio.Task[object], ended: Callable[[], None]) -> None:
        process = self.under_way.pop(task)
        if not task.cancelled():
            task.exception()  # nobody asks for it where the client has left
        ended()
        self._next(process if process.usable else ReadingProcess(self._model))


async def _read(process: ReadingProcess, reading: BodyReading[Result], body: bytes) -> Result:
    try:
        return await process.read(reading, body)
    except TimeoutError:
        log.error("process %s has not read a body of %d bytes within %.0f s", process.pid, len(body), READ_S)
        raise RefusedRequestError(None, f"the body takes longer than {READ_S:.0f} s to read") from None
    except (OSError, EOFError) as error:
        why = "it has ended" if isinstance(error, asyncio.IncompleteReadError) else error
        log.error("process %s, which reads bodies, has failed: %s", process.pid, why)
        raise RefusedRequestError(None, "the process that read the body has ended", status=500) from None
    finally:
        if not process.usable:
            await process.close()


class ReadingProcess:
    """One process, and the socket to it. It is `usable` between two bodies, once it has started."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._process: asyncio.subprocess.Process | None = None
        self._pipe: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.usable = False

    @property
    def pid(self) -> int:
        """Its number; 0 before it has started."""
        return 0 if self._process is None else self._process.pid

    async def read(self, reading: BodyReading[Result], body: bytes) -> Result:
        """Has it read a body. Raises RefusedRequestError; and TimeoutError, OSError and EOFError, after which it is to
        be closed, as after a cancellation."""
        self.usable = False
        answers, asks = self._pipe or await self._start()
        call = msgspec.msgpack.encode((reading.function.__name__, reading.arguments))
        async with asyncio.timeout(READ_S):
            asks.writelines((ASK.pack(len(call), len(body)), call, body))
            await asks.drain()
            kind, content = await _received(answers)
        if kind == FAILED:
            raise EOFError(content.decode(errors="replace"))
        if kind == REFUSED:
            self.usable = True
            param, text, code, status = msgspec.msgpack.decode(content, type=Refusal)
            raise RefusedRequestError(param, text, code=code, status=status)
        read = msgspec.msgpack.decode(content, type=reading.result)
        self.usable = True
        return read

    async def close(self) -> None:
        """Kills it."""
        if self._pipe is not None:
            self._pipe[1].close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        with theirs:
            self._pipe = answers, _ = await asyncio.open_connection(sock=ours, limit=BUFFER_BYTES)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pdtransfer.serve.router.body_child", self._model, str(os.getpid()),
                stdin=theirs.fileno(), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
                env=child_environment() | _ENVIRONMENT,
            )  # fmt: skip
        try:
            async with asyncio.timeout(START_S):
                kind, text = await _received(answers)
        except TimeoutError:
            why = f"the process that reads bodies has not started within {START_S:.0f} s"
            log.error("%s", why)
            raise RefusedRequestError(None, why, status=503) from None
        if kind != READY:
            raise EOFError(text.decode(errors="replace"))
        return self._pipe


async def _received(answers: asyncio.StreamReader) -> tuple[int, bytes]:
    """The kind of the next answer, and what follows it."""
    kind, length = ANSWER.unpack(await answers.readexactly(ANSWER.size))
    return kind, await answers.readexactly(length)
