"""What an inference engine embeds: submit from any thread, poll when fileno is readable; `aio` wraps it for asyncio.

A client runs its node on a loop of its own, in a thread, so a scheduler that computes for a second delays no peer.
Nothing here blocks but `start` and `close`. Misuse raises LocalProtocolError where it can be seen at once; what only
the node can see, a cell offered twice say, fails the room.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import numpy as np
import uvloop
from numpy.typing import ArrayLike

from ..bus.keys import AllowList
from ..environment import share_the_interpreter
from ..errors import LocalProtocolError, PDTransferError
from ..handoff.effects import DecodeEvent, Drained, Landed, Leased, PrefillEvent, Ready, RoomFailed
from ..handoff.prefill.sessions import Cell
from ..handoff.sharing import Replicas
from ..layout.layout import Component, slots_of_rows
from ..limits import TOKENS_MAX
from ..memory.arena_memory import Arena
from ..node import DecodeNode, NodeSettings, PrefillNode
from ..node.thread_queues import Port
from ..transports.device_events import Event
from ..transports.network import NETWORK, Network, Transport
from ..wire import pack_ids

STATES_MAX = 65_536  # of ended rooms, kept for schedulers that ask late
Node = TypeVar("Node", DecodeNode, PrefillNode)
Said = TypeVar("Said")


class KVPoll(IntEnum):
    """A room as SGLang's schedulers ask for it: one integer, of which min() over ranks is the room's."""

    FAILED = 0
    BOOTSTRAPPING = (
        1  # prefill: not every decode rank has leased slots; decode: the room waits, or its bytes are coming
    )
    WAITING_FOR_INPUT = 2  # prefill: slots are leased, cells may be pushed
    TRANSFERRING = 3  # prefill: finish was called
    SUCCESS = 4  # prefill: landed everywhere; decode: READY


class _Thread(Generic[Node]):
    """One node on its own loop and thread."""

    def __init__(self, port: Port[Said], start: Callable[[], Awaitable[Node]]) -> None:
        self._port, self._start = port, start
        self._thread = threading.Thread(target=self._run, name="pdtransfer", daemon=True)
        self._standing: Future[Callable[[], None]] = Future()  # what ends it
        self.node: Node | None = None

    def start(self) -> None:
        """Returns when the node stands; raises what kept it from standing."""
        self._thread.start()
        self._standing.result()

    def close(self) -> None:
        """Ends the node in good order, and the thread; idempotent."""
        if self._thread.is_alive():
            if self._standing.exception() is None:
                self._standing.result()()
            self._thread.join()

    def _run(self) -> None:
        try:
            uvloop.run(self._main())
        except Exception as error:
            if self._standing.done():
                raise
            self._standing.set_exception(error)

    async def _main(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self.node = await self._start()
        self._port.attach(loop)
        self._standing.set_result(partial(_call, loop, stop.set))
        await stop.wait()
        await self.node.close()


def _call(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(call)


class _Client(Generic[Node, Said]):
    """What both sides share: the port, the states, the life of the thread."""

    def __init__(self, start: Callable[[], Awaitable[Node]], *, has_keys: bool) -> None:
        self._port: Port[Said] = Port()
        self._has_keys = has_keys
        self._thread: _Thread[Node] = _Thread(self._port, start)
        self._states: dict[int, KVPoll] = {}
        self._ended: dict[int, None] = {}  # oldest first
        self._closed = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Opens sockets and the thread that serves them; threads of this process take shorter turns from now on
        (sys.setswitchinterval). Raises ConfigError and WorldError."""
        share_the_interpreter()
        self._thread.start()

    def close(self) -> None:
        """Fails what is under way, says goodbye to peers, ends the thread; idempotent.

        `poll` has the last words. No page is read any more; into an arena peers may write until they have heard it.
        """
        self._closed = True
        self._thread.close()
        self._port.close()

    def allow(self, allowed: AllowList) -> None:
        """Takes another allow-list in place of the one in its settings.

        Who is on it no more, or under another name or in other roles, loses its connections and its sessions: their
        rooms fail. LocalProtocolError where this client has no keys.
        """
        if not self._has_keys:
            raise LocalProtocolError("allowed: a client without keys knows no allow-list")
        self._port.submit(lambda: self._node.allow(allowed))

    def fileno(self) -> int:
        """For select, poll, epoll, or loop.add_reader: readable while `poll` has something to say."""
        return self._port.fileno()

    def state(self, room: int) -> KVPoll:
        """Where the room is, as far as `poll` has said; of ended rooms the last STATES_MAX. KeyError for others."""
        return self._states[room]

    def _begin(self, room: int, tokens: int) -> None:
        if self._closed:
            raise LocalProtocolError(f"room: {room:#x} comes too late, this client is closed")
        if room in self._states:  # The peer remembers it, too: what is still on its way must not find another room.
            text = f"room: {room:#x} was used already, it is {self._states[room].name}; a retry takes a new label"
            raise LocalProtocolError(text)
        if not 1 <= tokens <= TOKENS_MAX:
            raise LocalProtocolError(f"tokens: {tokens}, from 1 to {TOKENS_MAX} are possible")
        self._states[room] = KVPoll.BOOTSTRAPPING

    def _end(self, room: int) -> None:
        """Nobody holds anything of the room; its state is kept for a while."""
        self._ended[room] = None
        if len(self._ended) > STATES_MAX:
            oldest = next(iter(self._ended))
            del self._ended[oldest], self._states[oldest]

    @property
    def _node(self) -> Node:
        assert self._thread.node is not None, "start() comes first"
        return self._thread.node


