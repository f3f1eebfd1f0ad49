"""The two processes of `bench pd`: an engine's thread and a node on a loop, as a daemon has, and one prompt at a time.

What a daemon would hear from its router comes by a pipe; everything else is the daemons' own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import numpy as np
import uvloop

from ..config.config import DecodeConfig, PrefillConfig
from ..engine_api import Broken, CardMemory, Finished, Prefilled, Request, SharedMemory
from ..errors import PDTransferError
from ..handoff.effects import DecodeEvent, Drained, Landed, Leased, PrefillEvent, Ready, RoomFailed
from ..handoff.prefill.sessions import Cell
from ..kernels.card import card
from ..layout.layout import expand_pages
from ..memory.arena_memory import Arena
from ..memory.hbm import Hbm
from ..node import DecodeNode, NodeSettings, PrefillNode
from ..node.thread_queues import Port
from ..process.setup import prepare
from ..tracing.timeline import Span, Timeline
from ..wire import Sampling
from ..worker import engine_thread
from ..worker.cell_batching import Push
from ..worker.daemon import attach, create_engine
from ..worker.engine_thread import Compute, DecodeOutcome, Free, Generate, Offered, PrefillOutcome, Quit, Refused
from .orders import Failure
from .pd_roof import roof
from .pd_sums import Sums, card_sums, host_sums

Way = Literal["auto", "layers", "end", "none", "alone"]
"""How rows leave: the three that `--push` knows; not at all; or with nothing computed."""

ROOM_S = 120.0
_IDLE_POLL_S = 0.002


class Prompt(NamedTuple):
    """One prompt of so many tokens, the same for the same number; decode makes `steps` steps of its own. With `check`
    both sides sum its rows where they lie."""

    room: int
    tokens: int
    way: Way
    steps: int = 2
    check: bool = False
    hisparse: bool = False


class Roof(NamedTuple):
    """How long do copies of so many bytes take that nothing can be faster than?"""

    byte_counts: tuple[int, ...]
    repeats: int


class Told(NamedTuple):
    """What one side has to say of a prompt."""

    spans: list[Span]
    sums: Sums


def ids_of(prompt: Prompt) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Bytes, as token ids."""
    return np.random.default_rng(prompt.room).integers(0, 256, prompt.tokens, dtype=np.int64)


def request_of(prompt: Prompt) -> Request:
    """What both engines hear of it."""
    sampling = Sampling(prompt.steps + 1, ignore_eos=True)
    return Request(room=prompt.room, prompt=ids_of(prompt), sampling=sampling, enable_hisparse=prompt.hisparse)


