"""Whole rooms that cross a network, beside what one synchronous write of Mooncake's engine and a socket do."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import uvloop

from pdtransfer.environment import share_the_interpreter
from pdtransfer.errors import WorldError
from pdtransfer.handoff.effects import Outcome, Write
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.mapping import allocate
from pdtransfer.serve.settings.worker import HostLayout
from pdtransfer.transports.base import Transport
from pdtransfer.transports.engines.settings import engines_for
from pdtransfer.transports.mooncake.settings import why_not
from pdtransfer.transports.options import ArenaOptions, WriterOptions
from pdtransfer.transports.registry import TRANSPORTS

from .bare import Bare
from .models import BenchModel, components
from .ranks import RankPair
from .report import Figures, Line

ROW_BYTES = 1_152
_ROWS = 2_000
_ARENAS = {"fresh": 0, "half": 64, "scattered": 1}  # half of it is held, in runs of this many slots; 0: nothing is
_ROOM = "{{{0}_gb_s:.2f}} GB/s", "{{{0}_to_sync:.2f}} of the synchronous write; aim 1.8"

LINES = (
    Line(
        "one room",
        "{room_mib:.0f} MiB",
        "{tokens} tokens of {model}; what follows is over TCP on loopback, rooms by {transport}",
    ),
    Line("engines", "{engines}", "of a session, on either side; {cores} cores"),
    Line("one synchronous write of 128 MiB", "{sync_gb_s:.2f} GB/s", "one engine; a raw socket {socket_gb_s:.2f}"),
    Line("an operation for each row of 1,152 B", "{rows_gb_s:.3f} GB/s", "one after another"),
    Line("rows gathered, fresh arena", *(text.format("fresh") for text in _ROOM)),
    Line("rows gathered, free runs of 64 slots", *(text.format("half") for text in _ROOM)),
    Line("straight from the pool, fresh arena", *(text.format("straight_fresh") for text in _ROOM)),
    Line("straight from the pool, free runs of 64 slots", *(text.format("straight_half") for text in _ROOM)),
    Line("no two free slots together", "{scattered_gb_s:.2f} GB/s", "{scattered_to_rows:.0f} of a row each; aim 10"),
    Line(
        "64 tokens behind 1 GiB", "{behind_ms:.1f} ms", "the worst of {behind_rooms}; alone {alone_ms:.1f}; aim 20 more"
    ),
)


def measure(
    *,
    tokens: int = 8_192,
    rooms: int = 8,
    model: BenchModel = "deepseek",
    transport: str = "mooncake",
    large_bytes: int = 1 << 30,
) -> Figures:
    """Rooms of `tokens` tokens, one at a time, from `expect` to READY, between two processes over TCP on loopback, by
    `transport`.

    Source and target are as in bench transfer over shm; what goes straight comes from a pool that is page_first, whose
    pages are runs of bytes in the arena as well. Each room is timed between a synchronous write of 128 MiB by a bare
    engine and the same through a bare socket, in two processes of their own; figures are medians over `rooms`, and
    shares are medians of what was timed side by side. Then, with one writer in this process, a write of 64 tokens is
    started every 50 ms while one of `large_bytes` is under way.
    """
    if reason := why_not() or TRANSPORTS[transport].why_not():
        raise WorldError(reason)
    figures: Figures = {"tokens": tokens, "model": model, "rooms": rooms, "transport": transport}
    figures |= {"engines": engines_for(), "cores": len(os.sched_getaffinity(0))}
    beside = _Beside()
    with ExitStack() as stack:
        beside.bare = Bare(stack)
        beside.bare.sync_write()
        figures |= _rooms(
            beside, "", "layer_first", _ARENAS, tokens=tokens, rooms=rooms, model=model, transport=transport
        )
        straight = {arena: _ARENAS[arena] for arena in ("fresh", "half")}
        figures |= _rooms(
            beside, "straight_", "page_first", straight, tokens=tokens, rooms=rooms, model=model, transport=transport
        )
    share_the_interpreter()
    figures |= uvloop.run(_behind(large_bytes, TRANSPORTS[transport]))
    medians = map(median, (beside.syncs, beside.sockets, beside.rows))
    figures["sync_gb_s"], figures["socket_gb_s"], figures["rows_gb_s"] = medians
    return figures


@dataclass(slots=True)
class _Beside:
    """What rooms are held against, GB/s."""

    bare: Bare = field(init=False)
    syncs: list[float] = field(default_factory=list[float])
    sockets: list[float] = field(default_factory=list[float])
    rows: list[float] = field(default_factory=list[float])


def _rooms(
    beside: _Beside,
    prefix: str,
    source_layout: HostLayout,
    arenas: dict[str, int],
    *,
    tokens: int,
    rooms: int,
    model: BenchModel,
    transport: str,
) -> Figures:
    source, target = components(
        model, source_slots=2 * tokens, target_slots=2 * tokens + 128, source_layout=source_layout
    )
    room_bytes, bare = tokens * source.layout.row_bytes, beside.bare
    figures: Figures = {"room_mib": room_bytes / (1 << 20)}
    with RankPair(source, target, transport=transport) as ranks:
        for arena, run in arenas.items():
            if run:
                ranks.fragment(run)
            ranks.hand_off(1, tokens=tokens)
            took, to_sync, to_rows = list[float](), list[float](), list[float]()
            for _ in range(rooms):
                beside.syncs.append(bare.sync_write())
                room = ranks.hand_off(1, tokens=tokens)
                beside.sockets.append(bare.socket())
                beside.rows.append(bare.rows(ROW_BYTES, _ROWS))
                took.append(room_bytes / float(room.ready[0] - room.expected[0]))
                to_sync.append(took[-1] / beside.syncs[-1])
                to_rows.append(took[-1] / beside.rows[-1])
            name = f"{prefix}{arena}"
            figures[f"{name}_gb_s"] = median(took)
            figures[f"{name}_to_sync"], figures[f"{name}_to_rows"] = median(to_sync), median(to_rows)
    return figures


async def _behind(large_bytes: int, transport: Transport) -> Figures:
    """How long small writes take while a large one is under way, and alone."""
    tokens = large_bytes // (61 * ROW_BYTES)
    source, target = components("deepseek", source_slots=tokens + 64, target_slots=tokens + 64)
    pool, arena, loop = allocate(source.layout.end), ArenaMemory.create(target.layout.end), asyncio.get_running_loop()
    arena.prefault()
    pool.array[:] = 7
    owner = transport.arena(arena, ArenaOptions(), hbm_direct=False, lost=lambda _, __: None)
    ends: dict[int, asyncio.Future[Outcome]] = {}
    writer = transport.writer(
        (source,), WriterOptions(pool_address=pool.address), gpu=None,
        wrote=lambda order, outcome, _, __: ends[order.grant].set_result(outcome),
        lost=lambda _: None, wake_hint=lambda _: None,
    )  # fmt: skip
    await writer.map(1, await owner.offer(1), (target,))

    async def write(grant: int, first: int, end: int) -> float:
        ended = ends[grant] = loop.create_future()
        slots = np.arange(first, end)
        order = Write(
            session=1, grant=grant, room=grant, write=grant, component=0, layers=(0, 61),
            source_slots=slots, target_slots=slots,
        )  # fmt: skip
        start = loop.time()
        writer.write(order)
        if (outcome := await ended) is not Outcome.LANDED:
            raise WorldError(f"a write has {outcome.value}")
        return (loop.time() - start) * 1e3

    alone = [await write(grant, tokens, tokens + 64) for grant in range(2, 12)]
    large, behind = loop.create_task(write(1, 0, tokens)), list[float]()
    while True:
        await asyncio.sleep(0.05)
        if large.done():
            break
        behind.append(await write(100 + len(behind), tokens, tokens + 64))
    await large
    await writer.close()
    await owner.close()
    arena.close()
    pool.close()
    return {"alone_ms": median(alone), "behind_ms": max(behind, default=0.0), "behind_rooms": len(behind)}
