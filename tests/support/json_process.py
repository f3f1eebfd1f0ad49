"""A module that runs in an environment of its own, and answers requests that are lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from tests.support.paths import REPO

END_SECONDS = 60.0  # after which a process that was asked to end is killed
LOG_LINES = 60  # that an error quotes
LATER = object()  # returned for a request that is answered by its number when that is time


def end_of(log: Path) -> str:
    """The last lines of a process's log, for an error."""
    return f"the end of {log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


class JsonProcess:
    """Runs `module` with `python`, the interpreter of another environment; ends it where the `with` ends.

    Standard output and error of the module are kept in `log`, and each error quotes the end of it.
    """

    def __init__(self, python: Path, module: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._numbers = count()
        self._asked: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        with log.open("wb") as kept:
            self.process = subprocess.Popen(
                [python, "-m", module], cwd=REPO, env=os.environ | (environment or {}), text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=kept,
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def submit(self, name: str, **arguments: Any) -> Future[Any]:
        """Asks `name` of it. The future has what it answered, or a RuntimeError with its traceback or its end."""
        asked: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._asked[number] = asked
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"number": number, "name": name} | arguments) + "\n")
        except OSError:
            self._end()
        return asked

    def ask(self, name: str, seconds: float, **arguments: Any) -> Any:
        """`submit`, and its answer; TimeoutError after this many seconds."""
        return self.wait(self.submit(name, **arguments), seconds)

    def wait(self, asked: Future[Any], seconds: float) -> Any:
        """The answer of one that was submitted; TimeoutError after this many seconds."""
        try:
            return asked.result(seconds)
        except TimeoutError:
            raise TimeoutError(f"no answer in {seconds} s; {self.log_end()}") from None

    def log_end(self) -> str:
        """The last lines of its log."""
        return end_of(self.log)

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Has it end by itself, as the end of its input asks; kills it where it does not. Idempotent."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            reply = json.loads(line)
            with self._lock:
                asked = self._asked.pop(reply["number"])
            if "error" in reply:
                asked.set_exception(RuntimeError(f"{reply['error']}\n{self.log_end()}"))
            else:
                asked.set_result(reply["answer"])
        self.process.stdout.close()
        self._end()

    def _end(self) -> None:
        """Fails whatever it has not answered."""
        self.process.wait()
        with self._lock:
            left, self._asked = self._asked, {}
        for asked in left.values():
            asked.set_exception(RuntimeError(f"it ended with status {self.process.returncode}; {self.log_end()}"))


class Requests:
    """In the module: what it is asked. Its own standard output becomes standard error, so that it may print."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def take(self, *, wait: bool) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Number, name and arguments of what has come: with `wait` of at least one, unless the input ended."""
        with suppress(Empty):
            while not self.ended:
                request = self._queue.get(block=wait)
                wait = False
                if request is None:
                    self.ended = True
                else:
                    yield request.pop("number"), request.pop("name"), request

    def attempt(self, number: int, does: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Answers with what it returns, unless that is LATER, or has the asker raise what it raises."""
        try:
            answer = does(**arguments)
        except Exception:  # noqa: BLE001  # whatever it is, a test asked for it and raises it
            self._reply({"number": number, "error": traceback.format_exc()})
        else:
            if answer is not LATER:
                self.answer(number, answer)

    def answer(self, number: int, answer: Any) -> None:
        """Answers the request of this number."""
        self._reply({"number": number, "answer": answer})

    def _reply(self, reply: dict[str, Any]) -> None:
        print(json.dumps(reply), file=self._replies)

    def _read(self) -> None:
        for line in sys.stdin:
            self._queue.put(json.loads(line))
        self._queue.put(None)
