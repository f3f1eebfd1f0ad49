"""What the embedded client takes of a scheduler's thread while large rooms move: its calls, and the interpreter's lock.

Two processes, each with a client on a thread of its own and a scheduler that never waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar

import numpy as np

from pdtransfer.client.clients import DecodeClient, PrefillClient
from pdtransfer.client.settings import NodeSettings
from pdtransfer.errors import PDTransferError, WorldError
from pdtransfer.handoff.effects import RoomDrained, RoomFailed, RoomLeased
from pdtransfer.kernels.driver import count
from pdtransfer.kernels.gpu import gpu_at
from pdtransfer.layout.layout import Component
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.mapping import allocate
from pdtransfer.transports.options import WriterOptions

from .models import PAGE_SIZE, components
from .processes import Failure, answer, begun
from .report import Figures, Line

_STEP_S = 1e-3  # how long a scheduler waits for its GPU in each turn, without the interpreter's lock
_CHUNK_TOKENS = 512  # prefill offers a room in as many
_QUIET_TURNS = 500
_ANSWER_S = 120.0
_answer = partial(answer, who="the prefill process", within_s=_ANSWER_S)
_SIDES = ("prefill", "decode")
Result = TypeVar("Result")
Given = ParamSpec("Given")

LINES = (
    Line("rooms", "{rooms} x {room_mib:,.0f} MiB", "{at_once} at once, {gb_s:.1f} GB/s; {where}"),
    *(
        Line(
            f"{side}, client's part of a turn",
            f"p99 {{{side}_turn_p99_us:,.0f}} us",
            f"p50 {{{side}_turn_p50_us:,.0f}}, most {{{side}_turn_max_us:,.0f}}, {{{side}_turns:,}} turns; aim 1,000",
        )
        for side in _SIDES
    ),
    *(
        Line(
            f"{side}, own Python beside it",
            f"p99 {{{side}_work_p99_us:,.0f}} us",
            f"p50 {{{side}_work_p50_us:,.0f}}; with no room under way {{{side}_quiet_p50_us:,.0f}} and p99 "
            f"{{{side}_quiet_p99_us:,.0f}}",
        )
        for side in _SIDES
    ),
)


def measure(*, tokens: int = 4_096, rooms: int = 96, at_once: int = 4) -> Figures:
    """Rooms of `tokens` tokens of 61 x 1,152 bytes; each side's scheduler takes a turn every millisecond.

    A turn is `poll` and what its events ask for: expect and release, or open, push (a chunk of 512 tokens of
    each room) and finish. `turn` is what these calls took together, `work` 5,000 rounds of an empty loop in the same
    thread, which the loop's thread may interrupt. Prefill's pool is on GPU 0 where there is one, and that GPU
    writes; else copy threads do. Quantiles are over all turns of one run but those before the first room has ended,
    when kernels are compiled; in 500 before that there is no room.
    """
    source, target = components("deepseek", source_slots=at_once * tokens, target_slots=at_once * tokens)
    room_bytes = tokens * source.layout.row_bytes
    with ExitStack() as stack:
        process, ours = begun(_prefill, source, tokens, rooms, at_once)
        stack.callback(process.kill)
        arena = _arena(target, stack)
        with DecodeClient(_settings("decode"), (target,), arena, prefix_cache=False) as client:
            scheduler = _Decode(client, _answer(ours), tokens=tokens, rooms=rooms, at_once=at_once)
            turns = scheduler.run()
            ours.send(None)  # every room is released: the other side may end
            figures = _answer(ours)
    return {
        "where": "the CPU" if not count() else gpu_at(0).architecture, "tokens": tokens, "rooms": rooms,
        "at_once": at_once, "room_mib": room_bytes / (1 << 20), "gb_s": rooms * room_bytes / scheduler.seconds / 1e9,
    } | _figures("prefill", figures) | _figures("decode", turns)  # fmt: skip


class Turns:
    """What a scheduler's turns took, in ns."""

    def __init__(self) -> None:
        self.calls, self.work, self.quiet = list[int](), list[int](), list[int]()
        self._call_ns = 0

    def call(self, work: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
        """One of the client's."""
        start = time.perf_counter_ns()
        result = work(*given, **named)
        self._call_ns += time.perf_counter_ns() - start
        return result

    def end(self, *, counts: bool) -> None:
        """Then the scheduler's own work, and its wait for the GPU."""
        if counts:
            self.calls.append(self._call_ns)
            self.work.append(_busy())
        self._call_ns = 0
        time.sleep(_STEP_S)

    def rest(self) -> None:
        """The same work while nothing is under way."""
        for _ in range(_QUIET_TURNS):
            self.quiet.append(_busy())
            time.sleep(_STEP_S)


def _busy() -> int:
    start = time.perf_counter_ns()
    for _ in range(5_000):
        pass
    return time.perf_counter_ns() - start


class _Decode:
    """Expects rooms, and releases what is READY."""

    def __init__(self, client: DecodeClient, source: str, *, tokens: int, rooms: int, at_once: int) -> None:
        self._client, self._source, self._tokens, self._rooms = client, source, tokens, rooms
        self._at_once, self.seconds = at_once, 0.0

    def run(self) -> Turns:
        turns = Turns()
        turns.rest()
        started = ended = 0
        start = time.perf_counter()
        while ended < self._rooms:
            for event in turns.call(self._client.poll):
                _check(event)
                turns.call(self._client.release, event.room)
                ended += 1
            while started < min(self._rooms, ended + self._at_once):
                started += 1
                turns.call(self._client.expect, started, tokens=self._tokens, sources=(self._source,))
            turns.end(counts=bool(ended))
        self.seconds = time.perf_counter() - start
        return turns


def _prefill(pipe: Connection, source: Component, tokens: int, rooms: int, at_once: int) -> None:
    """The other process."""
    try:
        on_card = count() > 0
        pool = None if on_card else allocate(source.layout.end)
        if pool is not None:
            pool.array[:] = 7
        address = gpu_at(0).allocate(source.layout.end) if pool is None else pool.address
        writer = WriterOptions(pool_address=address, device=0 if on_card else None)
        with PrefillClient(_settings("prefill"), (source,), writer=writer) as client:
            pipe.send(client.endpoint)
            turns = Turns()
            turns.rest()
            _offer(client, turns, tokens=tokens, rooms=rooms, at_once=at_once)
            pipe.recv()
            pipe.send(turns)
    except PDTransferError as error:
        pipe.send(Failure(str(error)))


def _offer(client: PrefillClient, turns: Turns, *, tokens: int, rooms: int, at_once: int) -> None:
    """A chunk of each room that holds a grant in each turn, as an engine's next forward pass has computed it."""
    page_count = -(-tokens // PAGE_SIZE)
    opened = drained = 0
    under_way: dict[int, int] = {}  # tokens that were offered
    while drained < rooms:
        for event in turns.call(client.poll):
            _check(event)
            if isinstance(event, RoomLeased):
                under_way[event.room] = 0
            drained += isinstance(event, RoomDrained)
        while opened < min(rooms, drained + at_once):
            opened += 1
            turns.call(client.open, opened, tokens=tokens)
        for room, offered in list(under_way.items()):
            end = under_way[room] = min(offered + _CHUNK_TOKENS, tokens)
            first = room % at_once * page_count
            pages, rows = np.arange(first, first + -(-end // PAGE_SIZE)), (offered, end)
            turns.call(client.push, room, pages, rows=rows)
            if end == tokens:
                del under_way[room]
                turns.call(client.finish, room)
        turns.end(counts=bool(drained))


def _arena(target: Component, stack: ExitStack) -> ArenaMemory:
    arena = ArenaMemory.create(target.layout.end)
    stack.callback(arena.close)
    if count():
        arena.gpu = gpu_at(0)
    arena.prefault()
    return arena


def _settings(name: str) -> NodeSettings:
    return NodeSettings(node=name, model="bench", weights=b"")


def _check(event: object) -> None:
    if isinstance(event, RoomFailed):
        raise WorldError(f"room {event.room} failed: {event.detail}")


def _figures(side: str, turns: Turns) -> Figures:
    figures: Figures = {f"{side}_turns": len(turns.calls), f"{side}_turn_max_us": max(turns.calls) / 1e3}
    for name, times in (("turn", turns.calls), ("work", turns.work), ("quiet", turns.quiet)):
        figures |= {f"{side}_{name}_p{share}_us": _quantile(times, share) for share in (50, 99)}
    return figures


def _quantile(times: Sequence[int], share: int) -> float:
    return float(np.percentile(times, share)) / 1e3
