"""What checksums cost: their rate beside a memcpy of the same bytes, and hand-offs and rooms with and without them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np

from pdtransfer.kernels import checksum_copy
from pdtransfer.layout.checksum import Lines, lines_of, runs_of
from pdtransfer.layout.geometry import Int64s
from pdtransfer.layout.pairing import pair
from pdtransfer.layout.plan import pieces_of, plan
from pdtransfer.memory.arena_memory import ArenaMemory
from pdtransfer.memory.mapping import Mapping, allocate
from pdtransfer.transports.copier import PIECE_BYTES

from .faulty_ranks import FaultyRankPair
from .models import PAGE_SIZE, components, latent_layout
from .report import Figures, Line

_LAYOUTS = ("layer_first", "page_first")
_NUMPY_ROWS = 64  # it is slow: its rate is of this many

LINES = (
    Line("one memcpy", "{memcpy_gb_s:.1f} GB/s", "{bytes:,} bytes; what follows are shares of it"),
    *(
        Line(
            f"checksum, {rows}, {name}",
            f"{{{name}_{rows}_1:.2f}}, {{{name}_{rows}_2:.2f}}",
            f"one thread, two; numpy {{{name}_{rows}_numpy:.3f}}; copied as well {{{name}_{rows}_copied:.2f}}",
        )
        for name in _LAYOUTS
        for rows in ("pages", "scattered")
    ),
    Line("hand-off, p50", "{handoff_us:.0f} us", "{handoff_verified_us:.0f} verified; {handoff_bytes:,} bytes"),
    Line("expect to READY, p50", "{ready_us:.0f} us", "{ready_verified_us:.0f} verified"),
    Line("one room", "{room_gb_s:.1f} GB/s", "{room_verified_gb_s:.1f} verified; {room_bytes:,} bytes"),
)


def measure(*, tokens: int = 4_096, rooms: int = 1_000, repeats: int = 7) -> Figures:
    """Shares of one memcpy's rate for an MLA request, 61 planes of 1,152-byte rows; then rooms without and with verify.

    A checksum reads what a memcpy reads and writes, so a share may pass 1; "copied as well" is a writer's way, into an
    arena that is page_first, in the order of the slots. Each figure is the median over `repeats` of
    (time of a memcpy of the same bytes) / (time of the checksum), timed one after the other; numpy's is of a few rows.
    Hand-offs are those of `pdtransfer bench handoff`, one at a time, `rooms` of 16 tokens of the reference model; the
    room is that of `pdtransfer bench transfer`, two copy threads, a fresh arena. Two pairs of ranks, one of which
    verifies, take turns.
    """
    tokens = -(-tokens // PAGE_SIZE) * PAGE_SIZE
    figures: Figures = {"native": checksum_copy.native().text}
    figures |= _rates(tokens, repeats)
    figures |= _hand_offs(rooms, repeats)
    return figures | _rooms(tokens, repeats)


def _rates(tokens: int, repeats: int) -> Figures:
    slots = 2 * tokens
    shuffle = np.random.default_rng(0).permutation
    pages = shuffle(slots // PAGE_SIZE)[: tokens // PAGE_SIZE] * PAGE_SIZE
    places = {
        "pages": runs_of(pages, np.full(len(pages), PAGE_SIZE), 0),
        "scattered": runs_of(shuffle(slots)[:tokens], np.ones(tokens, np.int64), 0),
    }
    all_lines = {name: lines_of("kv", latent_layout(name, slots=slots, page_size=PAGE_SIZE)) for name in _LAYOUTS}
    byte_count = tokens * all_lines["layer_first"].row_bytes
    source, target = allocate(2 * byte_count), ArenaMemory.create(byte_count, huge_pages="never")
    try:
        source.array[:] = 7
        target.prefault()
        memcpy = _seconds_of(lambda: ctypes.memmove(target.mapping.address, source.address, byte_count))
        figures: Figures = {"bytes": byte_count}
        figures["memcpy_gb_s"] = byte_count / median(memcpy() for _ in range(repeats)) / 1e9
        for name, lines in all_lines.items():
            for rows, runs in places.items():
                for threads in (1, 2):
                    sum_up = _seconds_of(_summing(lines, runs, source, threads))
                    figures[f"{name}_{rows}_{threads}"] = median(memcpy() / sum_up() for _ in range(repeats))
                copied = _seconds_of(_copying(name, runs, source, target))
                figures[f"{name}_{rows}_copied"] = median(memcpy() / copied() for _ in range(repeats))
                few = next(pieces_of(runs, _NUMPY_ROWS))
                slow = _seconds_of(partial(checksum_copy.checksum, lines, few, source.address, by=checksum_copy.NUMPY))
                figures[f"{name}_{rows}_numpy"] = memcpy() * min(1.0, _NUMPY_ROWS / tokens) / slow()
        return figures
    finally:
        source.close()
        target.close()


def _summing(lines: Lines, runs: Int64s, memory: Mapping, threads: int) -> Callable[[], None]:
    shares = list(pieces_of(runs, -(-int(runs[:, 2].sum()) // threads)))

    def sum_up() -> None:
        others = [
            threading.Thread(
                target=checksum_copy.checksum, args=(lines, share, memory.address), name="pdtransfer-verify"
            )
            for share in shares[1:]
        ]
        for other in others:
            other.start()
        checksum_copy.checksum(lines, shares[0], memory.address)
        for other in others:
            other.join()

    return sum_up


def _copying(name: str, runs: Int64s, memory: Mapping, arena: ArenaMemory) -> Callable[[], None]:
    """The same rows, carried into the first slots of the arena, in a copy thread's pieces."""
    slots = np.repeat(runs[:, 0] - runs[:, 1], runs[:, 2]) + np.arange(int(runs[:, 2].sum()))
    ours = latent_layout(name, slots=2 * len(slots), page_size=PAGE_SIZE)
    theirs = latent_layout("page_first", slots=len(slots), page_size=PAGE_SIZE)
    work, lines = plan(pair(ours, theirs).fused(), slots, np.arange(len(slots))), lines_of("kv", ours)

    def copy() -> None:
        first_row = 0
        for piece in work.pieces(PIECE_BYTES):
            checksum_copy.copy(piece, memory.address, arena.mapping.address, lines=lines, first_row=first_row)
            first_row += piece.rows

    return copy


