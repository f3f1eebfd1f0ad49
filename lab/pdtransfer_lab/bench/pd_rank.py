"""The two processes of `bench pd`: an engine's thread and a node on a loop, as a daemon has, and one prompt at a time.

A pipe stands for the router; everything else is the daemons' own.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np

from pdtransfer.client.decode_node import DecodeNode
from pdtransfer.client.prefill_node import PrefillNode
from pdtransfer.client.settings import NodeSettings
from pdtransfer.client.thread_queues import ThreadQueues
from pdtransfer.handoff.decode.room_request import RoomRequest
from pdtransfer.handoff.effects import (
    DecodeEvent,
    PrefillEvent,
    RoomAsked,
    RoomDrained,
    RoomFailed,
    RoomLanded,
    RoomLeased,
    RoomReady,
)
from pdtransfer.handoff.prefill.cells import Cell
from pdtransfer.kernels import numpy_copy
from pdtransfer.kernels.gpu import gpu_at
from pdtransfer.kernels.pools import GpuArray
from pdtransfer.layout.geometry import Int64s
from pdtransfer.layout.layout import Layout, expand_pages
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.hbm import Hbm
from pdtransfer.serve.engine_api import Broken, Finished, GpuMemory, Prefilled, Request, SharedMemory
from pdtransfer.serve.settings.worker import DecodeConfig, PrefillConfig
from pdtransfer.serve.tracing.spans import TimedSpan, Timeline
from pdtransfer.serve.worker import engine_thread
from pdtransfer.serve.worker.cell_batching import Batching
from pdtransfer.serve.worker.daemon import attach, create_arena, create_engine
from pdtransfer.serve.worker.engine_thread import (
    Compute,
    DecodeOutcome,
    Free,
    Generate,
    Offered,
    PrefillOutcome,
    Quit,
    Refused,
    Stepped,
)
from pdtransfer.transports.options import ArenaOptions, WriterOptions
from pdtransfer.wire import Sampling

from .batching import AtEnd, ByLayer
from .processes import PipeProcess
from .replays import registered

Way = Literal["auto", "layers", "end", "none", "alone"]
"""How rows leave: as the daemons do, by layer, or after the whole prompt; not at all; or with nothing computed."""

ROOM_S = 120.0
_IDLE_POLL_S = 0.002
_DMA_BYTES = 256 << 20  # an arena is registered in such chunks


class Prompt(NamedTuple):
    """One prompt of this many tokens, the same for the same number; decode makes `steps` steps of its own. With `check`
    both sides sum its rows where they lie."""

    room: int
    tokens: int
    way: Way
    steps: int = 2
    check: bool = False
    hisparse: bool = False


Sums: TypeAlias = dict[tuple[str, int, str, int], int]
"""CRC of a prompt's rows in their order, by component, layer, kind and first head."""


class Report(NamedTuple):
    """What one side reports of a prompt."""

    spans: list[TimedSpan]
    sums: Sums


