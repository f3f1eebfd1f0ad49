"""The parent's half of a firewall table: which session's ports are open to whom, and the process that keeps the rules.

Made and used on the loop's thread. Changes are one transaction each, in order.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar, cast

from ...disconnect import disconnect
from ...environment import child_environment
from ...errors import ConfigError, TransportError
from . import child
from .ruleset import (
    Admitted,
    Host,
    HostNetwork,
    change_text,
    closed_text,
    host_of,
    opened_text,
    opening_text,
    removal_text,
    strangers_texts,
    table_text,
)

FirewallMode = Literal["auto", "on", "off"]

_ANSWER_S = 5.0  # a change takes a millisecond
_LOOK_S = 10.0  # between two looks for hosts that were refused
_NAME_MAX = 128

_Answer = TypeVar("_Answer")

log = logging.getLogger(__name__)


class Keeper:
    """The process that keeps the rules; `ask` blocks."""

    def __init__(self) -> None:
        with ExitStack() as undo:
            try:
                self._pipe, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.callback(self._pipe.close)
                with theirs:
                    self.process = subprocess.Popen(  # noqa: S603 (our own file)
                        [sys.executable, "-P", child.__file__, str(os.getpid()), str(theirs.fileno())],
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                        env=child_environment(), pass_fds=[theirs.fileno()],
                    )  # fmt: skip
            except OSError as error:
                raise TransportError(f"no process for the firewall: {error.strerror}") from None
            self._pipe.settimeout(_ANSWER_S)
            undo.pop_all()

    def begin(self, table: str) -> None:
        """Makes the table. Raises TransportError with the reason where this process may not."""
        self._answer()
        self.ask(table)

    def ask(self, text: str) -> str:
        """Runs one transaction; returns what it prints."""
        try:
            self._pipe.send(text.encode())
        except OSError as error:
            raise TransportError(f"the firewall's process has ended: {error.strerror}") from None
        return self._answer()

    def end(self) -> None:
        """Ends the process, and the table with it."""
        disconnect(self._pipe)
        try:
            self.process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answer(self) -> str:
        try:
            packet = self._pipe.recv(child.PACKET_BYTES)
        except OSError as error:
            self.process.kill()  # a late answer would be taken for the next one's
            raise TransportError(f"the firewall's process does not answer: {error}") from None
        if not packet:
            raise TransportError("the firewall's process has ended")
        text = packet[1:].decode(errors="replace")
        if packet[:1] == child.FAILED:
            raise TransportError(reason_of(text))
        return text


def reason_of(text: str) -> str:
    """libnftables' error in one line, with the command that corrects it where there is one."""
    if child.LIBRARY in text:
        return f"{child.LIBRARY} is not installed: apt-get install -y libnftables1"
    if "not permitted" in text or "must be root" in text:
        return (
            "this process may not change the firewall of its network namespace: "
            "run it with CAP_NET_ADMIN, in a systemd unit AmbientCapabilities=CAP_NET_ADMIN"
        )
    first = re.sub(r"^Error: ", "", text.strip().splitlines()[0] if text.strip() else "no reason given")
    return f"nftables refuses the rules: {first[:200]} (a kernel from 5.12 on is needed)"


async def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class Guarded:
    """Ports that are open to one peer alone, until `release`."""

    peer: str
    ports: tuple[int, ...]
    end: Callable[[], None]  # called where the rules are lost
    release: Callable[[], None] = lambda: None  # its engines are dead
    host: Host | None = None
    dials_itself: bool = False  # this host reaches them as well, until `opened`
    opened: Callable[[], Awaitable[None]] = _nothing