def _hand_offs(rooms: int, repeats: int) -> Figures:
    source, target = components("mla", source_slots=64 * PAGE_SIZE, target_slots=1_024)
    count, taken = max(1, rooms // repeats), dict[str, list[float]]()
    with FaultyRankPair(source, target) as plain, FaultyRankPair(source, target, verify=True) as verified:
        for ranks in (plain, verified):
            ranks.hand_off(count, tokens=16)
        for _ in range(repeats):
            for label, ranks in (("", plain), ("_verified", verified)):
                stamps = ranks.hand_off(count, tokens=16)
                taken.setdefault(f"handoff{label}_us", []).append(float(np.median(stamps.ready - stamps.written)) / 1e3)
                taken.setdefault(f"ready{label}_us", []).append(float(np.median(stamps.ready - stamps.expected)) / 1e3)
    figures: Figures = {name: median(values) for name, values in taken.items()}
    return figures | {"handoff_bytes": 16 * source.layout.row_bytes}


def _rooms(tokens: int, repeats: int) -> Figures:
    source, target = components("deepseek", source_slots=2 * tokens, target_slots=2 * tokens)
    room_bytes, taken = tokens * source.layout.row_bytes, dict[str, list[float]]()
    with FaultyRankPair(source, target) as plain, FaultyRankPair(source, target, verify=True) as verified:
        for ranks in (plain, verified):
            ranks.hand_off(2, tokens=tokens)
        for _ in range(repeats):
            for label, ranks in (("", plain), ("_verified", verified)):
                room = ranks.hand_off(1, tokens=tokens)
                taken.setdefault(f"room{label}_gb_s", []).append(room_bytes / int(room.ready[0] - room.expected[0]))
    figures: Figures = {name: median(values) for name, values in taken.items()}
    return figures | {"room_bytes": room_bytes}


def _seconds_of(run: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        start = perf_counter()
        run()
        return perf_counter() - start

    return seconds
