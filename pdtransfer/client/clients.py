"""The clients that an inference engine embeds: calls from any thread, events by `poll` when `fileno` is readable.

A client runs its node on a loop of its own, in a thread, so a scheduler that computes for a second delays no peer.
Only `start` and `close` block. A call raises LocalProtocolError for misuse that it can detect at once. Misuse that only
the node can detect, such as a cell that is pushed twice, fails the room. `aio` wraps the clients for asyncio.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from enum import IntEnum
from functools import partial
from typing import Any, Generic, Self, TypeVar

from numpy.typing import ArrayLike

from ..bounds import checked, integer, label, listed, seconds, span
from ..bus.keys import AllowList, Endpoint
from ..errors import LocalProtocolError, WorldError
from ..handoff.component_variants import NO_STAND_INS, StandIns
from ..handoff.decode.room_request import RoomRequest, chosen_rows
from ..handoff.effects import (
    DecodeEvent,
    PrefillEvent,
    RoomAsked,
    RoomDrained,
    RoomFailed,
    RoomLanded,
    RoomLeased,
    RoomReady,
)
from ..handoff.prefill.cells import Cell
from ..handoff.ready_gate import ReadyGate
from ..handoff.sharing import Replicas
from ..layout.geometry import integers
from ..layout.layout import Component, slots_of_rows
from ..limits import PEERS_MAX, TOKENS_MAX
from ..memory.arena_memory import ArenaMemory
from ..threads import cpus_of, run_loop, run_on
from ..transports.device_events import Event
from ..transports.options import ArenaOptions, WriterOptions
from ..wire import Member, pack_ids
from .decode_node import DecodeNode
from .prefill_node import PrefillNode
from .settings import NodeSettings
from .thread_queues import ThreadQueues

STATES_MAX = 65_536  # ended rooms whose state is kept
ASKED_MAX = 16_384  # events that wait for `poll`; a RoomAsked beyond it is dropped: peers decide how many come
Node = TypeVar("Node", DecodeNode, PrefillNode)
PolledEvent = TypeVar("PolledEvent")


class KVPoll(IntEnum):
    """The state of a room on one rank, as SGLang's schedulers poll it: the minimum over all ranks is the room's."""

    FAILED = 0
    BOOTSTRAPPING = 1  # prefill: a decode rank has not leased slots yet; decode: the room has not landed yet
    WAITING_FOR_INPUT = 2  # prefill: every decode rank has leased slots, so a pushed cell leaves at once
    TRANSFERRING = 3  # prefill: finish was called
    SUCCESS = 4  # prefill: landed everywhere; decode: READY


class _Client(Generic[Node, PolledEvent]):
    """What both clients share: a node on its own loop and thread, the queues to and from it, the states of rooms."""

    def __init__(self, start: Callable[[], Awaitable[Node]], settings: NodeSettings, *, drains: bool = True) -> None:
        self._port: ThreadQueues[PolledEvent] = ThreadQueues()
        self.drains = drains  # whether RoomDrained is the last event of each room
        self._has_keys = settings.keys is not None
        self._start_node, self._cpus = start, settings.cpus
        self._thread = threading.Thread(target=self._run, name="pdtransfer", daemon=True)
        self._beginning = threading.Lock()  # of `start` or `close`, whichever is first
        self._stop: Future[Callable[[], object]] = Future()  # what ends the node, once it runs
        self._running: Node | None = None
        self._states: dict[int, KVPoll] = {}
        self._ended: dict[int, None] = {}  # oldest first
        self._closed = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Opens the sockets and starts the thread that serves them. Blocks until both are up.

        While another thread runs Python code, the new one waits for up to sys.getswitchinterval(). An engine that wants
        faster hand-offs shortens that itself. Raises ConfigError for settings that can never work, and WorldError for
        what fails now, such as a port that is taken; then the client is closed. Raises LocalProtocolError for a client
        that was started or closed before.
        """
        with self._beginning:
            if self._closed or self._thread.ident is not None:
                raise LocalProtocolError("start: this client was started or closed already; make another one")
            try:
                self._thread.start()
            except RuntimeError as error:
                self._closed = True
                self._port.close()
                raise WorldError(f"start: {error}") from None
        try:
            self._stop.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Fails every room under way, sends the peers Goodbye and ends the thread; idempotent, and blocks until then.

        It may be called while the interpreter exits. `poll` still returns the last events. From now on no page of a
        pool is read. Peers may write into an arena until they have received the goodbye.
        """
        with self._beginning:
            self._closed = True
        if self._thread.is_alive():
            if self._stop.exception() is None:
                self._stop.result()()
            self._thread.join()
        self._port.close()

    def allow(self, allowed: AllowList) -> None:
        """Replaces the allow-list of the settings.

        A peer that is not on the new list, or has another name or other roles there, loses its connections and its
        sessions, and their rooms fail. Raises LocalProtocolError for a client without keys.
        """
        if not self._has_keys:
            raise LocalProtocolError("allowed: a client without keys has no allow-list")
        checked("allowed", allowed, AllowList)
        self._port.to_loop(self._node.allow, allowed)

    def fileno(self) -> int:
        """A descriptor for select, poll, epoll or loop.add_reader: readable while `poll` has events to return."""
        return self._port.fileno()

    def state(self, room: int) -> KVPoll:
        """The state of a room after the events that `poll` has returned.

        Raises KeyError for a room that was never begun, and for all but the last STATES_MAX rooms that have ended.
        """
        try:
            return self._states[room]
        except TypeError:  # it cannot be the key of a dict
            raise KeyError(room) from None

    def quiesce(self, room: int, timeout_s: float) -> bool:
        """Gives a room up and blocks until it is drained, so that its memory may be reused; False after `timeout_s`.

        For an engine that must have the memory back now, as when it preempts a request. Call it from the thread that
        calls `poll`, which still returns the room's events. Raises LocalProtocolError on a decode client without
        `engine_slots`, and KeyError as `state`.
        """
        if not self.drains:
            raise LocalProtocolError("room: this client leases the slots itself, and reports no RoomDrained")
        if self.state(room) in (KVPoll.SUCCESS, KVPoll.FAILED) and room in self._ended:
            return True
        timeout_s = seconds("timeout_s", timeout_s)
        self._port.to_loop(self._node.abort, room)
        return self._port.wait_for(lambda event: isinstance(event, RoomDrained) and event.room == room, timeout_s)

    def _check_begins(self, room: int, tokens: int | None) -> None:
        """Raises LocalProtocolError for a room that may not begin, and before `start`."""
        _ = self._node
        if self._closed:
            raise LocalProtocolError(f"room: {room:016x} comes too late, this client is closed")
        if room in self._states:  # The peer remembers it, too: what is still on its way must not find another room.
            text = f"room: {room:016x} was used already, it is {self._states[room].name}; a retry takes a new label"
            raise LocalProtocolError(text)
        if tokens is not None and not 1 <= tokens <= TOKENS_MAX:
            raise LocalProtocolError(f"tokens: {tokens}, from 1 to {TOKENS_MAX} are possible")

    def _begin(self, room: int, call: Callable[..., object], *args: Any, **named: Any) -> None:
        """Has the loop begin a room; one that it has no place for did not begin."""
        self._states[room] = KVPoll.BOOTSTRAPPING
        try:
            self._port.to_loop(call, *args, **named)
        except WorldError:
            del self._states[room]
            raise

    def _end(self, room: int) -> None:
        """The room has ended; its state is kept for a while."""
        self._ended[room] = None
        if len(self._ended) > STATES_MAX:
            oldest = next(iter(self._ended))
            del self._ended[oldest], self._states[oldest]

    @property
    def _node(self) -> Node:
        if self._running is None:
            raise LocalProtocolError("call start() first")
        return self._running

    def _run(self) -> None:
        try:
            run_on(cpus_of(self._cpus))
            run_loop(self._main)
        except Exception as error:
            if self._stop.done():
                raise
            self._stop.set_exception(error)

    async def _main(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        node = self._running = await self._start_node()
        self._port.attach(loop)
        self._stop.set_result(partial(loop.call_soon_threadsafe, stop.set))
        await stop.wait()
        await node.close()


class PrefillClient(_Client[PrefillNode, PrefillEvent]):
    """A prefill rank: it sends the KV of its rooms to the decode ranks that ask for them.

    `components` describe the engine's pools. The bases of their planes are addresses, or offsets in bytes from
    `pool_address`. If a model is spread over several ranks, they hold this rank's layers and heads, and
    `settings.ranks` names them. If n ranks hold the same rows of a component, `replicas` maps its name to
    (index of this rank among them, n).

    `bind` is the tcp://host:port to listen on, port 0 for any; `endpoint` is where it listens once started.
    `copy_threads` copy rows in host memory. `device` is the CUDA ordinal if the pools are in that GPU's memory: the GPU
    then writes the rows itself. `condemned` is then called, from another thread, if nobody can know whether a write of
    the GPU has ended. Only the end of this process proves it, so end the process. `transport` restricts how rows
    travel, and `network` configures transports to other hosts.

    Each room takes `open`, then `push` and `finish`, or `abort`. Once `poll` returns RoomDrained, its pages may be
    reused. RoomAsked reports a room that decode asked for before it is open; while ASKED_MAX events wait for `poll`, it
    does not.
    """

    def __init__(
        self,
        settings: NodeSettings,
        components: Sequence[Component],
        *,
        bind: str = "tcp://127.0.0.1:0",
        writer: WriterOptions | None = None,
        replicas: Replicas | None = None,
        condemned: Callable[[], None] = lambda: None,
    ) -> None:
        self.endpoint = bind  # as bound, once started
        self._components = {component.name: component for component in components}

        async def start() -> PrefillNode:
            node = PrefillNode(
                settings, components, self._report, writer=writer, replicas=replicas, condemned=condemned
            )
            try:
                await node.prepare()
                self.endpoint = await node.bus.bind(bind)
            except BaseException:
                await node.close()
                raise
            return node

        super().__init__(start, settings)
        self._node_name, self._group_is_known = settings.node, settings.group is not None

    def _report(self, event: PrefillEvent) -> None:
        if not isinstance(event, RoomAsked) or self._port.unpolled < ASKED_MAX:
            self._port.to_engine(event)

    def set_group(self, members: Sequence[Member]) -> None:
        """Names all ranks of this worker, this one first, so that a decode rank needs the endpoint of this one alone.

        For a rank that leads and was made with `group=None`, as the endpoints are known only once all ranks have
        started. Until then it answers no decode rank. Raises LocalProtocolError for other clients, a second call, and
        members that have no endpoint, are too many, or are there twice; the first one needs none.
        """
        if self._group_is_known:
            raise LocalProtocolError("group: it is set already; NodeSettings(group=None) leaves it to set_group")
        members = listed("group", members, Member)
        names = listed("group: node", [member.node for member in members], str)
        endpoints = listed("group: endpoint", [member.endpoint for member in members[1:]], str)
        if names[:1] != (self._node_name,) or len(names) > PEERS_MAX:
            text = f"group: {list(names[:8])} are not 1..{PEERS_MAX} ranks with {self._node_name!r} first"
            raise LocalProtocolError(text)
        if not all(endpoints) or len(set(names)) < len(names) or len(set(endpoints)) < len(endpoints):
            raise LocalProtocolError(f"group: {list(endpoints)} of {list(names[1:])} are not one endpoint each")
        self._port.to_loop(self._node.set_group, members)
        self._group_is_known = True

    def open(
        self, room: int, *, tokens: int | None, time_left_s: float = 60.0, grants: int | None = 1,
        peers: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        """Begins a room of `tokens` tokens for `grants` decode ranks, before or after these have asked for it.

        Both may be None where only decode knows: the first decode rank that asks then decides, by its tokens and by the
        size of its group. RoomLeased reports them. `room` is a u64 by which both sides know the room; no other room may
        ever have it. The room fails if it has not ended after `time_left_s` seconds. `peers` restricts it to these
        decode ranks, each given by its public key or its name on the allow-list, or without keys by its node's name.
        Raises LocalProtocolError for a room number that was used before, and for a count of tokens that is out of
        bounds.
        """
        room, tokens = label(room), None if tokens is None else integer("tokens", tokens)
        grants, time_left_s = None if grants is None else integer("grants", grants), seconds("time_left_s", time_left_s)
        peers = None if peers is None else listed("peers", peers, str)
        self._check_begins(room, tokens)
        self._begin(room, self._node.open, room, tokens=tokens, time_left_s=time_left_s, grants=grants, peers=peers)

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
        """Offers rows [first, end) of layers [first, end), by default all layers, to be read once `after` has fired.

        `pages` are integers (n,): the indices of the pages that hold the room's rows from row 0 to at least rows[1], in
        order. Row 0 is `skip` slots into the first page, as in a sliding window. The rows must not change and the pages
        must not be freed, before RoomDrained. A cell without `after` waits for the event of the cell pushed before it.
        Raises LocalProtocolError for a room that was never opened, an unknown component, and pages that do not cover
        the rows.
        """
        room, rows, after = self._begun(room), span("rows", rows), _event(after)
        gate = None if after is None else ReadyGate(after)
        pool = self._components.get(checked("component", component, str))
        if pool is None:
            raise LocalProtocolError(f"component: {component!r} must be one of {sorted(self._components)}")
        slots = slots_of_rows(pages, pool.layout.page_size, rows, skip=integer("skip", skip))
        cell = Cell(component, rows[0], span("layers", layers or pool.layout.layer_range), slots, gate)
        self._port.to_loop(self._node.push, room, cell)

    def finish(self, room: int, *, aux: bytes = b"", after: Event | None = None) -> None:
        """Every cell of the room has been pushed; their events need not have fired.

        `aux` is at most 64 KiB that decode needs to continue, such as the first token. RoomLanded follows, then
        RoomDrained.
        """
        room, aux, after = self._begun(room), _octets("aux", aux), _event(after)
        if self._states.get(room) in (KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT):
            self._states[room] = KVPoll.TRANSFERRING
        self._port.to_loop(self._node.finish, room, aux=aux, after=after)

    def abort(self, room: int, detail: str = "") -> None:
        """Gives the room up, also one that was never opened; `detail` is the reason for decode. RoomFailed follows for
        an open one, then RoomDrained: only then may its pages be reused."""
        room, detail = label(room), _text("detail", detail)
        self._port.to_loop(self._node.abort, room, detail=detail)

    def poll(self) -> list[PrefillEvent]:
        """The events since the last call, oldest first; never waits."""
        events = self._port.poll()
        for event in events:
            match event:
                case RoomLeased(room) if self._states[room] is KVPoll.BOOTSTRAPPING:
                    self._states[room] = KVPoll.WAITING_FOR_INPUT
                case RoomLanded(room):
                    self._states[room] = KVPoll.SUCCESS
                case RoomFailed(room):
                    self._states[room] = KVPoll.FAILED
                case RoomDrained(room):
                    self._end(room)
                case _:
                    pass
        return events

    def _begun(self, room: int) -> int:
        _ = self._node
        if (number := label(room)) not in self._states:
            raise LocalProtocolError(f"room: {number:016x} is not open")
        return number


class DecodeClient(_Client[DecodeNode, DecodeEvent]):
    """A decode rank: it leases slots of its arena to rooms, and prefill ranks write their KV there.

    `components` describe the arena, with bases that are offsets in bytes from its first byte. Those of memory "hbm" lie
    in `arena.hbm` if that is set. The caller keeps `arena`, and closes it after the client. Peers of this host fetch
    the arena at a Unix socket in `socket_directory`, which is made private to this user, or by default at an abstract
    one. With `prefix_cache` the blocks of earlier prompts stay in free slots for rooms that begin with the same tokens.
    With `verify` every row that landed is read back and compared with the sender's checksum before RoomReady.
    `transport` restricts how rows travel, and `network` configures transports from other hosts.

    Each room takes `expect`, then `release` after RoomReady, or `abort` before it.

    With `engine_slots` the engine's own allocator owns the arena: `expect` takes the slots that it chose for a room,
    and there is nothing to release. The engine must not give these slots to another request before `poll` has returned
    RoomDrained for the room. It follows RoomReady and RoomFailed once nobody can write them any more. After RoomReady
    that is at once. After an abort, a deadline or the death of a peer it takes until there is a proof. Components may
    then lie in the same memory, as the groups of a hybrid model do, each with its own layers, if they number their
    slots alike. A slot belongs to one room and one component at a time. `stand_ins` names those components that
    describe the bytes of another one by other rows: by the name of each that of the other. A room brings the slots of
    both. A prefill rank that has the other one writes that, one that has only the stand-in writes the stand-in.
    `open_ended` names those components of which another rank may have the end of a prompt.
    """

    def __init__(
        self,
        settings: NodeSettings,
        components: Sequence[Component],
        arena: ArenaMemory,
        *,
        options: ArenaOptions | None = None,
        enable_hisparse: bool = False,
        engine_slots: bool = False,
        stand_ins: StandIns = NO_STAND_INS,
        open_ended: Collection[str] = (),
        prefix_cache: bool = True,
        verify: bool = False,
    ) -> None:
        self._components, self.engine_slots = tuple(components), engine_slots
        self._open_ended = frozenset(open_ended)

        async def start() -> DecodeNode:
            return DecodeNode(
                settings, components, arena, self._port.to_engine, options=options, enable_hisparse=enable_hisparse,
                engine_slots=engine_slots, stand_ins=stand_ins, prefix_cache=prefix_cache, verify=verify,
            )  # fmt: skip

        super().__init__(start, settings, drains=engine_slots)

    def dial(self, source: str) -> None:
        """Opens the session with the prefill rank at `source`, [KEY@]tcp://host:port, ahead of its first room, as long
        as there is room for it. A rank that may not be dialled is skipped: a room that names it fails with the reason.
        Raises ConfigError for a malformed endpoint."""
        Endpoint.parse(checked("source", source, str))
        self._port.to_loop(self._node.introduce, (source,))

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
        slots: Mapping[str, ArrayLike] | None = None,
        time_left_s: float = 60.0,
        enable_hisparse: bool = False,
        whole_group: bool = False,
    ) -> None:
        """Leases slots for `tokens` and `growth` more tokens, and has the prefill ranks at `sources` write the former.

        `room` is the u64 under which they open it, and `sources` are their endpoints, [KEY@]tcp://host:port. Ends as
        RoomReady, whose slots are one a row with growth included, or as RoomFailed, at the latest after `time_left_s`.
        With `whole_group` each source is the rank that leads a prefill worker and names its other ranks
        (PrefillClient.set_group): the room waits for all of them.

        `prompt` is the room's token ids, integers (tokens,). Blocks of an earlier prompt with the same first tokens and
        `salt` that are still in the arena are not sent again. This prompt's blocks stay for later rooms: the engine
        must not write the rows of the prompt. `prefix` is the number of first tokens that are not sent because
        the engine has them elsewhere. With `enable_hisparse`, which the client must allow as well, a component that
        exists in both memories has its rows in DRAM.

        With `engine_slots`, and only then, `slots` are those that the engine chose: for each component integers
        (rows,), one a row of the room. Not sent are the first rows whose slots are -1, as in a sliding window, and the
        rows of the `prefix`, whose slots other requests may share. Of a component of `open_ended`, the last rows may
        have -1 as well. RoomReady.slots are those of the rows that are sent.

        Raises LocalProtocolError for a room number that was used before and a count of tokens that is out of bounds.
        It is raised as well for a prompt that is not `tokens` u32 ids, and for slots that are missing, repeated or
        outside the arena. Slots of a room that has not drained fail this room.
        """
        room, tokens, growth = label(room), integer("tokens", tokens), integer("growth", growth)
        prefix, time_left_s = integer("prefix", prefix), seconds("time_left_s", time_left_s)
        sources, salt = listed("sources", sources, str), _octets("salt", salt)
        self._check_begins(room, tokens)
        if (slots is not None) is not self.engine_slots:
            wanted = "needs slots" if self.engine_slots else "takes no slots"
            raise LocalProtocolError(f"slots: a client made with engine_slots={self.engine_slots} {wanted}")
        chosen = None
        if slots is not None:
            if prompt is not None or growth:
                text = "slots: with slots of the engine's choice neither a prompt nor growth is possible"
                raise LocalProtocolError(text)
            checked("slots", slots, Mapping)
            chosen = chosen_rows(
                self._components, slots, tokens=tokens, prefix=prefix, enable_hisparse=enable_hisparse,
                open_ended=self._open_ended,
            )  # fmt: skip
        keys = () if prompt is None else self._node.core.cache.keys(_token_ids(prompt, tokens), salt)
        request = RoomRequest(
            room=room, tokens=tokens, sources=sources, time_left_s=time_left_s, growth=growth, prefix=prefix, keys=keys,
            enable_hisparse=enable_hisparse, chosen=chosen, whole_group=whole_group,
        )  # fmt: skip
        self._begin(room, self._node.expect, request)

    def withdraw(self, room: int, *, sources: Sequence[str], detail: str = "") -> None:
        """Informs the prefill ranks at `sources` that this client will not expect a room that they may have open: it
        fails there, also if it is opened later. `detail` is the reason. No event follows. A room that is expected is
        left alone: `abort` gives it up."""
        room, sources, detail = label(room), listed("sources", sources, str), _text("detail", detail)
        self._port.to_loop(self._node.withdraw, room, sources, detail)

    def release(self, room: int, *, after: Event | None = None) -> None:
        """Returns a ready room's slots once `after` has fired: the engine must not touch them any more. Idempotent."""
        room, after = label(room), _event(after)
        if self._states.get(room) is KVPoll.SUCCESS:
            self._end(room)
        self._port.to_loop(self._node.release, room, after=after)

    def abort(self, room: int, detail: str = "") -> None:
        """Gives up a room that is not ready; `detail` is the reason for prefill. RoomFailed follows at once; its slots
        return when no write can reach them.

        If RoomReady was already on its way, the room has to be released like any other.
        """
        room, detail = label(room), _text("detail", detail)
        self._port.to_loop(self._node.abort, room, detail=detail)

    @property
    def copied_up_bytes(self) -> int:
        """Bytes that were copied from the arena to HBM so far, as their writers do not reach the GPU."""
        return self._node.lifted_bytes

    def poll(self) -> list[DecodeEvent]:
        """The events since the last call, oldest first; never waits."""
        events = self._port.poll()
        for event in events:
            match event:
                case RoomReady(room):
                    self._states[room] = KVPoll.SUCCESS
                case RoomFailed(room):
                    self._states[room] = KVPoll.FAILED
                    if not self.engine_slots:
                        self._end(room)
                case RoomDrained(room):
                    self._end(room)
        return events


def _token_ids(prompt: ArrayLike, tokens: int) -> bytes:
    """The token ids, `tokens` u32, as bytes on the wire."""
    ids = integers("prompt", prompt, tokens)
    if int(ids.min()) < 0 or int(ids.max()) > 0xFFFF_FFFF:
        raise LocalProtocolError(f"prompt: ids from {ids.min()} to {ids.max()}, they are u32")
    return pack_ids(ids)


def _text(name: str, value: str) -> str:
    """A text for people; what UTF-8 does not have in it is replaced."""
    return checked(name, value, str).encode(errors="replace").decode()


def _octets(name: str, value: bytes) -> bytes:
    """Bytes, copied where the caller may change them."""
    return bytes(value if isinstance(value, bytearray | memoryview) else checked(name, value, bytes))


def _event(after: Event | None) -> Event | None:
    if after is not None and not callable(getattr(after, "query", None)):
        raise LocalProtocolError(f"after: {after!r:.64} has no query()")
    return after
