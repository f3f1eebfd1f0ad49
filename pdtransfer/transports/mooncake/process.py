"""A parent's half of an engine's process: started, spoken to, killed, and proven dead by the kernel."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from ...environment import child_environment
from ...errors import TransportError
from ..network import Network
from . import child

_READY_SECONDS = 10.0  # 0.1 s on an idle host; a peer that does not answer the handshake takes all of it
_REPLIES_BYTES = 4_096
_TEXT_BYTES_MAX = 300

# Connections of an engine to its peer: a session's together, and of one at least.
_LANES, _LANES_MIN = 8, 2

# Few words, and no wait that a session would not outlive.
_SETTINGS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TRANSFER_TIMEOUT": "5",
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
}

_LIBRARIES = {  # and what Debian has them in
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}

log = logging.getLogger(__name__)


def environment(network: Network, engines: int = 1) -> dict[str, str]:
    """A process of so many engines has it, and no other."""
    forced = {"MC_FORCE_TCP": "1"} if network.protocol == "tcp" else {}
    ports = {"MC_MIN_RPC_PORT": str(network.ports[0]), "MC_MAX_RPC_PORT": str(network.ports[1])}
    lanes = {"MC_TCP_LANES_PER_PEER": str(max(_LANES_MIN, _LANES // engines))}
    return {**_SETTINGS, **lanes, **child_environment(), **forced, **ports}


@cache
def why_not() -> str:
    """Why no engine can be had on this host; empty where one may."""
    try:
        found = find_spec("mooncake.engine") is not None
    except ImportError:  # the package is not there, or what it imports by itself is not
        found = False
    if not found:
        return "mooncake is not installed, or not whole: pip install 'pdtransfer[mooncake]'"
    missing: list[str] = []
    for library, package in _LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return f"mooncake cannot be loaded: apt-get install -y {' '.join(missing)}" if missing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """What a sender is told besides: the engines there, host:port each, that have their memory at `base`, and the memfd
    of the pool that it may read as well, -1 for none."""

    targets: tuple[str, ...]
    base: int
    pool: int = -1
    pool_bytes: int = 0


class EngineProcess:
    """A process of engines over `memory`, a memfd that it maps: one for each target of `sending`, or `engines` that
    receive, or as many of them as can be started. Made and used on the loop's thread, which it dies with.

    `heard` gets packets of replies; `died`, once, is called when the kernel says that the process is gone: no thread of
    it runs any more, and nothing that it had mapped is written by it.
    """

    def __init__(
        self,
        network: Network,
        *,
        host: str,
        memory: int,
        byte_count: int,
        base: int = 0,
        engines: int = 1,
        sending: Sending | None = None,
        heard: Callable[[bytes], None] = lambda _: None,
        died: Callable[[], None] = lambda: None,
    ) -> None:
        if reason := why_not():
            raise TransportError(reason)
        self._heard, self._tell_died = heard, died
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[tuple[int, ...]] = self._loop.create_future()
        self._ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting
        self.dead = False
        self.engines = engines if sending is None else len(sending.targets)  # or fewer, once it is ready
        with ExitStack() as undo:
            try:
                self._said = os.memfd_create("pdtransfer-engine-log", os.MFD_CLOEXEC) if sending is not None else -1
                if self._said >= 0:
                    undo.callback(os.close, self._said)
                self._pipe, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.callback(self._pipe.close)
                with theirs:
                    role, more, passed = "arena", (), [theirs.fileno(), memory]
                    if sending is not None:
                        role = "sender"
                        more = sending.pool, sending.pool_bytes, sending.base, *sending.targets
                        passed += [sending.pool] if sending.pool >= 0 else []
                    numbers = self.engines, memory, byte_count, base
                    # By its path: as a module it would import the package first.
                    command = [sys.executable, "-P", child.__file__, role, os.getpid(), theirs.fileno()]
                    self._process = subprocess.Popen(  # noqa: S603 (our own file)
                        list(map(str, (*command, network.protocol, host, *numbers, *more))),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=self._said if self._said >= 0 else subprocess.DEVNULL,
                        env=environment(network, self.engines),
                        pass_fds=passed,
                    )
                undo.callback(_end, self._process)
                self._pidfd = os.pidfd_open(self._process.pid)
            except OSError as error:  # out of descriptors, most likely
                raise TransportError(f"no process for an engine: {error.strerror}") from None
            undo.pop_all()
        self.pid = self._process.pid
        self._pipe.setblocking(False)
        self._loop.add_reader(self._pidfd, self._gone)
        self._loop.add_reader(self._pipe, self._readable)

    async def ready(self) -> tuple[int, ...]:
        """The ports that its engines listen on. Raises TransportError, with the process killed, where it cannot do its
        work."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), _READY_SECONDS)
        except TimeoutError:
            raise TransportError(f"the engine was not ready within {_READY_SECONDS:g} s{self.last_words()}") from None
        finally:
            if not self._ready.done() or self._ready.exception() is not None:
                self.kill()

    def send(self, packet: bytes) -> None:
        """Never more of them at a time than a ring has slots, so that it never waits; to a dead one it is lost."""
        try:
            self._pipe.send(packet)
        except OSError as error:
            log.debug("engine %d hears nothing any more: %s", self.pid, error)
            self.kill()

    def look(self) -> None:
        """Hears at once what it has said, as if the loop had come round."""
        if not self.dead:
            self._readable()

    def kill(self) -> None:
        """SIGKILL, which a stopped process obeys as well; `died` says when it has worked. Idempotent."""
        if not self.dead:
            self._process.send_signal(signal.SIGKILL)

    def last_words(self) -> str:
        """What the engine has logged last, for a person."""
        if self._said < 0:
            return ""
        size = os.fstat(self._said).st_size
        lines = os.pread(self._said, 4_096, max(0, size - 4_096)).decode(errors="replace").splitlines()
        words = [line.partition("] ")[2] for line in lines if "] " in line and "Local segment" not in line]
        return f" ({words[-1][:_TEXT_BYTES_MAX]})" if words else ""

    def _readable(self) -> None:
        while True:
            try:
                packet = self._pipe.recv(_REPLIES_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                packet = b""
            if not packet:
                self._loop.remove_reader(self._pipe)
                self.kill()  # it speaks no more: whatever it still does is nobody's wish
                return
            if self._ready.done():
                self._heard(packet)
            else:
                self._greeted(packet)

    def _greeted(self, packet: bytes) -> None:
        kind, _ = child.HELLO.unpack_from(packet)
        after = packet[child.HELLO.size :]
        if kind == child.READY:
            ports = tuple(port for (port,) in child.PORT.iter_unpack(after))
            if len(ports) < self.engines:
                text = "%d of %d engines could be started in process %d: pdtransfer doctor says how many ports are left"
                log.warning(text, len(ports), self.engines, self.pid)
            self.engines = len(ports)
            self._ready.set_result(ports)
        else:
            text = after.decode(errors="replace")
            self._ready.set_exception(TransportError(f"{text}{self.last_words()}"))

    def _gone(self) -> None:
        if self._process.poll() is None:
            return
        self.look()  # what it said before
        self.dead = True
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if not self._ready.done():
            text = f"the engine's process has ended with status {self._process.returncode}{self.last_words()}"
            self._ready.set_exception(TransportError(text))
        self._close()
        self._tell_died()

    def _close(self) -> None:
        if self._pipe.fileno() >= 0:
            self._loop.remove_reader(self._pipe)
            self._pipe.close()
        if self._said >= 0:
            os.close(self._said)
            self._said = -1


def _end(process: subprocess.Popen[bytes]) -> None:
    """At once: it has only begun."""
    process.kill()
    process.wait()
