"""The command `pdtransfer timeline`: merges the files of several processes and splits each room's time to first token.

Processes of one host share CLOCK_MONOTONIC. Another host's files are placed by the wall clocks of both hosts, so the
clocks' difference is an error of all times between them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from ...errors import ConfigError
from .spans import TimedSpan
from .trace import Traced, read, write
from .ttft import Split, split_of

SHOWN_MAX = 10  # rooms in the table, slowest first
DRAWN_MAX = 256  # rooms with a track of their own
_DRAWN = "first tokens"  # the process name of these tracks
_PARTS = (
    ("wait", "ask_s"), ("compute", "compute_s"), ("exposed", "exposed_s"), ("admission", "admission_s"),
    ("first step", "step_s"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RoomTimes:
    """One room whose first token was reported, and when it was requested."""

    label: int
    asked_s: float
    split: Split


def files(paths: Iterable[Path]) -> list[Path]:
    """Returns these files, and all files of these directories. Raises ConfigError where there are none."""
    names = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if not names:
        raise ConfigError("no timeline files: processes write them with --timeline DIRECTORY")
    return names


def merge(traced: Sequence[Traced]) -> tuple[list[TimedSpan], list[str]]:
    """Returns all spans in order, by the clock of the first file's host, and remarks about files of other hosts."""
    clocks = [trace.clock for trace in traced if trace.clock is not None]
    spans: list[TimedSpan] = []
    remarks: dict[str, str] = {}
    for trace in traced:
        shift_s = 0.0
        if trace.clock is not None and trace.clock.boot != clocks[0].boot:
            shift_s = trace.clock.wall_s - clocks[0].wall_s
            remarks[trace.clock.boot] = (
                f"{trace.clock.host} is not {clocks[0].host}, or not since the same start: its times are placed by the "
                "wall clock, and are out by as much as the two clocks are"
            )
        spans += (
            msgspec.structs.replace(span, begin_s=span.begin_s + shift_s, end_s=span.end_s + shift_s)
            if shift_s
            else span
            for span in trace.spans
        )
    return sorted(spans, key=lambda span: (span.begin_s, -span.end_s)), list(remarks.values())


def rooms_of(spans: Sequence[TimedSpan]) -> list[RoomTimes]:
    """Returns the rooms whose first token was reported, in the order of their requests."""
    by_room: dict[int, list[TimedSpan]] = {}
    steps: dict[str, list[TimedSpan]] = {}
    for span in spans:
        if span.room:
            by_room.setdefault(span.room, []).append(span)
        if span.lane == "step":
            steps.setdefault(span.process, []).append(span)
    times: list[RoomTimes] = []
    for label, of_room in by_room.items():
        first_token = next((span for span in of_room if span.lane == "first token"), None)
        if first_token is not None:
            asked_s = min(span.begin_s for span in of_room)
            times.append(RoomTimes(label, asked_s, split_of(of_room, steps.get(first_token.process, ()), asked_s)))
    return sorted(times, key=lambda room: room.asked_s)


def drawn(rooms: Iterable[RoomTimes]) -> list[TimedSpan]:
    """Returns a track for each room: its time to first token, and beneath it the parts."""
    spans: list[TimedSpan] = []
    for room in rooms:
        whole = TimedSpan(
            process=_DRAWN, lane=f"{room.label:016x}", name=f"{1e3 * room.split.ttft_s:.2f} ms",
            begin_s=room.asked_s, end_s=room.asked_s + room.split.ttft_s, room=room.label,
        )  # fmt: skip
        spans.append(whole)
        end_s = room.asked_s
        for name, field in _PARTS:
            begin_s, end_s = end_s, min(end_s + getattr(room.split, field), whole.end_s)
            if end_s > begin_s:
                spans.append(msgspec.structs.replace(whole, name=name, begin_s=begin_s, end_s=end_s))
    return spans


def run(paths: Sequence[Path], *, output: Path | None, json: bool) -> int:
    """Prints the table, writes `output` if it is given, and returns the command's status."""
    traced = [read(path) for path in files(paths)]
    recorded = [trace for trace in traced if all(span.process != _DRAWN for span in trace.spans)]
    spans, remarks = merge(recorded or traced)  # files that this command wrote repeat all spans
    rooms = rooms_of(spans)
    slowest = sorted(rooms, key=lambda room: -room.split.ttft_s)
    if output is not None:
        try:
            write(output, [*spans, *drawn(slowest[:DRAWN_MAX])])
        except OSError as error:
            raise ConfigError(f"output = '{output}': {error.strerror}") from error
    for remark in remarks:
        print(remark, file=sys.stderr)
    if json:
        splits = {f"{room.label:016x}": _figures(room.split) for room in rooms}
        print(dumps({"spans": len(spans), "rooms": splits}))
    else:
        _show(spans, rooms, slowest)
    return 0


def _figures(split: Split) -> dict[str, float]:
    parts = {f"{field[:-2]}_ms": getattr(split, field) for _, field in _PARTS}
    times = {"ttft_ms": split.ttft_s, **parts, "push_ms": split.push_s}
    return {name: round(1e3 * seconds, 3) for name, seconds in times.items()} | {"bytes": split.byte_count}


def _show(spans: Sequence[TimedSpan], rooms: Sequence[RoomTimes], slowest: Sequence[RoomTimes]) -> None:
    console = Console(highlight=False)
    processes = sorted({span.process for span in spans})
    console.print(f"{len(spans):,} spans of {', '.join(processes)}", markup=False)
    if not rooms:
        console.print("no room's first token is among them")
        return
    title = f"first tokens of {len(rooms)} room{'s' * (len(rooms) > 1)}, ms"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("room", "in all", *(name for name, _ in _PARTS), "MB"):
        table.add_column(name, justify="left" if name == "room" else "right", no_wrap=True)
    table.add_row("median", *_cells([room.split for room in rooms]))
    for room in slowest[:SHOWN_MAX]:
        table.add_row(f"{room.label:016x}", *_cells([room.split]))
    console.print(table)


def _cells(splits: Sequence[Split]) -> list[str]:
    """The median of each part."""
    times = (median(getattr(split, field) for split in splits) for field in ("ttft_s", *(field for _, field in _PARTS)))
    return [_short(1e3 * seconds) for seconds in times] + [_short(median(s.byte_count for s in splits) / 1e6)]


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
