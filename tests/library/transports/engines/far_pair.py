"""A GPU's pool and an arena full of canaries, with Mooncake's engines between them, and what has to come of writes."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdtransfer.handoff.effects import Outcome, Write
from pdtransfer.kernels import checksum_copy
from pdtransfer.layout.checksum import lines_of, runs_of
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.transports.engines.arena import EngineArena
from pdtransfer.transports.engines.writer import EngineWriter
from pdtransfer.transports.gpu_launcher import WriterGpu
from pdtransfer.transports.mooncake import MooncakeLibrary
from pdtransfer.transports.options import Network, WriterOptions
from tests.support.client_pair import component
from tests.support.internals import sessions_of
from tests.support.layout_tensors import CANARY, Model, Pool, bytes_written, c4, dsa_index, mha, mla
from tests.support.processes import deliver
from tests.support.shm_pair import to_map
from tests.support.waiting import until

SESSION = 5
LARGE = 4_096  # rows of `wide`: 64 MiB, twice what a ring holds
SLOTS = 256

HOST = ("layer_first", "page_first", "page_first_direct", "page_head")
CASES = [
    *((model, layout) for model in (mha(head_bytes=256), mla(layers=range(61))) for layout in HOST),
    *((model, layout) for model in (dsa_index(), c4()) for layout in HOST[:3]),
]


def wide() -> Model:
    return mla(layers=range(14))


@dataclass
class FarPair:
    """Rows of `ours` on their way to an arena that is laid out as `wanted`, which says what has to be there."""

    ours: Pool
    wanted: Pool
    owner: EngineArena
    writer: EngineWriter
    memory: ArenaMemory
    ended: dict[int, tuple[Outcome, str]]
    checksums: dict[int, int]
    lost: list[int]

    async def map(self) -> None:
        await self.writer.map(to_map(SESSION, await self.owner.offer(SESSION), (component(self.wanted),)))

    def write(self, grant: int, source: NDArray[np.int64], target: NDArray[np.int64], **more: Any) -> None:
        """All layers of these slots, as the only write of its grant."""
        layers = self.ours.model.layers
        order = Write(
            session=SESSION, grant=grant, room=grant, write=grant, component=0, layers=(layers[0], layers[-1] + 1),
            source_slots=source, target_slots=target, **more,
        )  # fmt: skip
        self.writer.write(order)

    async def ends(self, grant: int) -> tuple[Outcome, str]:
        """How that grant's write ends."""
        await until(lambda: grant in self.ended)
        return self.ended[grant]

    def want(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """These rows, by the tensors' own indexing."""
        self.wanted.land(source, target)

    @property
    def right(self) -> bool:
        """Whether every byte of the arena is as wanted, canaries too."""
        wanted, array = self.wanted.memory[:-64], self.memory.mapping.array
        return np.array_equal(array[: len(wanted)], wanted) and bool((array[len(wanted) :] == CANARY).all())

    def landed(self) -> int:
        """Bytes that are not canaries."""
        return bytes_written(self.memory.mapping.array)

    def engine(self) -> int:
        """The writer's engine's process."""
        process = sessions_of(self.writer)[SESSION].process
        assert process is not None
        return process.pid


@asynccontextmanager
async def far_pair(
    gpu: WriterGpu,
    address_of: Callable[[Pool], int] = lambda pool: pool.memory.ctypes.data,
    *,
    model: Model | None = None,
    layout: str = "page_first",
    slots: int = LARGE + 64,
) -> AsyncIterator[FarPair]:
    """A layer_first pool of `gpu`, which has it at `address_of` once it is filled."""
    model = model or wide()
    ours, wanted = (Pool(name=name, model=model, page_size=8, slots=slots) for name in ("layer_first", layout))
    ours.fill(np.arange(slots))
    memory = ArenaMemory.create(wanted.layout.end, huge_pages="never")
    memory.mapping.array[:] = CANARY
    lost, ended, checksums = list[int](), dict[int, tuple[Outcome, str]](), dict[int, int]()

    def wrote(order: Write, outcome: Outcome, text: str, checksum: int) -> None:
        ended[order.grant], checksums[order.grant] = (outcome, text), checksum

    writer = EngineWriter(
        MooncakeLibrary(),
        (component(ours),), WriterOptions(pool_address=address_of(ours)), wrote, gpu=gpu, lost=lost.append
    )  # fmt: skip
    owner = EngineArena(MooncakeLibrary(), memory, Network())
    try:
        yield FarPair(ours, wanted, owner, writer, memory, ended, checksums, lost)
    finally:
        await writer.close()
        await owner.close()
        memory.close()


async def lands_exactly(it: FarPair) -> None:
    """Rows of long runs, of single slots, and of one, in three grants: each where it belongs and nowhere else."""
    await it.map()
    draw = np.random.default_rng(1)
    source, scattered = draw.permutation(SLOTS)[:200], draw.permutation(np.arange(128, 255))[:90]
    rooms = [np.arange(5, 105), scattered, np.array([127])]
    cuts = np.split(source[:191], np.cumsum([len(each) for each in rooms])[:-1])
    for grant, (theirs, ours) in enumerate(zip(rooms, cuts, strict=True), 1):
        it.write(grant, ours, theirs, first_row=grant, verify=grant < 3)
        it.want(ours, theirs)
    for grant in (1, 2, 3):
        assert await it.ends(grant) == (Outcome.LANDED, "")
    assert it.right
    for grant, ours in enumerate(cuts[:2], 1):
        lines, runs = lines_of("kv", it.ours.layout, like=it.wanted.layout), runs_of(ours, np.ones_like(ours), grant)
        assert it.checksums[grant] == checksum_copy.checksum(lines, runs, it.ours.memory.ctypes.data)


async def stops_in_the_middle(it: FarPair, middle: Callable[[], bool]) -> None:
    """A large write is cancelled once `middle`, while another one is under way, and nothing of it lands after that."""
    await it.map()
    every = np.arange(LARGE)
    it.write(1, every, every)
    small = np.arange(64)
    it.write(2, small, small + LARGE)
    await until(middle)
    it.writer.cancel(SESSION, 1)
    assert await it.ends(1) == (Outcome.FAILED, "cancelled")
    assert await it.ends(2) == (Outcome.LANDED, "")
    frozen = it.memory.mapping.array.copy()
    assert np.count_nonzero(frozen != CANARY) < LARGE * it.ours.layout.row_bytes
    it.write(3, small, small)
    it.want(small, small)
    it.want(small, small + LARGE)
    assert await it.ends(3) == (Outcome.LANDED, "")
    array = it.memory.mapping.array
    same = array == frozen
    row = it.ours.layout.row_bytes
    assert same[64 * row :].all(), "something of the cancelled write came late"
    assert it.wanted.memory[: 64 * row].tobytes() == array[: 64 * row].tobytes()


async def dies_while_it_sends(it: FarPair) -> None:
    """The writer's engine is killed with a large write under way, whose end is then unknown."""
    every = np.arange(LARGE)
    await it.map()
    deliver([it.engine()], signal.SIGSTOP)  # so that it cannot be through
    it.write(1, every, every)
    await until(lambda: sessions_of(it.writer)[SESSION].batches)
    os.kill(it.engine(), signal.SIGKILL)
    assert (await it.ends(1))[0] is Outcome.UNKNOWN


async def lands_anew(it: FarPair) -> None:
    """Once the writer is fenced, decode's side of the session ends as well, and in the next one a large write lands."""
    every = np.arange(LARGE)
    it.owner.revoke(SESSION)
    await until(lambda: it.owner.quiet(SESSION))
    it.owner.forget(SESSION)
    await it.map()
    it.write(2, every, every)
    assert await it.ends(2) == (Outcome.LANDED, "")
    it.want(every, every)
    assert it.right
