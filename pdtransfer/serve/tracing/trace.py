"""Writes spans as trace events for ui.perfetto.dev and chrome://tracing: a JSON array with one event a line.

The array is closed again after each batch of events, so a file is valid whenever its process dies. Viewers draw no two
overlapping events on one track, so a lane gets as many tracks as it has spans at once.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ...clock_name import clock_name
from ...errors import ConfigError
from .spans import TimedSpan, Timeline

FILE_BYTES_MAX = 64 << 20  # of each of the two files that a process keeps
TRACKS_MAX = 64  # of one lane; more overlapping spans are not drawn
PERIOD_S = 0.25
CLOSE_S = 5.0  # for the last batch: a hanging disk must not keep the process from ending
_BATCH = 4_096  # spans that are written at once: about a MiB

_HEAD, _COMMA, _TAIL = b"[\n", b",\n", b"\n]\n"

log = logging.getLogger(__name__)


class TraceClock(msgspec.Struct, frozen=True):
    """The zero of CLOCK_MONOTONIC: processes of one `boot` (and time namespace) share it; `wall_s` is its Unix time."""

    host: str
    boot: str
    wall_s: float


class _Event(msgspec.Struct, kw_only=True):
    """`ph` X: an event of `dur` us from `ts` on. `ph` M: the name of a process or a track."""

    ph: str
    name: str
    pid: int
    tid: int = 0
    cat: str = ""  # the lane
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, str | int | float] = {}


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Event).decode


def own_clock() -> TraceClock:
    """The clock of this process."""
    return TraceClock(socket.gethostname(), clock_name(), time.time() - time.monotonic())


@dataclass(slots=True)
class _Track:
    tid: int
    open: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # each within the one before
    closed_s: float = 0.0

    def takes(self, span: TimedSpan) -> bool:
        """True if the span overlaps no open span of this track, unless it lies within it."""
        while self.open and self.open[-1][1] <= span.begin_s:
            self.closed_s = max(self.closed_s, self.open.pop()[1])
        within = not self.open or (self.open[-1][0] <= span.begin_s and span.end_s <= self.open[-1][1])
        return within and self.closed_s <= span.begin_s


class Events:
    """Formats spans as lines; a track's name comes before its first event."""

    def __init__(self, clock: TraceClock | None = None, pids: dict[str, int] | None = None) -> None:
        self._clock, self._pids = clock, dict(pids or {})
        self._tracks: dict[tuple[str, str], list[_Track]] = {}  # by process and lane
        self._tids = 0
        self.names: list[bytes] = []  # names so far, repeated at the start of the next file
        for process in self._pids:
            self._name_process(process)

    def lines(self, spans: Iterable[TimedSpan]) -> list[bytes]:
        """Returns the spans' events as lines, in order."""
        lines: list[bytes] = []
        for span in spans:
            named = len(self.names)
            if span.process not in self._pids:
                self._pids[span.process] = len(self._pids) + 1
                self._name_process(span.process)
            pid, tid = self._pids[span.process], self._track(span)
            lines += self.names[named:]
            lines.append(_encode(_of(span, pid, tid)))
        return lines

    def _track(self, span: TimedSpan) -> int:
        """Returns the lane's first track that can take the span."""
        tracks = self._tracks.setdefault((span.process, span.lane), [])
        track = next((track for track in tracks if track.takes(span)), None)
        if track is None and len(tracks) == TRACKS_MAX:
            track = tracks[-1]
        if track is None:
            self._tids += 1
            tracks.append(track := _Track(self._tids))
            name = f"{span.lane} {len(tracks)}" if len(tracks) > 1 else span.lane
            self._name(_Event(ph="M", name="thread_name", pid=self._pids[span.process], tid=self._tids), name=name)
        track.open.append((span.begin_s, span.end_s))
        return track.tid

    def _name_process(self, process: str) -> None:
        event = _Event(ph="M", name="process_name", pid=self._pids[process])
        self._name(event, name=process)
        if self._clock is not None:
            self._name(msgspec.structs.replace(event, name="clock"), **msgspec.structs.asdict(self._clock))

    def _name(self, event: _Event, **args: str | float) -> None:
        self.names.append(_encode(msgspec.structs.replace(event, args=dict(args))))


def _of(span: TimedSpan, pid: int, tid: int) -> _Event:
    args: dict[str, str | int | float] = {}
    if span.room:
        args["room"] = f"{span.room:016x}"  # viewers read numbers with 53 bits
    if span.layer >= 0:
        args["layer"] = span.layer
    if span.byte_count:
        args["bytes"] = span.byte_count
    begin_ns, end_ns = (
        round(1e9 * span.begin_s),
        round(1e9 * span.end_s),
    )  # rounded to ns: spans that end together stay together
    ts, dur = begin_ns / 1e3, (end_ns - begin_ns) / 1e3
    return _Event(ph="X", name=span.name, pid=pid, tid=tid, cat=span.lane, ts=ts, dur=dur, args=args)