@dataclass(slots=True, eq=False)
class Firewall:
    """One node's table: a PortGuard."""

    table: str
    mode: FirewallMode = "auto"
    networks: tuple[HostNetwork, ...] = ()
    refused: list[str] = field(default_factory=list[str])  # hosts that the rules have turned away lately
    keeper: Keeper | None = None
    _address_of: Callable[[str], str] = lambda _: ""
    _watched: int = -1  # the pidfd of the keeper
    _peers: dict[int, str] = field(default_factory=dict[int, str])  # by session
    _spared: dict[int, str] = field(default_factory=dict[int, str])
    _guarded: set[Guarded] = field(default_factory=set[Guarded])
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _looking: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, node: str, *, mode: FirewallMode = "auto", networks: tuple[HostNetwork, ...] = ()) -> Self:
        """Makes the table of this process. Raises TransportError with the reason where it may not."""
        firewall = cls(table_name(node), mode, networks)
        async with firewall._turn:
            await firewall._begin()
        return firewall

    @property
    def peers_only(self) -> bool:
        """As PortGuard has it: `on` leaves nothing open, and networks that are admitted need no exception."""
        return self.mode == "auto" and not self.networks

    def meet(self, address_of: Callable[[str], str]) -> None:
        """Takes the function that returns the address of a peer's connection, empty for none."""
        self._address_of = address_of

    def expect(self, session: int, peer: str, *, spared: str = "") -> None:
        """The session is this peer's, and its engines are going to listen. `spared`: why they stay open to all."""
        self._peers[session] = peer
        if spared:
            if spared not in self._spared.values():
                log.warning("session %#x: its ports stay open to every host: %s", session, spared)
            self._spared[session] = spared

    def forget(self, session: int) -> None:
        """No more engines of the session are going to listen."""
        self._peers.pop(session, None)
        self._spared.pop(session, None)

    async def guard(
        self, session: int, ports: Sequence[int], end: Callable[[], None], *, dials_itself: bool = False
    ) -> Guarded:
        """Closes these ports to all but the session's peer. Raises TransportError where that cannot be done: nothing
        may be served then. Engines that dial themselves as they start reach them until `opened`."""
        if (peer := self._peers.get(session)) is None:
            raise TransportError("the session has ended meanwhile")
        guarded = Guarded(peer, tuple(ports), end, dials_itself=dials_itself)
        if session not in self._spared:
            async with self._turn:
                await self._move(guarded)
            guarded.release = lambda: self._spawn(self._release(guarded))
            guarded.opened = lambda: self._opened(guarded)
        return guarded

    def moved(self, peer: str) -> None:
        """A peer has connected, perhaps from another address than before."""
        if any(guarded.peer == peer for guarded in self._guarded):
            self._spawn(self._follow(peer))

    @property
    def report(self) -> dict[str, object]:
        """What /health shows of it."""
        hosts = sorted({str(guarded.host) for guarded in self._guarded})
        state: dict[str, object] = {"state": "on", "table": self.table, "admits": hosts}
        if self._spared:
            state["open_to_all"] = sorted(set(self._spared.values()))
        if self.refused:
            state["refused"] = self.refused
        return state

    async def close(self) -> None:
        """Removes the table. The engines are dead by now."""
        if self._looking is not None:
            self._looking.cancel()
        async with self._turn:
            if (keeper := self.keeper) is not None:
                self._unwatch()
                with suppress(TransportError):
                    await _apart(lambda: keeper.ask(removal_text(self.table)))
                await _apart(keeper.end)

    async def _begin(self) -> None:
        keeper = Keeper()  # on this thread, whose end is reported to its process
        try:
            await _apart(lambda: keeper.begin(table_text(self.table, self.networks)))
        except TransportError:
            await _apart(keeper.end)
            raise
        loop = asyncio.get_running_loop()
        self.keeper, self._watched = keeper, os.pidfd_open(keeper.process.pid)
        loop.add_reader(self._watched, self._lost)
        if self._looking is None:
            self._looking = loop.call_later(_LOOK_S, self._look)

    def _unwatch(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watched)
        os.close(self._watched)
        self.keeper = None

    async def _move(self, guarded: Guarded) -> None:
        """Sets the rules of these ports anew, for the address that the peer has now."""
        if self.keeper is None:
            await self._begin()
        try:
            host = host_of(self._address_of(guarded.peer))
        except ValueError:
            text = f"firewall: {guarded.peer} has no connection whose address could be admitted"
            raise TransportError(text) from None
        if host == guarded.host:
            return
        ended = None if guarded.host is None else Admitted(guarded.host, guarded.ports)
        text = change_text(self.table, ended=ended, begun=Admitted(host, guarded.ports))
        text += opening_text(self.table, guarded.ports) if guarded.dials_itself and ended is None else ""
        await self._change(text)
        guarded.host = host
        self._guarded.add(guarded)
        log.debug("firewall: ports %s are open to %s alone", guarded.ports, host)

    async def _change(self, text: str) -> None:
        if (keeper := self.keeper) is None:
            raise TransportError("the firewall's process has ended")
        await _apart(lambda: keeper.ask(text))

    async def _release(self, guarded: Guarded) -> None:
        async with self._turn:
            if guarded in self._guarded and guarded.host is not None:
                self._guarded.remove(guarded)
                text = change_text(self.table, ended=Admitted(guarded.host, guarded.ports))
                text += closed_text(self.table, guarded.ports) if guarded.dials_itself else ""
                with suppress(TransportError):  # its process has ended, and the table with it
                    await self._change(text)

    async def _opened(self, guarded: Guarded) -> None:
        """Closes ports to this host itself."""
        async with self._turn:
            if guarded in self._guarded and guarded.dials_itself:
                await self._change(opened_text(self.table, guarded.ports))

    async def _follow(self, peer: str) -> None:
        async with self._turn:
            for guarded in [entry for entry in self._guarded if entry.peer == peer]:
                try:
                    await self._move(guarded)
                except TransportError as error:
                    log.warning("%s", error)

    def _lost(self) -> None:
        keeper, guarded = self.keeper, list(self._guarded)
        self._unwatch()
        self._guarded.clear()
        log.error(
            "the firewall's process has ended: %d engines that it guarded end, and are started again", len(guarded)
        )
        for entry in guarded:
            entry.end()
        if keeper is not None:
            keeper.end()

    def _look(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        if self.keeper is not None and self._guarded:
            self._spawn(self._look_for_strangers())

    async def _look_for_strangers(self) -> None:
        async with self._turn:
            if (keeper := self.keeper) is None:
                return
            with suppress(TransportError):
                seen = await _apart(lambda: strangers(self.table, keeper.ask))
                if new := sorted(set(seen) - set(self.refused)):
                    text = "firewall: %s tried this node's transport ports, and no peer with a session has that address"
                    log.warning(text + "; where it is a peer's, name its network: --firewall-admit", ", ".join(new))
                self.refused = seen

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def table_name(node: str) -> str:
    """The table of this process, for a node of this name."""
    return f"pdtransfer-{re.sub(r'[^A-Za-z0-9._-]', '-', node)[:_NAME_MAX]}-{os.getpid()}"


def strangers(table: str, ask: Callable[[str], str]) -> list[str]:
    """The addresses that the table's rules have turned away lately."""
    addresses: set[str] = set()
    for text in strangers_texts(table):
        for item in json.loads(ask(text))["nftables"]:
            elements = cast("list[str | dict[str, Any]]", item.get("set", {}).get("elem", []))
            addresses.update(
                element if isinstance(element, str) else str(element["elem"]["val"]) for element in elements
            )
    return sorted(addresses)


async def firewall_for(
    mode: FirewallMode, *, node: str, needless: str = "", networks: tuple[HostNetwork, ...] = ()
) -> tuple[Firewall | None, str]:
    """The node's firewall, or why it has none. `needless`: why auto needs none, empty where it does.

    Raises ConfigError where it has to be on and cannot be.
    """
    if mode == "off":
        return None, "--firewall off"
    if needless and mode == "auto":
        return None, needless
    try:
        return await Firewall.open(node, mode=mode, networks=networks), ""
    except TransportError as error:
        if mode == "on":
            raise ConfigError(f"firewall = 'on': {error}") from None
        return None, str(error)


def why_no_table() -> str:
    """Why this process can keep no table; empty where it can. Makes an empty one, which is gone when this returns."""
    try:
        keeper = Keeper()
    except TransportError as error:
        return str(error)
    try:
        keeper.begin(table_text(table_name("doctor")))
        keeper.ask(removal_text(table_name("doctor")))
    except TransportError as error:
        return str(error)
    finally:
        keeper.end()
    return ""


async def _apart(call: Callable[[], _Answer]) -> _Answer:
    return await asyncio.get_running_loop().run_in_executor(None, call)
