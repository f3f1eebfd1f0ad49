"""The process that reads large bodies for a router: `python -m pdtransfer.serve.router.body_child MODEL PARENT`.

Its standard input is a socket. It reads one body after the other, and has no data of clients, keys or workers: whatever
a body does to it, the router goes on. It ends with the router.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import BinaryIO

import msgspec

from ...errors import ConfigError
from .backends.daemons.completions import detokenized, read_body, tokenized
from .backends.servers.dialects import read_for_servers
from .front.body_readers import ANSWER, ASK, FAILED, READ, READY, REFUSED
from .front.json_bodies import Read, RefusedRequestError
from .front.text import TextCodec, load_text

READINGS: Mapping[str, Callable[..., Read]] = {
    function.__name__: function for function in (read_body, tokenized, detokenized, read_for_servers)
}
MEMORY_BYTES_MAX = 4 << 30  # private memory of this process: a body of the largest size makes some 300 MB of objects
NICE = 5  # answers that are under way come before prompts that are to be read
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Reads until the router closes the socket."""
    model, parent = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        return  # it died before prctl
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they may come to the whole group: the router decides
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # prompts are in its memory
    os.nice(NICE)
    pipe = socket.socket(fileno=0)
    asks = pipe.makefile("rb")
    try:
        text = load_text(model)
    except ConfigError as error:
        _answer(pipe, FAILED, str(error).encode())
        return
    gc.disable()  # what a body makes has no cycles, and looking for them takes most of the time
    _answer(pipe, READY, b"")
    while True:
        reading, body = (_received(asks, length) for length in ASK.unpack(_received(asks, ASK.size)))
        _read(pipe, text, reading, body)


def _read(pipe: socket.socket, text: TextCodec, reading: bytes, body: bytes) -> None:
    try:
        name, arguments = msgspec.msgpack.decode(reading)
        read = msgspec.msgpack.encode(READINGS[name](body, text=text, **arguments))
    except RefusedRequestError as error:
        _answer(pipe, REFUSED, msgspec.msgpack.encode((error.param, error.text, error.code, error.status)))
    except Exception as error:  # noqa: BLE001 -- whatever it is, the next body is read
        _answer(pipe, FAILED, f"{type(error).__name__}: {error}"[:500].encode(errors="replace"))
    else:
        _answer(pipe, READ, read)


def _answer(pipe: socket.socket, kind: int, content: bytes) -> None:
    pipe.sendall(ANSWER.pack(kind, len(content)))
    pipe.sendall(content)


def _received(asks: BinaryIO, length: int) -> bytes:
    """Ends this process where the router has closed the socket."""
    data = asks.read(length)
    if len(data) < length:
        sys.exit()
    return data


if __name__ == "__main__":
    main()