def write(path: Path, spans: Iterable[TimedSpan], clock: TraceClock | None = None) -> None:
    """Writes a whole file with the spans of any number of processes."""
    path.write_bytes(_HEAD + _COMMA.join(Events(clock).lines(spans)) + _TAIL)


@dataclass(frozen=True, slots=True)
class Traced:
    """The contents of one file; its clock may be missing."""

    path: Path
    clock: TraceClock | None = None
    spans: list[TimedSpan] = field(default_factory=list[TimedSpan])


def read(path: Path) -> Traced:
    """Reads a file written by `write` or a Recorder, which may go on writing. Raises ConfigError with the line number
    for an invalid event. An incomplete last line is ignored, since its process may have died in the middle, and so is
    what follows the array's end. It was written over that end between two reads, and begins in the middle of a line."""
    clock: TraceClock | None = None
    processes: dict[int, str] = {}
    spans: list[TimedSpan] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        text = line.removesuffix(b",")
        if text == b"]":
            break
        if text in (b"[", b""):
            continue
        try:
            event = _decode(text)
            if event.ph == "X":
                spans.append(_span(event, processes[event.pid]))
            elif event.name == "process_name":
                processes[event.pid] = str(event.args["name"])
            elif event.name == "clock":
                clock = msgspec.convert(event.args, TraceClock)
        except (msgspec.MsgspecError, ValueError, KeyError) as error:
            if number == len(lines) and not isinstance(error, KeyError):
                break
            raise ConfigError(f"{path}:{number}: not a timeline event: {error}") from None
    return Traced(path, clock, spans)


def _span(event: _Event, process: str) -> TimedSpan:
    args = event.args
    return TimedSpan(
        process=process, lane=event.cat, name=event.name, begin_s=event.ts / 1e6, end_s=(event.ts + event.dur) / 1e6,
        room=int(str(args.get("room", "0")), 16), layer=int(args.get("layer", -1)),
        byte_count=int(args.get("bytes", 0)),
    )  # fmt: skip


@contextmanager
def recorded(directory: Path | None, process: str) -> Generator[Timeline | None]:
    """Returns the sink for this process's spans, or None where no directory is given."""
    if directory is None:
        yield None
        return
    recorder = Recorder(directory, process)
    try:
        yield recorder.timeline
    finally:
        recorder.close()


class Recorder:
    """Writes the spans of `timeline` to DIRECTORY/PROCESS.json from a thread of its own, so that no caller waits for a
    disk.

    A full file, or the file of an earlier process, is renamed to PROCESS.1.json and replaces the one before. Raises
    ConfigError where the file cannot be written at first; a later failure is logged once.
    """

    def __init__(self, directory: Path, process: str, *, bytes_max: int = FILE_BYTES_MAX) -> None:
        self.timeline = Timeline(process)
        self._path, self._older = directory / f"{process}.json", directory / f"{process}.1.json"
        self._bytes_max = bytes_max
        self._fd, self._end = -1, 0  # the end of the array's last event
        try:
            self._events = Events(own_clock(), {process: os.getpid()})
            directory.mkdir(parents=True, exist_ok=True)
            self._begin()
        except OSError as error:
            raise ConfigError(f"timeline = '{directory}': {error.strerror}") from error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pdtransfer-timeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes the remaining spans, within CLOSE_S."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        over = False
        while not over:
            over = self._closing.wait(PERIOD_S)
            spans = self.timeline.take()
            try:
                for first in range(0, len(spans) if self._fd >= 0 else 0, _BATCH):
                    self._append(self._events.lines(spans[first : first + _BATCH]))
            except OSError as error:
                log.warning("timeline: %s: %s: writing has stopped", self._path, error.strerror)
                self._let()
        self._let()

    def _begin(self) -> None:
        """Starts a file with the names of all tracks so far."""
        if self._path.exists():
            os.replace(self._path, self._older)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._put(0, _HEAD, self._events.names)

    def _append(self, lines: Sequence[bytes]) -> None:
        if self._end + sum(map(len, lines)) + len(_COMMA) * len(lines) + len(_TAIL) > self._bytes_max:
            self._let()
            self._begin()
        self._put(self._end, _COMMA, lines)

    def _put(self, offset: int, before: bytes, lines: Sequence[bytes]) -> None:
        """Writes the lines and the array's end over the former end."""
        data = before + _COMMA.join(lines) + _TAIL
        self._end = offset + len(data) - len(_TAIL)
        while data:
            written = os.pwrite(self._fd, data, offset)
            data, offset = data[written:], offset + written

    def _let(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
