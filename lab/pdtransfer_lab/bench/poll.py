"""What `poll` of an embedded client costs a scheduler that calls it in every step, where nothing has happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import numpy as np

from pdtransfer.client.clients import DecodeClient, PrefillClient
from pdtransfer.client.settings import NodeSettings
from pdtransfer.errors import WorldError
from pdtransfer.handoff.effects import RoomDrained, RoomReady
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.mapping import allocate
from pdtransfer.transports.options import WriterOptions

from .models import PAGE_SIZE, components
from .report import Figures, Line

_ROOM, _TOKENS = 1, 64
_ANSWER_S = 30.0

LINES = (
    Line("prefill, poll without an event", "{prefill_ns:,.0f} ns", "slowest round {prefill_ns_max:,.0f}; aim 1,000"),
    Line("decode, poll without an event", "{decode_ns:,.0f} ns", "slowest round {decode_ns_max:,.0f}; aim 1,000"),
    Line("a call that does nothing", "{empty_ns:,.0f} ns", "{calls:,} calls a round, {rounds} rounds"),
)


def measure(*, calls: int = 100_000, rounds: int = 21) -> Figures:
    """A prefill and a decode client in one process, with a session between them over which one room has landed.

    A round is `calls` calls of `poll` in a loop, none of which returns an event. The figure is the median of the
    rounds, of each the time of one call with its share of the loop. The clients' own threads run beside it, with
    nothing to do but pings. The call that does nothing is one of a Python function that returns an empty list.
    """
    source, target = components("mla", source_slots=_TOKENS, target_slots=_TOKENS)
    with ExitStack() as stack:
        pool = allocate(source.layout.end)
        stack.callback(pool.close)
        arena = ArenaMemory.create(target.layout.end)
        stack.callback(arena.close)
        writer = WriterOptions(pool_address=pool.address)
        prefill = stack.enter_context(PrefillClient(_settings("prefill"), (source,), writer=writer))
        decode = stack.enter_context(DecodeClient(_settings("decode"), (target,), arena, prefix_cache=False))
        _land_a_room(prefill, decode)
        figures: Figures = {"calls": calls, "rounds": rounds}
        for name, call in (("prefill", prefill.poll), ("decode", decode.poll), ("empty", _nothing)):
            times = [_ns_of(call, calls) for _ in range(rounds)]
            figures |= {f"{name}_ns": median(times), f"{name}_ns_max": max(times)}
    return figures


def _settings(node: str) -> NodeSettings:
    return NodeSettings(node=node, model="bench", weights=b"bench")


def _land_a_room(prefill: PrefillClient, decode: DecodeClient) -> None:
    prefill.open(_ROOM, tokens=_TOKENS)
    prefill.push(_ROOM, np.arange(_TOKENS // PAGE_SIZE), rows=(0, _TOKENS))
    prefill.finish(_ROOM)
    decode.expect(_ROOM, tokens=_TOKENS, sources=[prefill.endpoint])
    wanted, deadline = {RoomReady, RoomDrained}, time.monotonic() + _ANSWER_S
    while wanted:
        wanted -= {type(event) for event in [*prefill.poll(), *decode.poll()]}
        if time.monotonic() > deadline:
            raise WorldError(f"the room has not landed within {_ANSWER_S} s")
        time.sleep(1e-3)
    decode.release(_ROOM)


def _ns_of(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / calls


def _nothing() -> list[object]:
    return []
