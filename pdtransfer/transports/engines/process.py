"""The parent's half of an engine's process: it is started, gets orders, is killed, and is proven dead by the kernel."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from ...errors import TransportError
from ..options import Network
from ..port_guard import GuardedPorts, PortGuard
from . import child
from .card_use import CardMemory
from .library import Library

_READY_SECONDS = 10.0  # an idle host takes 0.1 s; a peer that does not answer the handshake takes all of it
_CARD_READY_SECONDS = 40.0  # with a GPU's memory: a context takes seconds on a host of many GPUs
_REPLIES_BYTES = 4_096
_TEXT_BYTES_MAX = 300

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """What a sender needs besides: the peer's engines, host:port each, and the address `base` that they have their
    memory at. Also the memfd of the pool that it may read as well, -1 for none."""

    targets: tuple[str, ...]
    base: int
    pool: int = -1
    pool_bytes: int = 0


class EngineProcess:
    """A process of a library's engines over `memory`, a memfd that it maps. It has one engine for each target of
    `sending`, or `engines` that receive, or as many of them as can be started. Made and used on the loop's thread; the
    process dies with it. The network's guard closes the ports to all but the session's peer before anything is served.

    `received` gets packets of replies. `died` is called once, when the kernel reports that the process is gone: no
    thread of it runs any more, and it writes nothing that it had mapped.
    """

    def __init__(
        self,
        library: Library,
        network: Network,
        *,
        host: str,
        memory: int,
        byte_count: int,
        base: int = 0,
        engines: int = 1,
        sending: Sending | None = None,
        card: CardMemory | None = None,
        session: int = 0,
        received: Callable[[bytes], None] = lambda _: None,
        died: Callable[[], None] = lambda: None,
    ) -> None:
        if reason := library.why_not():
            raise TransportError(reason)
        self._received, self._died = received, died
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[tuple[int, ...]] = self._loop.create_future()
        self._listens: asyncio.Future[tuple[int, ...]] = self._loop.create_future()
        for each in (self._ready, self._listens):
            each.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps no caller waits
        self._guard, self._session, self._dials_itself = network.guard, session, library.dials_itself
        self._guarded: GuardedPorts | None = None
        self.dead = False
        self._ready_s = _READY_SECONDS if card is None else _CARD_READY_SECONDS
        self.card_address, self.why_no_card = 0, ""  # once it is ready: where it has the GPU's memory, or why not
        self.engines = engines if sending is None else len(sending.targets)  # perhaps fewer once it is ready
        with ExitStack() as undo:
            try:
                self._log = os.memfd_create("pdtransfer-engine-log", os.MFD_CLOEXEC) if sending is not None else -1
                if self._log >= 0:
                    undo.callback(os.close, self._log)
                self._pipe, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.callback(self._pipe.close)
                with theirs:
                    role, more, passed, dialled = "arena", (), [theirs.fileno(), memory], host
                    if sending is not None:
                        role, dialled = "sender", sending.targets[0].rpartition(":")[0]
                        more = sending.pool, sending.pool_bytes, sending.base, *sending.targets
                        passed += [sending.pool] if sending.pool >= 0 else []
                    held = int(network.guard is not None)
                    numbers = self.engines, memory, byte_count, base
                    # By its path: as a module it would import the package first.
                    command = [sys.executable, "-P", child.__file__, role, os.getpid(), theirs.fileno(), library.driver]
                    command.append(library.card if card is not None else "")
                    environment = library.environment(network, engines=self.engines, host=dialled)
                    self._process = subprocess.Popen(  # noqa: S603 (our own file)
                        list(map(str, (*command, network.protocol, host, *network.ports, held, *numbers, *more))),
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                        stderr=self._log if self._log >= 0 else subprocess.DEVNULL,
                        env=environment if card is None else environment | card.environment, pass_fds=passed,
                    )  # fmt: skip
                undo.callback(_end, self._process)
                self._pidfd = os.pidfd_open(self._process.pid)
            except OSError as error:  # out of descriptors, most likely
                raise TransportError(f"no process for an engine: {error.strerror}") from None
            undo.pop_all()
        self.pid = self._process.pid
        self._pipe.setblocking(False)
        if card is not None:
            self.send(card.packet)  # not as an argument, which every user of this host could read
        self._loop.add_reader(self._pidfd, self._gone)
        self._loop.add_reader(self._pipe, self._readable)

    async def ready(self) -> tuple[int, ...]:
        """Waits until its engines listen, and returns their ports. Raises TransportError, and kills it, where none
        does."""
        closed = False
        try:
            if self._guard is not None:
                await self._close_ports(self._guard)
            ports = await asyncio.wait_for(asyncio.shield(self._ready), self._ready_s)
            if self._guarded is not None:
                await self._guarded.opened()
            closed = True
            return ports
        except TimeoutError:
            raise TransportError(f"the engine was not ready within {self._ready_s:g} s{self.last_log()}") from None
        finally:
            if not closed:
                self.kill()

    @property
    def serves(self) -> bool:
        """True if its engines have reported that the memory is theirs."""
        return self._ready.done() and self._ready.exception() is None

    async def _close_ports(self, guard: PortGuard) -> None:
        ports = await asyncio.wait_for(asyncio.shield(self._listens), self._ready_s)
        self._guarded = await guard.guard(self._session, ports, self.kill, dials_itself=self._dials_itself)
        if self.dead:
            self._guarded.release()
        else:
            self.send(child.GO)

    def send(self, packet: bytes) -> None:
        """Sends an order, which is lost if the process is dead. Never waits: each slot of a ring has one order."""
        try:
            self._pipe.send(packet)
        except OSError as error:
            log.debug("engine %d takes no more orders: %s", self.pid, error)
            self.kill()

    def read(self) -> None:
        """Receives replies now, without waiting for the loop."""
        if not self.dead:
            self._readable()

    def kill(self) -> None:
        """Sends SIGKILL, which ends a stopped process as well; `died` is called once it has. Idempotent."""
        if not self.dead:
            self._process.send_signal(signal.SIGKILL)

    def last_log(self) -> str:
        """The last line that the engine has logged, in brackets, for a person."""
        if self._log < 0:
            return ""
        size = os.fstat(self._log).st_size
        lines = os.pread(self._log, 4_096, max(0, size - 4_096)).decode(errors="replace").splitlines()
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
                self.kill()  # it cannot report any more
                return
            if self._ready.done():
                self._received(packet)
            else:
                self._on_hello(packet)

    def _on_hello(self, packet: bytes) -> None:
        kind, _ = child.HELLO.unpack_from(packet)
        after = packet[child.HELLO.size :]
        if kind == child.LISTENS:
            self._listens.set_result(tuple(port for (port,) in child.PORT.iter_unpack(after)))
        elif kind == child.READY:
            count, card_at = packet[1] * child.PORT.size, packet[1] * child.PORT.size + child.CARD_AT.size
            ports = tuple(port for (port,) in child.PORT.iter_unpack(after[:count]))
            (self.card_address,) = child.CARD_AT.unpack(after[count:card_at])
            self.why_no_card = after[card_at:].decode(errors="replace")
            if len(ports) < self.engines:
                counts = len(ports), self.engines, self.pid
                if self.card_address and self.why_no_card:
                    log.warning("%d of %d engines of process %d serve the GPU's memory: %s", *counts, self.why_no_card)
                else:
                    text = "%d of %d engines could be started in process %d: pdtransfer doctor reports the ports left"
                    log.warning(text, *counts)
            self.engines = len(ports)
            self._ready.set_result(ports)
        else:
            self._fail(f"{after.decode(errors='replace')}{self.last_log()}")

    def _gone(self) -> None:
        if self._process.poll() is None:
            return
        self.read()  # its last replies
        self.dead = True
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._fail(f"the engine's process has ended with status {self._process.returncode}{self.last_log()}")
        if self._guarded is not None:
            self._guarded.release()
        self._close()
        self._died()

    def _fail(self, text: str) -> None:
        for each in (self._listens, self._ready):
            if not each.done():
                each.set_exception(TransportError(text))

    def _close(self) -> None:
        if self._pipe.fileno() >= 0:
            self._loop.remove_reader(self._pipe)
            self._pipe.close()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that has only begun."""
    process.kill()
    process.wait()