class PrefillClient(_Client[PrefillNode, PrefillEvent]):
    """A prefill rank. `components` are the engine's pools, their bases addresses, or offsets from `pool_address`.

    Of a model spread over several ranks they hold this rank's layers and heads, and `settings.ranks` says which it
    is. Where n ranks hold the same rows of a component, `replicas` has it as {name: (which of them this is, n)}. Where
    the pools lie in the memory of a `card`, that card writes them; then `condemned`, if it is given, is called from
    another thread once a write's end is unknown: nothing but the end of this process proves it, so end it.

    The engine: `open`, then `push` and `finish`, or `abort`. It may reuse a room's pages once `poll` says Drained.
    """

    def __init__(
        self,
        settings: NodeSettings,
        components: Sequence[Component],
        *,
        bind: str = "tcp://127.0.0.1:0",
        pool_address: int = 0,
        copy_threads: int = 2,
        card: int | None = None,
        replicas: Replicas | None = None,
        condemned: Callable[[], None] | None = None,
        transport: Transport = "auto",
        network: Network = NETWORK,
    ) -> None:
        self.endpoint = bind  # as bound, once started
        self._components = {component.name: component for component in components}

        async def start() -> PrefillNode:
            node = PrefillNode(
                settings,
                components,
                self._port.tell,
                pool_address=pool_address,
                copy_threads=copy_threads,
                card=card,
                replicas=replicas,
                transport=transport,
                network=network,
            )
            node.condemned = condemned or node.condemned
            try:
                self.endpoint = await node.bus.bind(bind)
            except PDTransferError:
                await node.close()
                raise
            return node

        super().__init__(start, has_keys=settings.keys is not None)

    def open(
        self,
        room: int,
        *,
        tokens: int,
        time_left_s: float = 60.0,
        grants: int = 1,
        peers: Collection[str] | None = None,
    ) -> None:
        """A room of `tokens` tokens in all, for `grants` decode ranks; before or after their grants arrive.

        `room` is a u64 that both sides know it by, and no other room, before or after. `peers`, if given, names the
        only ranks it is for: by public key or as the allow-list does; where there are no keys, by their nodes.
        """
        self._begin(room, tokens)
        self._port.submit(
            lambda: self._node.open(room, tokens=tokens, time_left_s=time_left_s, grants=grants, peers=peers),
        )

    def push(
        self,
        room: int,
        pages: ArrayLike,
        *,
        rows: tuple[int, int],
        layers: tuple[int, int] | None = None,
        component: str = "kv",
        skip: int = 0,
        after: Event | None = None,
    ) -> None:
        """Offers rows [first, end) of layers [first, end), by default all, to be read once `after` has fired.

        A cell without `after` waits as the one pushed before it. `pages` are page indices of the room's rows from 0 to
        at least rows[1], row 0 `skip` slots into the first, as a sliding window's may be; they must not change or be
        freed before Drained. Raises LocalProtocolError where they do not fit.
        """
        held = self._components.get(component)
        if held is None:
            raise LocalProtocolError(f"component: {component!r} is none of {sorted(self._components)}")
        slots = slots_of_rows(pages, held.layout.page_size, rows, skip=skip)
        cell = Cell(component, rows[0], layers or held.layout.layer_range, slots)
        self._port.submit(lambda: self._node.push(room, cell, after=after))

    def finish(self, room: int, *, aux: bytes = b"", after: Event | None = None) -> None:
        """Every cell was pushed, if its event has fired or not. `aux` is what decode needs to go on.

        Landed follows, then Drained.
        """
        if self._states.get(room) in (KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT):
            self._states[room] = KVPoll.TRANSFERRING
        self._port.submit(lambda: self._node.finish(room, aux=aux, after=after))

    def abort(self, room: int) -> None:
        """Gives the room up. Its pages are safe when Drained says so, not before."""
        self._port.submit(lambda: self._node.abort(room))

    def poll(self) -> list[PrefillEvent]:
        """What has happened since; never waits."""
        events = self._port.poll()
        for event in events:
            match event:
                case Leased(room) if self._states[room] is KVPoll.BOOTSTRAPPING:
                    self._states[room] = KVPoll.WAITING_FOR_INPUT
                case Leased():
                    pass
                case Landed(room):
                    self._states[room] = KVPoll.SUCCESS
                case RoomFailed(room):
                    self._states[room] = KVPoll.FAILED
                case Drained(room):
                    self._end(room)
        return events


