"""Many peers: hand-offs against 1, 10 and 100 of them, what idle ones cost, and memory over very many rooms."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median

import numpy as np

from pdtransfer.limits import Limits

from ..handoff import ROOM_BYTES_MAX
from ..models import PAGE_SIZE, components
from ..ranks import RankPair
from ..report import Figures, Line

CROWD = (1, 10, 100)
_SIDES = ("decode", "prefill")  # which of the two is many
_POOL_PAGES = 64
_TOKENS = 7  # a room: what fits into ROOM_BYTES_MAX
_ROUNDS = 3
_MEMORY_POINTS = 8
_BATCH_ROOMS = 2_500  # whose stamps the pipe to a rank takes at once
_SETTLE_SECONDS = 2.0  # what the last batch leaves behind is over by then
_MIB = 1 << 20


def _crowd_lines(side: str) -> list[Line]:
    single = "prefill" if side == "decode" else "decode"
    lines: list[Line] = []
    for peers in CROWD:
        of = f"{side}_{peers}"
        beside = f"p50 {{{of}_us_p50:,.0f}} us, p99 {{{of}_us_p99:,.0f}} us; CPU {{{of}_prefill_cpu_us:.0f}} + "
        beside += f"{{{of}_decode_cpu_us:.0f}} us a hand-off, prefill + decode"
        lines.append(Line(f"1 {single}, {peers} {side}", f"{{{of}_handoffs_s:,.0f}} hand-offs/s", beside))
    idle = f"of a core; the crowd's own process {{{side}_idle_crowd_percent:.1f}} %; aim: 2"
    return [*lines, Line(f"1 {single}, {CROWD[-1]} {side}, idle", f"{{{side}_idle_percent:.2f}} %", idle)]


LINES = (
    *_crowd_lines("decode"),
    *_crowd_lines("prefill"),
    *(
        Line(
            f"memory of {side}",
            f"{{{side}_memory_growth_mib:+.2f}} MiB",
            f"private, between room {{memory_first:,}} and room {{memory_rooms:,}}; then {{{side}_memory_mib:.0f}} MiB",
        )
        for side in ("prefill", "decode")
    ),
)


def measure(
    *, rooms: int = 6_000, memory_rooms: int = 200_000, idle_seconds: int = 20, concurrency: int = 64
) -> Figures:
    """Hand-offs of the reference model's KV over shm, rooms of at most ROOM_BYTES_MAX bytes, between two processes.

    One node in one process meets 1, 10 and 100 in the other: first many decode nodes, then many prefill nodes. The
    crowd shares a loop; rooms go to its nodes in turn, `concurrency` of them under way at once. A hand-off's time is
    from `expect` to READY, CPU is a whole process's over the batch; figures are medians of batches, `rooms` in all.

    Idle is the CPU time, in percent of a core over `idle_seconds`, of the one node that has sessions with 100 peers
    and nothing to do. Memory is the private bytes of two processes of one node each, at eight points of `memory_rooms`
    rooms: growth is what the last one has beyond the first.
    """
    figures: Figures = {"rooms": rooms, "concurrency": concurrency, "idle_seconds": idle_seconds}
    for side in _SIDES:
        for peers in CROWD:
            with _meeting(side, peers, concurrency) as ranks:
                ranks.hand_off(2 * max(peers, concurrency), tokens=_TOKENS, at_once=concurrency)
                figures |= _named(f"{side}_{peers}", _rate(ranks, rooms, concurrency))
                if peers == CROWD[-1]:
                    figures |= _named(side, _idle(ranks, side, idle_seconds))
    with _meeting("decode", 1, concurrency) as ranks:
        return figures | _memory(ranks, memory_rooms, concurrency)


def _meeting(side: str, peers: int, concurrency: int) -> RankPair:
    arenas = peers if side == "decode" else 1
    rooms = max(16, 2 * concurrency // arenas)  # that each arena holds
    source, target = components("mla", source_slots=_POOL_PAGES * PAGE_SIZE, target_slots=_TOKENS * rooms)
    assert _TOKENS * source.layout.row_bytes <= ROOM_BYTES_MAX
    prefill, decode = (1, peers) if side == "decode" else (peers, 1)
    limits = Limits(silence_ms=20_000)  # a crowd on one loop is slow where others want the processors
    return RankPair(
        source, target, copy_threads=1, prefill_nodes=prefill, decode_nodes=decode, limits=limits
    )  # fmt: skip


def _rate(ranks: RankPair, rooms: int, concurrency: int) -> Figures:
    count, taken = min(max(1, rooms // _ROUNDS), _BATCH_ROOMS), list[Figures]()
    for _ in range(_ROUNDS):
        stamps = ranks.hand_off(count, tokens=_TOKENS, at_once=concurrency)
        p50, p99 = np.percentile(stamps.ready - stamps.expected, (50, 99)) / 1e3
        taken.append(
            {
                "handoffs_s": count / stamps.seconds,
                "us_p50": float(p50),
                "us_p99": float(p99),
                "prefill_cpu_us": stamps.prefill_cpu_ns / count / 1e3,
                "decode_cpu_us": stamps.decode_cpu_ns / count / 1e3,
            }
        )
    return {name: median(float(figures[name]) for figures in taken) for name in taken[0]}


def _idle(ranks: RankPair, side: str, seconds: int) -> Figures:
    """Of the one, and of the crowd's process."""
    time.sleep(_SETTLE_SECONDS)
    pids = (ranks.prefill_pid, ranks.decode_pid) if side == "decode" else (ranks.decode_pid, ranks.prefill_pid)
    before, since = [cpu_seconds(pid) for pid in pids], time.monotonic()
    time.sleep(seconds)
    after, passed_s = [cpu_seconds(pid) for pid in pids], time.monotonic() - since
    idle, crowd = (100 * (end - start) / passed_s for end, start in zip(after, before, strict=True))
    return {"idle_percent": idle, "idle_crowd_percent": crowd}


def _memory(ranks: RankPair, rooms: int, concurrency: int) -> Figures:
    step = max(1, rooms // _MEMORY_POINTS)
    points: list[tuple[float, float]] = []
    for _ in range(_MEMORY_POINTS):
        for done in range(0, step, _BATCH_ROOMS):
            ranks.hand_off(min(_BATCH_ROOMS, step - done), tokens=_TOKENS, at_once=concurrency)
        prefill, decode = (private_bytes(pid) / _MIB for pid in (ranks.prefill_pid, ranks.decode_pid))
        points.append((prefill, decode))
    figures: Figures = {"memory_rooms": step * _MEMORY_POINTS, "memory_first": step}
    for index, role in enumerate(("prefill", "decode")):
        series = [point[index] for point in points]
        figures |= {f"{role}_memory_mib_{number}": mib for number, mib in enumerate(series, 1)}
        figures |= {f"{role}_memory_mib": series[-1], f"{role}_memory_growth_mib": series[-1] - series[0]}
    return figures


def _named(name: str, figures: Figures) -> Figures:
    return {f"{name}_{key}": value for key, value in figures.items()}


def private_bytes(pid: int) -> int:
    """A process's memory that no other shares, as the kernel reports it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, all its threads, in ticks of 10 ms."""
    # Behind the command's name, which may hold anything, the 12th and 13th fields are user and system ticks.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