def ids_of(prompt: Prompt) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Bytes, as token ids."""
    return np.random.default_rng(prompt.room).integers(0, 256, prompt.tokens, dtype=np.int64)


def request_of(prompt: Prompt) -> Request:
    """What both engines get of it."""
    sampling = Sampling(prompt.steps + 1, ignore_eos=True)
    return Request(room=prompt.room, prompt=ids_of(prompt), sampling=sampling, enable_hisparse=prompt.hisparse)


def add_rows(
    sums: Sums, component: str, layout: Layout, address: int, slots: Int64s, *, device: int | None = None
) -> None:
    """Continues the sums with the rows of `slots`, in memory of this process or of a card, and waits for the card."""
    for plane in layout.planes:
        where = [plane.base, plane.page_stride, plane.row_stride]
        if device is None:
            rows = numpy_copy.gather(address, where, slots, (layout.slots, layout.page_size), plane.row_bytes)
        else:
            rows = _gather_from_gpu(address, where, slots, layout, plane.row_bytes, device)
        key = component, plane.layer, plane.kind, plane.head_start
        sums[key] = crc32(np.ascontiguousarray(rows).data, sums.get(key, 0))


def _gather_from_gpu(address: int, where: list[int], slots: Int64s, layout: Layout, width: int, index: int) -> Any:
    """As numpy_copy.gather."""
    import torch

    device, (base, *strides) = torch.device("cuda", index), where
    shape = layout.slots // layout.page_size, layout.page_size, width
    plane = torch.as_tensor(GpuArray(address, layout.end, "|u1"), device=device).as_strided(shape, (*strides, 1), base)
    indices = torch.as_tensor(slots, device=device)
    return plane[indices // layout.page_size, indices % layout.page_size].cpu().numpy()


def roof(on: int | None, source: int, byte_counts: Sequence[int], repeats: int) -> list[float]:
    """The median seconds that one copy of each of `byte_counts` takes, which no write can beat. The card's copy engine
    copies from the pool at `source` into registered memory; without a card memcpy does, into shared memory."""
    with ExitStack() as stack:
        if on is None:
            arena = ArenaMemory.create(max(byte_counts))
            stack.callback(arena.close)
            arena.prefault()

            def copy_s(byte_count: int) -> float:
                start = time.perf_counter()
                ctypes.memmove(arena.mapping.address, source, byte_count)
                return time.perf_counter() - start
        else:
            gpu = gpu_at(on)
            target, stream = stack.enter_context(registered(gpu, max(byte_counts))), gpu.stream()
            start, end = (gpu.call("cuEventCreate", 0) for _ in range(2))

            def copy_s(byte_count: int) -> float:
                gpu.record(start, stream)
                for offset in range(0, byte_count, _DMA_BYTES):
                    gpu.copy(target + offset, source + offset, min(_DMA_BYTES, byte_count - offset), stream)
                gpu.record(end, stream)
                gpu.synchronise(stream)
                return float(gpu.call("cuEventElapsedTime", start, end)) / 1e3

        for each in byte_counts:
            copy_s(each)  # what only the first copy waits for
        return [median(copy_s(byte_count) for _ in range(repeats)) for byte_count in byte_counts]


class _Side(PipeProcess):
    """One process, with its engine."""

    def __init__(self, pipe: Connection, config: PrefillConfig | DecodeConfig) -> None:
        super().__init__(pipe)
        self._timeline = Timeline(config.role)
        self._engine = create_engine(config.factory, replace(config.engine_config, spans=self._timeline))
        self._prompt = Prompt(0, 0, "none")

    @property
    def quiet(self) -> bool:
        """True if the engine has nothing to do, and no span left to report."""
        return self._engine.idle

    def fail(self, text: str) -> None:
        super().fail(f"room {self._prompt.room}: {text}")

    def _died(self, error: BaseException) -> None:
        """In the engine's thread."""
        text = f"the engine broke down: {type(error).__name__}: {error}"
        self._loop.call_soon_threadsafe(self.fail, text)

    def _report(self, sums: Sums | None = None) -> None:
        """Reports once the engine is quiet: it reports its spans when it has nothing else to do."""
        if self.quiet:
            self._pipe.send(Report(self._timeline.take(), sums or {}))
        else:
            self._loop.call_later(_IDLE_POLL_S, self._report, sums)