class DecodeClient(_Client[DecodeNode, DecodeEvent]):
    """A decode rank, over its arena. The engine: `expect`, then `release` after Ready, or `abort` before it."""

    def __init__(
        self,
        settings: NodeSettings,
        components: Sequence[Component],
        arena: Arena,
        *,
        socket_directory: Path | None = None,
        enable_hisparse: bool = False,
        prefix_cache: bool = True,
        verify: bool = False,
        transport: Transport = "auto",
        network: Network = NETWORK,
    ) -> None:
        async def start() -> DecodeNode:
            return DecodeNode(
                settings,
                components,
                arena,
                self._port.tell,
                socket_directory=socket_directory,
                enable_hisparse=enable_hisparse,
                prefix_cache=prefix_cache,
                verify=verify,
                transport=transport,
                network=network,
            )

        super().__init__(start, has_keys=settings.keys is not None)

    def dial(self, source: str) -> None:
        """Opens the session with a prefill rank ahead of its first room."""
        self._port.submit(lambda: self._node.dial(source))

    def expect(
        self,
        room: int,
        *,
        tokens: int,
        sources: Sequence[str],
        growth: int = 0,
        prefix: int = 0,
        prompt: ArrayLike | None = None,
        salt: bytes = b"",
        time_left_s: float = 60.0,
        enable_hisparse: bool = False,
    ) -> None:
        """Leases slots for `tokens` and `growth` more, and has the prefill ranks at `sources` write them.

        `room` is the label under which they open it. With `prompt`, its token ids, the blocks that an earlier prompt of
        equal tokens and `salt` has left in the arena do not cross, and this one's are left for others: no engine may
        write the prompt's rows. `prefix` is for engines that keep prefixes elsewhere: so many tokens do not cross.
        Ends as Ready, whose slots are one a row, growth included, or as RoomFailed.
        """
        keys = () if prompt is None else self._node.core.cache.keys(_token_ids(prompt, tokens), salt)
        self._begin(room, tokens)
        self._port.submit(
            lambda: self._node.expect(
                room,
                tokens=tokens,
                sources=sources,
                time_left_s=time_left_s,
                growth=growth,
                prefix=prefix,
                keys=keys,
                enable_hisparse=enable_hisparse,
            ),
        )

    def release(self, room: int, *, after: Event | None = None) -> None:
        """The engine touches no slot of this READY room any more, once `after` has fired; idempotent."""
        if self._states.get(room) is KVPoll.SUCCESS:
            self._end(room)
        self._port.submit(lambda: self._node.release(room, after=after))

    def abort(self, room: int) -> None:
        """Gives a room up that is not READY; RoomFailed follows at once, its slots come back by proof.

        Ready may have been on its way already: such a room is to be released like any other.
        """
        self._port.submit(lambda: self._node.abort(room))

    def poll(self) -> list[DecodeEvent]:
        """What has happened since; never waits."""
        events = self._port.poll()
        for event in events:
            if isinstance(event, Ready):
                self._states[event.room] = KVPoll.SUCCESS
            else:
                self._states[event.room] = KVPoll.FAILED
                self._end(event.room)
        return events


def _token_ids(prompt: ArrayLike, tokens: int) -> bytes:
    """As the wire has them. Raises LocalProtocolError for what are not `tokens` ids."""
    ids = np.asarray(prompt)
    if ids.shape != (tokens,) or ids.dtype.kind not in "iu":
        raise LocalProtocolError(f"prompt: {ids.dtype} of shape {ids.shape}, not integers ({tokens},)")
    if int(ids.min()) < 0 or int(ids.max()) > 0xFFFF_FFFF:
        raise LocalProtocolError(f"prompt: ids from {ids.min()} to {ids.max()}, they are u32")
    return pack_ids(ids)
