"""A writer and an arena over engines of one library, in one process; their engines are in others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdtransfer.handoff.effects import Outcome, Write
from pdtransfer.layout.layout import Component
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.engines.arena import EngineArena
from pdtransfer.transports.engines.library import Library
from pdtransfer.transports.engines.writer import EngineWriter
from pdtransfer.transports.options import Network, WriterOptions
from tests.support.client_pair import component
from tests.support.internals import sessions_of
from tests.support.layout_tensors import CANARY, Pool, bytes_written, mla
from tests.support.libraries import LIBRARIES
from tests.support.shm_pair import to_map

SESSION = 5
LARGE, SMALL = 4_096, 16  # tokens: 64 MiB, and a quarter


def latent(name: str, slots: int) -> Component:
    return component(Pool(name=name, model=mla(layers=range(14)), page_size=1, slots=slots))


@dataclass
class Both:
    """A writer and an arena full of canaries, in this process; their engines are in others."""

    owner: EngineArena
    writer: EngineWriter
    pool: ArenaMemory
    memory: ArenaMemory
    target: Component
    lost: list[int]
    ended: dict[int, tuple[Outcome, str]]

    async def map(self, session: int = SESSION) -> None:
        await self.writer.map(to_map(session, await self.owner.offer(session), (self.target,)))

    def write(self, grant: int, first: int, end: int, session: int = SESSION) -> None:
        slots = np.arange(first, end)
        self.write_slots(grant, slots, slots, session)

    def write_slots(
        self, grant: int, source_slots: NDArray[np.int64], target_slots: NDArray[np.int64], session: int = SESSION
    ) -> None:
        order = Write(
            session=session, grant=grant, room=grant, write=grant, component=0, layers=(0, 14),
            source_slots=source_slots, target_slots=target_slots,
        )  # fmt: skip
        self.writer.write(order)

    def theirs(self, session: int = SESSION) -> int:
        return sessions_of(self.owner)[session].process.pid

    def ours(self, session: int = SESSION) -> int:
        process = sessions_of(self.writer)[session].process
        assert process is not None
        return process.pid

    def landed(self) -> int:
        """Bytes that are not canaries."""
        return bytes_written(self.memory.mapping.array)


@asynccontextmanager
async def both(
    library: Library = LIBRARIES[0], *, shared: bool = False, engines: tuple[int, int] = (2, 2)
) -> AsyncIterator[Both]:
    """With `shared` the pool is a memfd and laid out like the arena. `engines`: ours, and theirs."""
    slots = LARGE + SMALL
    source, target = latent("page_first" if shared else "layer_first", slots), latent("page_first", slots)
    pool = ArenaMemory.create(source.layout.end, huge_pages="never")
    memory, lost = ArenaMemory.create(target.layout.end, huge_pages="never"), list[int]()
    pool.mapping.array[:], memory.mapping.array[:] = 7, CANARY
    ours, theirs = (Network(streams=each) for each in engines)
    owner = EngineArena(library, memory, theirs, lost=lambda session, _: lost.append(session))
    pool_fd = pool.fd if shared else -1
    ended = dict[int, tuple[Outcome, str]]()

    def wrote(order: Write, outcome: Outcome, text: str, _: int) -> None:
        ended[order.grant] = outcome, text

    options = WriterOptions(network=ours, pool_address=pool.mapping.address, pool_fd=pool_fd)
    made = Both(owner, EngineWriter(library, (source,), options, wrote), pool, memory, target, lost, ended)
    try:
        yield made
    finally:
        await made.writer.close()
        await owner.close()
        memory.close()
        pool.close()


def mapped_by(pid: int) -> list[tuple[int, str]]:
    """The files that it has mapped: inode, and how."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [(int(inode), how) for _, how, _, _, inode, *_ in lines]