class PrefillSide(_Side):
    """The prefill process: answers first with its endpoint."""

    def __init__(self, pipe: Connection, config: PrefillConfig) -> None:
        super().__init__(pipe, config)
        engine = self._engine
        pool, pool_fd = engine.pool, -1
        if isinstance(pool, SharedMemory):
            pool, pool_fd = pool.view, pool.fd
        self._on_card = pool.device if isinstance(pool, GpuMemory) else None
        self._address = pool.address if isinstance(pool, GpuMemory) else np.frombuffer(pool, dtype=np.uint8).ctypes.data
        self.node = PrefillNode(
            _settings(config, engine), engine.description.components, self._on_event,
            writer=WriterOptions(
                pool_address=self._address, pool_fd=pool_fd, copy_threads=config.copy_threads, device=self._on_card
            ),
            replicas=engine.description.replicas, spans=self._timeline,
        )  # fmt: skip
        # The queues of each way's thread, and where the engine reports while that thread steps it.
        self._threads: dict[Way, tuple[ThreadQueues[Any], Any]] = {}
        self._port: ThreadQueues[Any] = ThreadQueues()
        self._cells: list[Cell] = []
        self._opened_s = self._finished_s = 0.0

    @property
    def quiet(self) -> bool:
        return self._engine.idle and not self._engine.model.spans.pending

    async def serve(self) -> None:
        """Reports where it is reached, then does what it is asked."""
        self._pipe.send(await self.node.bus.bind("tcp://127.0.0.1:0"))
        await super().serve()
        for port, _ in self._threads.values():
            port.to_engine(Quit())
        await self.node.close()

    def _run(self, how: Way) -> None:
        """A thread of the engine's for each way, that lasts: what libraries make for a thread takes 40 ms and more at
        its first prompt. One of them has something to do at a time, as there is one prompt."""
        if how in self._threads:
            self._port, self._engine.report = self._threads[how]
            return
        self._port = ThreadQueues()
        self._port.attach(self._loop)
        steps = engine_thread.leader_steps(self._engine, self._port, None)
        batching: dict[Way, Batching] = {"layers": ByLayer(), "end": AtEnd(self._engine.description.components)}
        work = engine_thread.PrefillThread(
            self._engine, self._port, self._on_outcomes, steps, batching=batching.get(how)
        )
        self._threads[how] = self._port, self._engine.report
        engine_thread.start(work, self._died)

    def answer_prompt(self, prompt: Prompt) -> None:
        """Reports once the prompt's rows have drained."""
        self._prompt, self._cells, self._opened_s = prompt, [], time.monotonic()
        if prompt.way != "none":
            self.node.open(prompt.room, tokens=prompt.tokens, time_left_s=ROOM_S)
        if prompt.way != "alone":
            self._run("end" if prompt.way == "none" else prompt.way)
            self._port.to_engine(Compute(request_of(prompt)))

    def roof(self, byte_counts: Sequence[int], repeats: int) -> None:
        self._pipe.send(roof(self._on_card, self._address, byte_counts, repeats))

    def _on_outcomes(self, outcomes: list[PrefillOutcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Offered(room=room, cell=cell):
                    self._cells.append(cell)
                    if self._prompt.way != "none":
                        self.node.push(room, cell)
                case Prefilled(room=room, aux=aux):
                    self._finished_s = time.monotonic()
                    if self._prompt.way != "none":
                        self.node.finish(room, aux=aux)
                    else:
                        self._port.to_engine(Free(room))
                        self._report()
                case Broken(detail=detail) | Refused(detail=detail):
                    self.fail(detail)
                case Stepped():
                    pass

    def _on_event(self, event: PrefillEvent) -> None:
        now = time.monotonic()
        match event:
            case RoomLeased(room):
                self._timeline("control", "open to grant", self._opened_s, now, room=room)
                if self._prompt.way == "alone":
                    self._loop.call_soon(self._offer, room)
            case RoomAsked():
                pass
            case RoomLanded(room):
                self._timeline("control", "finish to Landed", self._finished_s, now, room=room)
            case RoomFailed(detail=detail):
                self.fail(f"failed at prefill: {detail}")
            case RoomDrained(room):
                sums = self._sums() if self._prompt.check else None
                if self._prompt.way != "alone":
                    self._port.to_engine(Free(room))
                self._report(sums)

    def _offer(self, room: int) -> None:
        """All rows of every component at once, of pages anywhere in the pool, with any content."""
        for component in self._engine.description.components:
            layout, tokens = component.layout, self._prompt.tokens
            pages = np.random.default_rng(room).permutation(layout.slots // layout.page_size)
            slots = expand_pages(pages[: -(-tokens // layout.page_size)], layout.page_size, tokens)
            self.node.push(room, Cell(component.name, 0, layout.layer_range, slots))
        self._finished_s = time.monotonic()
        self.node.finish(room, aux=b"")

    def _sums(self) -> Sums:
        sums: Sums = {}
        layouts = {component.name: component.layout for component in self._engine.description.components}
        for cell in self._cells:  # of one layer in the order of their rows
            layout = layouts[cell.component].layers(*cell.layers)
            add_rows(sums, cell.component, layout, self._address, cell.source_slots, device=self._on_card)
        return sums


class DecodeSide(_Side):
    """The decode process: receives a prefill's endpoint, and answers when its arena is mapped."""

    def __init__(self, pipe: Connection, config: DecodeConfig) -> None:
        super().__init__(pipe, config)
        self._arena = _arena(config, self._engine)
        self._endpoint: str = pipe.recv()
        self.node = DecodeNode(
            _settings(config, self._engine), self._engine.description.arena_components, self._arena, self._on_event,
            options=ArenaOptions(socket_directory=config.socket_directory),
            enable_hisparse=config.enable_hisparse, prefix_cache=False,
            leased=self._leased,
        )  # fmt: skip
        self._port: ThreadQueues[Any] = ThreadQueues()
        self._expected_s = self._leased_s = 0.0
        self._slots: dict[str, Any] = {}

    async def serve(self) -> None:
        """Opens the session, then does what it is asked."""
        self._port.attach(self._loop)
        steps = engine_thread.leader_steps(self._engine, self._port, None)
        engine_thread.start(engine_thread.DecodeThread(self._engine, self._port, self._on_outcomes, steps), self._died)
        self.node.introduce((self._endpoint,))
        sessions = self.node.core.prefill_peers.sessions
        async with asyncio.timeout(ROOM_S):
            while not any(session.whole for session in sessions.values()):  # noqa: ASYNC110 (no event for it)
                await asyncio.sleep(_IDLE_POLL_S)
        self._pipe.send(None)
        await super().serve()
        self._port.to_engine(Quit())
        await self.node.close()

    def answer_prompt(self, prompt: Prompt) -> None:
        """Reports once its steps have ended."""
        self._prompt, self._expected_s = prompt, time.monotonic()
        if prompt.way == "none":
            self._report()
            return
        request = RoomRequest(
            room=prompt.room, tokens=prompt.tokens, sources=(self._endpoint,), time_left_s=ROOM_S,
            growth=prompt.steps + 1, enable_hisparse=prompt.hisparse,
        )  # fmt: skip
        self.node.expect(request)

    def _leased(self, room: int) -> None:
        self._leased_s = time.monotonic()
        self._timeline("control", "expect to lease", self._expected_s, self._leased_s, room=room)

    def _on_event(self, event: DecodeEvent) -> None:
        match event:
            case RoomReady(room, slots, aux, kv_bytes):
                self._timeline("landing", "READY", self._leased_s, time.monotonic(), room=room, byte_count=kv_bytes)
                self._slots = slots
                if self._prompt.way == "alone":
                    self._over_with(room)
                else:
                    self._port.to_engine(Generate(request_of(self._prompt), slots, aux))
            case RoomFailed(detail=detail):
                self.fail(f"failed at decode: {detail}")
            case RoomDrained():
                pass

    def _on_outcomes(self, outcomes: list[DecodeOutcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Finished(room=room):
                    self._over_with(room)
                case Broken(detail=detail):
                    self.fail(detail)
                case _:
                    pass

    def _over_with(self, room: int) -> None:
        sums: Sums = {}
        if self._prompt.check:
            for component in self._engine.description.components:
                if component.memory == "dram":
                    slots = self._slots[component.name][: self._prompt.tokens]
                    add_rows(sums, component.name, component.layout, self._arena.mapping.address, slots)
        self.node.release(room)
        self._report(sums)


def _settings(config: PrefillConfig | DecodeConfig, engine: Any) -> NodeSettings:
    return NodeSettings(
        node=config.role, model=engine.description.model, weights=engine.description.weights, limits=config.limits
    )


def _arena(config: DecodeConfig, engine: Any) -> ArenaMemory:
    """As a daemon's, ready as a whole; it lasts as long as the process."""
    arena = create_arena(config, engine.description)
    if config.device_index is not None:
        arena.gpu = gpu = gpu_at(config.device_index)
        if (node := gpu.numa_node) is not None:
            arena.mapping.bind(node)
        if engine.description.hbm_bytes:
            arena.hbm = Hbm.of_gpu(
                config.device_index, base=engine.description.hbm_base, byte_count=engine.description.hbm_bytes
            )
    arena.need_all()
    arena.prefault()
    attach(engine, arena)
    return arena