class _Side(ABC):
    """One process. It ends when its pipe does."""

    def __init__(self, pipe: Connection, engine: Any, timeline: Timeline) -> None:
        self._pipe, self._loop, self._over = pipe, asyncio.get_running_loop(), asyncio.Event()
        self._engine, self._timeline = engine, timeline
        self._prompt = Prompt(0, 0, "none")
        self._loop.set_exception_handler(self._broke)
        self._loop.add_reader(pipe.fileno(), self._asked)

    async def wait(self) -> None:
        """Until the pipe ends."""
        await self._over.wait()
        self._loop.remove_reader(self._pipe.fileno())

    def _asked(self) -> None:
        try:
            order = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._over.set()
            return
        self.perform(order)

    def _broke(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A call on the loop raised something: the bench would wait for nothing."""
        error = context.get("exception")
        self._fail(f"{type(error).__name__}: {error}" if error is not None else str(context.get("message")))

    @property
    def quiet(self) -> bool:
        """Whether the engine has nothing to do, and no span left to tell."""
        return self._engine.idle

    @abstractmethod
    def perform(self, order: object) -> None:
        """Does what was asked, and answers now or when it is done."""

    def _fail(self, text: str) -> None:
        if not self._over.is_set():
            self._over.set()
            self._pipe.send(Failure(f"room {self._prompt.room}: {text}"))

    def _died(self, error: BaseException) -> None:
        """In the engine's thread."""
        text = f"the engine broke down: {type(error).__name__}: {error}"
        self._loop.call_soon_threadsafe(self._fail, text)

    def _tell(self, sums: Sums | None = None) -> None:
        """Once the engine has nothing more to say: it tells of its spans when nobody waits for it."""
        if self.quiet:
            self._pipe.send(Told(self._timeline.take(), sums or {}))
        else:
            self._loop.call_later(_IDLE_POLL_S, self._tell, sums)


class _Prefill(_Side):
    def __init__(self, pipe: Connection, config: PrefillConfig, engine: Any, timeline: Timeline) -> None:
        super().__init__(pipe, engine, timeline)
        pool, pool_fd = engine.pool, -1
        if isinstance(pool, SharedMemory):
            pool, pool_fd = pool.view, pool.fd
        self._on_card = pool.card if isinstance(pool, CardMemory) else None
        self._address = (
            pool.address if isinstance(pool, CardMemory) else np.frombuffer(pool, dtype=np.uint8).ctypes.data
        )
        self.node = PrefillNode(
            _settings(config, engine), engine.card.components, self._told,
            pool_address=self._address, pool_fd=pool_fd, copy_threads=config.copy_threads, card=self._on_card,
            replicas=engine.card.replicas, spans=self._timeline,
        )  # fmt: skip
        self._ports: dict[Push, Port[Any]] = {}
        self._port: Port[Any] = Port()
        self._cells: list[Cell] = []
        self._opened_s = self._finished_s = 0.0

    @property
    def quiet(self) -> bool:
        return self._engine.idle and not self._engine.telling

    async def serve(self) -> None:
        """Says where it is reached, then does what it is asked."""
        self._pipe.send(await self.node.bus.bind("tcp://127.0.0.1:0"))
        await self.wait()
        for port in self._ports.values():
            port.tell(Quit())
        await self.node.close()

    def _run(self, how: Push) -> None:
        """A thread of the engine's for each way, that lasts: what libraries make for a thread takes 40 ms and more at
        its first prompt. One of them has something to do at a time, as there is one prompt."""
        if (port := self._ports.get(how)) is not None:
            self._port = port
            return
        self._port = self._ports[how] = Port()
        self._port.attach(self._loop)
        work = engine_thread.PrefillThread(self._engine, self._port, self._heard, push=how)
        engine_thread.start(work, self._died)

    def perform(self, order: object) -> None:
        match order:
            case Prompt(room, tokens, way):
                self._prompt, self._cells, self._opened_s = order, [], time.monotonic()
                if way != "none":
                    self.node.open(room, tokens=tokens, time_left_s=ROOM_S)
                if way != "alone":
                    self._run("end" if way == "none" else way)
                    self._port.tell(Compute(request_of(order)))
            case Roof():
                self._pipe.send(roof(self._on_card, self._address, order.byte_counts, order.repeats))
            case _:
                raise AssertionError(order)

    def _heard(self, outcomes: list[PrefillOutcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Offered(room=room, cell=cell, after=after):
                    self._cells.append(cell)
                    if self._prompt.way != "none":
                        self.node.push(room, cell, after=after)
                case Prefilled(room=room, aux=aux):
                    self._finished_s = time.monotonic()
                    if self._prompt.way != "none":
                        self.node.finish(room, aux=aux)
                    else:
                        self._port.tell(Free(room))
                        self._tell()
                case Broken(detail=detail) | Refused(detail=detail):
                    self._fail(detail)

    def _told(self, event: PrefillEvent) -> None:
        now = time.monotonic()
        match event:
            case Leased(room):
                self._timeline("control", "open to grant", self._opened_s, now, room=room)
                if self._prompt.way == "alone":
                    self._loop.call_soon(self._offer, room)
            case Landed(room):
                self._timeline("control", "finish to Landed", self._finished_s, now, room=room)
            case RoomFailed(detail=detail):
                self._fail(f"failed at prefill: {detail}")
            case Drained(room):
                sums = self._sums() if self._prompt.check else None
                if self._prompt.way != "alone":
                    self._port.tell(Free(room))
                self._tell(sums)

    def _offer(self, room: int) -> None:
        """All rows of every component at once, of pages anywhere in the pool, whatever they hold."""
        for component in self._engine.card.components:
            layout, tokens = component.layout, self._prompt.tokens
            pages = np.random.default_rng(room).permutation(layout.slots // layout.page_size)
            slots = expand_pages(pages[: -(-tokens // layout.page_size)], layout.page_size, tokens)
            self.node.push(room, Cell(component.name, 0, layout.layer_range, slots))
        self._finished_s = time.monotonic()
        self.node.finish(room, aux=b"")

    def _sums(self) -> Sums:
        sums: Sums = {}
        layouts = {component.name: component.layout for component in self._engine.card.components}
        for cell in self._cells:
            layout = layouts[cell.component].layers(*cell.layers)
            rows = cell.source_slots, cell.first_row
            if self._on_card is None:
                own = host_sums(cell.component, layout, self._address, *rows)
            else:
                own = card_sums(cell.component, layout, self._on_card, self._address, *rows)
            for key, value in own.items():
                sums[key] = (sums.get(key, 0) + value) % (1 << 64)
        return sums


class _Decode(_Side):
    def __init__(
        self, pipe: Connection, config: DecodeConfig, engine: Any, arena: Arena, endpoint: str, timeline: Timeline
    ) -> None:
        super().__init__(pipe, engine, timeline)
        self._arena, self._endpoint = arena, endpoint
        self.node = DecodeNode(
            _settings(config, engine), engine.card.arena_components, arena, self._told,
            socket_directory=config.socket_directory, enable_hisparse=config.enable_hisparse, prefix_cache=False,
            leased=self._leased,
        )  # fmt: skip
        self._port: Port[Any] = Port()
        self._expected_s = self._leased_s = 0.0
        self._slots: dict[str, Any] = {}

    async def serve(self) -> None:
        """Opens the session, then does what it is asked."""
        self._port.attach(self._loop)
        engine_thread.start(engine_thread.DecodeThread(self._engine, self._port, self._heard), self._died)
        self.node.dial(self._endpoint)
        sessions = self.node.core.links.sessions
        async with asyncio.timeout(ROOM_S):
            while not any(session.whole for session in sessions.values()):  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(_IDLE_POLL_S)
        self._pipe.send(None)
        await self.wait()
        self._port.tell(Quit())
        await self.node.close()

    def perform(self, order: object) -> None:
        assert isinstance(order, Prompt)
        self._prompt, self._expected_s = order, time.monotonic()
        if order.way == "none":
            self._tell()
            return
        self.node.expect(
            order.room, tokens=order.tokens, sources=(self._endpoint,), time_left_s=ROOM_S, growth=order.steps + 1,
            enable_hisparse=order.hisparse,
        )  # fmt: skip

    def _leased(self, room: int) -> None:
        self._leased_s = time.monotonic()
        self._timeline("control", "expect to lease", self._expected_s, self._leased_s, room=room)

    def _told(self, event: DecodeEvent) -> None:
        match event:
            case Ready(room, slots, aux, kv_bytes):
                self._timeline("landing", "READY", self._leased_s, time.monotonic(), room=room, byte_count=kv_bytes)
                self._slots = slots
                if self._prompt.way == "alone":
                    self._over_with(room)
                else:
                    self._port.tell(Generate(request_of(self._prompt), slots, aux))
            case RoomFailed(detail=detail):
                self._fail(f"failed at decode: {detail}")

    def _heard(self, outcomes: list[DecodeOutcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Finished(room=room):
                    self._over_with(room)
                case Broken(detail=detail):
                    self._fail(detail)
                case _:
                    pass

    def _over_with(self, room: int) -> None:
        sums: Sums = {}
        if self._prompt.check:
            for component in self._engine.card.components:
                if component.memory == "dram":
                    slots = self._slots[component.name][: self._prompt.tokens]
                    sums |= host_sums(component.name, component.layout, self._arena.mapping.address, slots, 0)
        self.node.release(room)
        self._tell(sums)


def _settings(config: PrefillConfig | DecodeConfig, engine: Any) -> NodeSettings:
    return NodeSettings(node=config.role, model=engine.card.model, weights=engine.card.weights, limits=config.limits)


def run_prefill(pipe: Connection, config: PrefillConfig) -> None:
    """The prefill process: answers first with its endpoint."""

    async def serve() -> None:
        timeline = Timeline("prefill")
        engine = create_engine(config.engine, replace(config.engine_config, spans=timeline))
        await _Prefill(pipe, config, engine, timeline).serve()

    _run(pipe, serve)


def run_decode(pipe: Connection, config: DecodeConfig) -> None:
    """The decode process: is told first a prefill's endpoint, and answers when its arena is there."""

    async def serve() -> None:
        timeline = Timeline("decode")
        engine = create_engine(config.engine, replace(config.engine_config, spans=timeline))
        arena = await asyncio.to_thread(_arena, config, engine)
        endpoint = await asyncio.to_thread(pipe.recv)
        await _Decode(pipe, config, engine, arena, endpoint, timeline).serve()

    _run(pipe, serve)


def _arena(config: DecodeConfig, engine: Any) -> Arena:
    """As a daemon's, ready as a whole; it lasts as long as the process."""
    arena = Arena.create(engine.card.arena_bytes, huge_pages=config.huge_pages, name=config.node)
    if config.card is not None:
        arena.card = here = card(config.card)
        if (node := here.numa_node) is not None:
            arena.mapping.bind(node)
        if engine.card.hbm_bytes:
            arena.hbm = Hbm.of_card(config.card, base=engine.card.hbm_base, byte_count=engine.card.hbm_bytes)
    arena.prefault()
    attach(engine, arena)
    return arena


def _run(pipe: Connection, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
    prepare()
    logging.getLogger("pdtransfer").setLevel(logging.CRITICAL)  # rooms that fail end the bench
    try:
        uvloop.run(serve())
    except PDTransferError as error:
        pipe.send(Failure(str(error)))
