"""Whole rooms from one process's pool into another's arena, beside a memcpy of the same bytes."""

from __future__ import annotations

from statistics import median

import numpy as np

from pdtransfer.serve.settings.worker import HostLayout

from .models import BenchModel, components
from .ranks import RankPair
from .report import Figures, Line

THREADS = (1, 2)
# Prefix of figures, layout of the pool, and arenas by the slots of their free runs: every second run is taken; 0: none.
NETWORK_CASES: tuple[tuple[str, HostLayout, dict[str, int]], ...] = (
    ("", "layer_first", {"fresh": 0, "half": 64, "scattered": 1}),
    ("straight_", "page_first", {"fresh": 0, "half": 64}),
)

LINES = (
    Line("one room", "{room_mib:.0f} MiB", "{tokens} tokens of {model}; one memcpy of it: {memcpy_gb_s:.1f} GB/s"),
    *(
        Line(
            f"{arena} arena, {threads} copy thread{'s' * (threads > 1)}",
            f"{{{arena}_{threads}_gb_s:.1f}} GB/s",
            f"{{{arena}_{threads}_to_memcpy:.2f}} of memcpy",
        )
        for threads in THREADS
        for arena in ("fresh", "fragmented")
    ),
)
NETWORK_LINES = (
    Line("one room", "{room_mib:.0f} MiB", "{tokens} tokens of {model}; what follows is over {transport} on loopback"),
    Line("rows gathered, fresh arena", "{fresh_gb_s:.2f} GB/s"),
    Line("rows gathered, free runs of 64 slots", "{half_gb_s:.2f} GB/s"),
    Line("straight from the pool, fresh arena", "{straight_fresh_gb_s:.2f} GB/s"),
    Line("straight from the pool, free runs of 64 slots", "{straight_half_gb_s:.2f} GB/s"),
    Line("no two free slots together", "{scattered_gb_s:.2f} GB/s"),
)


def measure(*, tokens: int = 4_096, rooms: int = 32, model: BenchModel = "deepseek") -> Figures:
    """Rooms of `tokens` tokens, one at a time, from `expect` to READY: grant, plan, copy and Landed are all in it.

    The source is scattered pages of 64 tokens, layer_first; the target is single tokens, page_first. That is one extent
    in a fresh arena, and an extent a token in a fragmented one, where every second slot is taken. Each room is timed
    right after a memcpy of as many bytes, from the same pool into shared memory of prefill's process. GB/s and shares
    of memcpy are medians over `rooms` rooms; `model` is `deepseek`, 61 planes of 1,152 bytes, or the reference engine's
    mla or gqa.
    """
    source, target = components(model, source_slots=2 * tokens, target_slots=2 * tokens)
    room_bytes = tokens * source.layout.row_bytes
    figures: Figures = {"tokens": tokens, "model": model, "rooms": rooms, "room_mib": room_bytes / (1 << 20)}
    memcpy_ns: list[int] = []
    for threads in THREADS:
        with RankPair(source, target, copy_threads=threads) as ranks:
            for arena in ("fresh", "fragmented"):
                if arena == "fragmented":
                    ranks.fragment()
                ranks.hand_off(2, tokens=tokens)
                took = np.array([_beside_memcpy(ranks, tokens, room_bytes) for _ in range(rooms)])
                memcpy_ns += took[:, 0].tolist()
                name = f"{arena}_{threads}"
                figures[f"{name}_gb_s"] = room_bytes / float(np.median(took[:, 1]))
                figures[f"{name}_to_memcpy"] = float(np.median(took[:, 0] / took[:, 1]))
    figures["memcpy_gb_s"] = room_bytes / median(memcpy_ns)
    return figures


def _beside_memcpy(ranks: RankPair, tokens: int, room_bytes: int) -> tuple[int, int]:
    """Nanoseconds of a memcpy, and of a room."""
    memcpy_ns = ranks.memcpy(room_bytes)
    room = ranks.hand_off(1, tokens=tokens)
    return memcpy_ns, int(room.ready[0] - room.expected[0])


def measure_network(*, transport: str, tokens: int, rooms: int, model: BenchModel = "deepseek") -> Figures:
    """Rooms of `tokens` tokens, one at a time, from `expect` to READY, over a transport between hosts, on loopback.

    Source and target are those of shared memory, except that rows go straight from a page_first pool: its pages are
    runs of bytes in the arena as well. GB/s are medians over `rooms` rooms.
    """
    figures: Figures = {"tokens": tokens, "model": model, "rooms": rooms, "transport": transport}
    for prefix, layout, arenas in NETWORK_CASES:
        source, target = components(model, source_slots=2 * tokens, target_slots=2 * tokens + 128, source_layout=layout)
        room_bytes = tokens * source.layout.row_bytes
        figures["room_mib"] = room_bytes / (1 << 20)
        with RankPair(source, target, transport=transport) as ranks:
            for arena, run in arenas.items():
                if run:
                    ranks.fragment(run)
                ranks.hand_off(1, tokens=tokens)
                stamps = ranks.hand_off(rooms, tokens=tokens)
                figures[f"{prefix}{arena}_gb_s"] = room_bytes / float(np.median(stamps.ready - stamps.expected))
    return figures
