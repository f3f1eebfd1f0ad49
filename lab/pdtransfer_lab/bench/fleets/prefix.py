"""What the prefix cache costs rooms that share nothing, and what it spares those that do."""

from __future__ import annotations

from statistics import median

import numpy as np

from pdtransfer.limits import Limits

from ..models import components
from ..ranks import RankPair
from ..report import Figures, Line

# One room's arena: each new prompt has to evict the one before, and rooms write the same slots with the cache and
# without. In an arena that is full of prompts a copy takes a tenth longer, for its target is in no core's cache.
_ARENA_ROOMS = 1
_WARM_ROOMS = 32
_POOL_ROOMS = 4

LINES = (
    Line(
        "hand-off, nothing shared, cache on",
        "{own_handoff_us:.0f} us",
        "{own_handoff_ratio:.2f} x without, {off_handoff_us:.0f} us",
    ),
    Line(
        "expect to READY, nothing shared, cache on",
        "{own_ready_us:.0f} us",
        "{own_ready_ratio:.2f} x without, {off_ready_us:.0f} us; {tokens} tokens, {room_bytes:,} bytes",
    ),
    Line("decode's CPU a room, the same", "{own_cpu_us:.0f} us", "{off_cpu_us:.0f} without"),
    Line(
        "expect to READY, all shared but the end",
        "{shared_ready_us:.0f} us",
        "{shared_ready_ratio:.2f} x without the cache, {saved_share:.0%} of the bytes do not cross",
    ),
)


def measure(*, tokens: int = 80, rooms: int = 500, rounds: int = 10) -> Figures:
    """Hand-offs of the reference model's KV over shm, one at a time, between a node in one process and one in another.

    In each round take turns: rooms without keys of their prompts (`off`); with prompts of their own (`own`): each is
    looked for, evicts what is oldest and is kept; with prompts that differ only in their last block (`shared`).
    `handoff` and `ready` as `bench handoff` has them; ratios are of the same round's p50s; each figure is the median
    over rounds.
    """
    count = max(1, rooms // rounds)
    block = Limits().prefix_block_tokens
    source, target = components("mla", source_slots=_POOL_ROOMS * tokens, target_slots=_ARENA_ROOMS * tokens)
    shared = max(0, tokens - 1) // block * block
    taken: dict[str, list[float]] = {}
    with RankPair(source, target) as ranks:
        for shared_blocks in (-1, 0, shared):
            ranks.hand_off(_WARM_ROOMS, tokens=tokens, shared=shared_blocks)
        for _ in range(rounds):
            ready: dict[str, float] = {}
            handed: dict[str, float] = {}
            for name, shared_blocks in (("off", -1), ("own", 0), ("shared", shared)):
                stamps = ranks.hand_off(count, tokens=tokens, shared=shared_blocks)
                handed[name] = float(np.median(stamps.ready - stamps.written)) / 1e3
                ready[name] = float(np.median(stamps.ready - stamps.expected)) / 1e3
                taken.setdefault(f"{name}_handoff_us", []).append(handed[name])
                taken.setdefault(f"{name}_ready_us", []).append(ready[name])
                taken.setdefault(f"{name}_cpu_us", []).append(stamps.decode_cpu_ns / count / 1e3)
            taken.setdefault("own_handoff_ratio", []).append(handed["own"] / handed["off"])
            taken.setdefault("own_ready_ratio", []).append(ready["own"] / ready["off"])
            taken.setdefault("shared_ready_ratio", []).append(ready["shared"] / ready["off"])
    return {
        "tokens": tokens,
        "room_bytes": tokens * source.layout.row_bytes,
        "rooms": rooms,
        "rounds": rounds,
        "rest_tokens": tokens - shared,
        "saved_share": shared / tokens,
        **{name: median(values) for name, values in taken.items()},
    }
