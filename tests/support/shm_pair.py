"""An arena's owner and its writer over shared memory: on one loop, or the writer in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdtransfer.handoff.effects import Map, Outcome, Write
from pdtransfer.layout.layout import Component, Layout, Plane, Span
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.gpu_launcher import WriterGpu
from pdtransfer.transports.options import WriterOptions
from pdtransfer.transports.shm.arena import ShmArena
from pdtransfer.transports.shm.writer import ShmWriter
from pdtransfer.wire import Reach
from tests.support.paths import REPO

LAYERS, ROW, PAGE, SLOTS = 4, 1_152, 64, 8_192
WRITER = 7


class Process:
    """A module of tests/support that writes, and what it forked."""

    def __init__(self, reach: Reach, session: int = WRITER, script: str = "shm_writer.py", *more: str) -> None:
        writer = str(REPO / "tests" / "support" / script)
        self.started = subprocess.Popen(
            [sys.executable, writer, str(session), msgspec.json.encode(reach), *more],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}"},
        )  # fmt: skip
        self.forked: list[int] = []

    async def __aenter__(self) -> Process:
        assert await self.receive() == "mapped"
        return self

    async def __aexit__(self, *_: object) -> None:
        for pid in self.forked:
            os.kill(pid, signal.SIGKILL)
        self.started.kill()
        self.started.communicate()

    async def receive(self) -> str:
        assert self.started.stdout is not None
        return (await asyncio.to_thread(self.started.stdout.readline)).strip()

    def send(self, command: str) -> None:
        assert self.started.stdin is not None
        self.started.stdin.write(command + "\n")
        self.started.stdin.flush()

    async def child(self, how: str) -> int:
        self.send(how)
        self.forked.append(int(await self.receive()))
        return self.forked[-1]


def to_map(session: int, reach: Reach, components: tuple[Component, ...]) -> Map:
    """The order to map an arena whose components all writers write alike."""
    return Map(session, reach, components, components)


def component(layout: Layout, name: str = "latent", **fields: object) -> Component:
    given = {"memory": "dram", "tokens_per_row": 1, "span": Span()} | fields
    return Component(name=name, layout=layout, **given)  # type: ignore[arg-type]


def layer_first(slots: int = SLOTS, base: int = 0) -> Layout:
    return Layout(
        tuple(
            Plane(index, "latent", "uint8", 0, 1, base + index * slots * ROW, PAGE * ROW, ROW, ROW)
            for index in range(LAYERS)
        ),
        PAGE,
        slots,
    )


def page_first(slots: int = SLOTS, first_layer: int = 0) -> Layout:
    item = LAYERS * ROW
    return Layout(
        tuple(
            Plane(first_layer + index, "latent", "uint8", 0, 1, index * ROW, item, item, ROW) for index in range(LAYERS)
        ),
        1,
        slots,
    )


@dataclass
class Pool:
    """Prefill's memory: random bytes, no two rows alike."""

    layout: Layout = field(default_factory=layer_first)
    bytes: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = np.random.default_rng(5).integers(0, 256, self.layout.end, np.uint8)

    @property
    def component(self) -> Component:
        return component(self.layout)

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data


@asynccontextmanager
async def opened(make: Callable[..., Any], *given: Any, **more: Any) -> AsyncIterator[Any]:
    """What `make` returns on the loop that enters it, closed in the end."""
    made = make(*given, **more)
    try:
        yield made
    finally:
        await made.close()


class Pair:
    """An arena's owner and a writer on one loop, and what the arena must hold in the end."""

    def __init__(
        self, arena: ArenaMemory, directory: Path, *, threads: int = 2, gpu: WriterGpu | None = None, address: int = 0
    ) -> None:
        self.pool, self.arena = Pool(), arena
        self.owner = ShmArena(arena, directory=directory)
        self.hinted: list[int] = []  # writes
        self.writer = ShmWriter(
            (self.pool.component,),
            WriterOptions(pool_address=address or self.pool.address, copy_threads=threads),
            self._wrote,
            gpu=gpu,
            wake_hint=lambda order: self.hinted.append(order.write),
        )
        self.target = page_first()
        self.wanted = np.zeros(arena.byte_count, np.uint8)
        self.ended: list[tuple[int, Outcome, str]] = []
        self.writes = 0
        self.checksums: dict[int, int] = {}

    async def map(self, session: int = WRITER) -> int:
        return await self.writer.map(to_map(session, await self.owner.offer(session), (component(self.target),)))

    def write(
        self,
        source: NDArray[np.int64],
        target: NDArray[np.int64],
        *,
        grant: int,
        layers: tuple[int, int] = (0, LAYERS),
        session: int = WRITER,
        **more: Any,
    ) -> Write:
        self.writes += 1
        order = Write(
            session=session, grant=grant, room=grant, write=self.writes, component=0, layers=layers,
            source_slots=source, target_slots=target, **more,
        )  # fmt: skip
        self.writer.write(order)
        return order

    def _wrote(self, order: Write, outcome: Outcome, text: str, checksum: int) -> None:
        self.ended.append((order.write, outcome, text))
        self.checksums[order.write] = checksum

    def want(self, order: Write) -> None:
        """The order's rows, by the layouts' own addresses."""
        for layer in range(*order.layers):
            ours = self.pool.layout.address(layer, order.source_slots)
            theirs = self.target.address(layer, order.target_slots)
            row = np.arange(ROW)
            self.wanted[theirs[:, None] + row] = self.pool.bytes[ours[:, None] + row]

    @property
    def right(self) -> bool:
        return bool(np.array_equal(self.arena.mapping.array, self.wanted))

    async def close(self) -> None:
        await self.writer.close()
        await self.owner.close()
