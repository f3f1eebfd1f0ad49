"""Pictures of `bench pd`: where one prompt's time went, layer by layer, and GB/s by size beneath the copy engine's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import ClassVar

from ..tracing.timeline import Span
from ..tracing.ttft import Split
from .pd import Pushed
from .pd_pair import Run
from .svg import Picture

_WIDTH, _LEFT, _RIGHT = 1_180.0, 118.0, 22.0
_BAR, _GAP = 15.0, 3.0
_TRACKS_MAX = 4  # of one lane: writes wait for one another
# (process, title of the lane, its lanes)
_LANES = (
    ("prefill", "control", ("control",)),
    ("prefill", "compute", ("compute", "pick")),
    ("prefill", "push", ("push",)),
    ("prefill", "launches", ("launch",)),
    ("decode", "control", ("control", "landing")),
    ("decode", "admission", ("admission",)),
    ("decode", "swap-in", ("swap-in",)),
    ("decode", "steps", ("step",)),
)


def timeline(run: Run, *, named: str, label: str) -> Picture:
    """The whole of a prompt, below it what follows the last layers, where all that a reader waits for is, and of a
    request that swaps in its first step."""
    spans = _with_admission(run)
    lanes = [(process, title, _tracks(_of(spans, process, names))) for process, title, names in _LANES]
    lanes = [lane for lane in lanes if lane[2]]
    split, end_s = run.split, max(span.end_s for span in spans) - run.asked_s
    ready_s = split.ask_s + split.compute_s + split.exposed_s
    panel = sum(len(tracks) * (_BAR + _GAP) + 7 for _, _, tracks in lanes) + 34
    windows = _windows(run, split, end_s)
    picture = Picture(_WIDTH, 66 + len(windows) * (panel + 24) - 8, named=named)
    picture.text(16, 26, named, kind="title")
    picture.text(16, 46, label, kind="faint")
    for number, (title, window) in enumerate(windows):
        top = 64.0 + number * (panel + 24)
        picture.text(16, top - 6, title, kind="faint")
        _panel(picture, lanes, run.asked_s, window, top + 4 * (number > 0), ready_s)
    return picture


def _windows(run: Run, split: Split, end_s: float) -> list[tuple[str, tuple[float, float]]]:
    """The whole, then the parts of it that are drawn larger: what they are, and from when to when."""
    layers, steps = run.of("prefill", "compute"), run.of("decode", "step")
    ready_s = split.ask_s + split.compute_s + split.exposed_s
    tail = max(split.tail_s, 1e-4)
    begin_s = max(layers[-1].end_s - run.asked_s - 2.2 * tail, 0.0) if layers else 0.0
    stop_s = min(end_s, ready_s + split.admission_s + 0.8 * tail)
    windows = [("", (0.0, end_s)), ("the end of it, drawn larger", (begin_s, stop_s))]
    if steps and run.of("decode", "swap-in"):
        begin_s, stop_s = (at - run.asked_s for at in (steps[0].begin_s, steps[0].end_s))
        margin = 0.03 * (stop_s - begin_s)
        windows.append(("decode's first step, drawn larger", (max(0.0, begin_s - margin), min(end_s, stop_s + margin))))
    return windows


def _with_admission(run: Run) -> list[Span]:
    """READY to the first step is nobody's span: two threads have a part in it."""
    landing, steps = run.of("decode", "landing"), run.of("decode", "step")
    spans = list(run.spans)
    if landing and steps:
        spans.append(
            Span(
                process="decode", lane="admission", name="READY to the first step", begin_s=landing[0].end_s,
                end_s=steps[0].begin_s, room=run.prompt.room,
            )
        )  # fmt: skip
    return spans


def _of(spans: Sequence[Span], process: str, lanes: Sequence[str]) -> list[Span]:
    return sorted((s for s in spans if s.process == process and s.lane in lanes), key=lambda span: span.begin_s)


def _tracks(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans that overlap are drawn below one another, as far as there is room."""
    tracks: list[list[Span]] = []
    for span in spans:
        free = next((track for track in tracks if track[-1].end_s <= span.begin_s), None)
        if free is None and len(tracks) < _TRACKS_MAX:
            tracks.append(free := [])
        (free if free is not None else min(tracks, key=lambda track: track[-1].end_s)).append(span)
    return tracks


def _panel(
    picture: Picture, lanes: Sequence[tuple[str, str, list[list[Span]]]], zero_s: float, window: tuple[float, float],
    top: float, ready_s: float,
) -> None:  # fmt: skip
    begin_s, end_s = window
    scale = (_WIDTH - _LEFT - _RIGHT) / max(end_s - begin_s, 1e-9)

    def across(seconds: float) -> float:
        return _LEFT + (min(max(seconds, begin_s), end_s) - begin_s) * scale

    height = sum(len(tracks) * (_BAR + _GAP) + 7 for _, _, tracks in lanes)
    picture.rect(_LEFT, top, _WIDTH - _LEFT - _RIGHT, height, "panel", round_=3)
    for tick in _ticks(1e3 * begin_s, 1e3 * end_s):
        x = across(tick / 1e3)
        picture.line([(x, top), (x, top + height)], "rule")
        picture.text(x, top + height + 14, f"{tick:g} ms", kind="small faint", anchor="middle")
    y, before = top + 4, ""
    for process, title, tracks in lanes:
        if before and process != before:
            picture.line([(16, y - 3), (_WIDTH - _RIGHT, y - 3)], "faint", width=0.7)
        if process != before:
            picture.text(16, y + 11, process)
        before = process
        picture.text(_LEFT - 8, y + 11, title, kind="small faint", anchor="end")
        for track in tracks:
            for number, span in enumerate(track):
                if begin_s < span.end_s - zero_s and span.begin_s - zero_s < end_s:
                    _bar(picture, span, number, across(span.begin_s - zero_s), across(span.end_s - zero_s), y, zero_s)
            y += _BAR + _GAP
        y += 7
    if begin_s <= ready_s <= end_s:
        x = across(ready_s)
        picture.line([(x, top - 3), (x, top + height)], "admission", dashed=True, width=1.2)
        picture.text(x + (4 if x < _WIDTH - 90 else -4), top + 9, "READY", kind="small",
                     anchor="start" if x < _WIDTH - 90 else "end")  # fmt: skip


def _bar(picture: Picture, span: Span, number: int, left: float, right: float, y: float, zero_s: float) -> None:
    fill = span.lane
    if fill in ("compute", "push", "swap-in") and (span.layer if span.layer >= 0 and fill != "swap-in" else number) % 2:
        fill += "2"  # neighbours are told from one another
    width = right - left
    width = width - 0.6 if width > 2.5 else max(width, 0.8)
    picture.rect(left, y, width, _BAR, fill, title=_title(span, zero_s), round_=1.5 if width > 5 else 0)
    label = str(span.layer) if span.layer >= 0 else span.name
    if width > 6.2 * len(label) + 4:
        picture.text(left + width / 2, y + 11, label, kind="on", anchor="middle")


def _title(span: Span, zero_s: float) -> str:
    where = f"layer {span.layer}, " if span.layer >= 0 and span.lane in ("compute", "swap-in") else ""
    carried = ""
    if span.byte_count:
        rate = (
            f", {span.byte_count / span.seconds / 1e9:.1f} GB/s"
            if span.lane in ("push", "launch", "swap-in") and span.seconds
            else ""
        )
        carried = f", {span.byte_count / 1e6:,.2f} MB{rate}"
    when = f"{1e3 * span.seconds:,.3f} ms from {1e3 * (span.begin_s - zero_s):,.3f} ms"
    return f"{span.lane}: {where}{span.name}\n{when}{carried}"


def _ticks(low: float, high: float, about: int = 9) -> list[float]:
    """Round numbers within [low, high]."""
    rough = (high - low) / about
    step = 10 ** floor(log10(rough))
    step = next(step * factor for factor in (1, 2, 5, 10) if step * factor >= rough)
    return [round(step * at, 9) for at in range(ceil(low / step), floor(high / step) + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """Bytes by powers of ten, and GB/s from 0, in a frame."""

    low: float  # of log10(bytes)
    high: float
    most: float  # GB/s

    width: ClassVar[float] = 900.0
    height: ClassVar[float] = 420.0
    left: ClassVar[float] = 62.0
    right: ClassVar[float] = 750.0
    top: ClassVar[float] = 64.0
    bottom: ClassVar[float] = 374.0

    def at(self, byte_count: float, rate: float) -> tuple[float, float]:
        """Where a point lies."""
        across = (log10(byte_count) - self.low) / max(self.high - self.low, 1e-9)
        return self.left + across * (self.right - self.left), self.bottom - rate / self.most * (self.bottom - self.top)

    def draw(self, picture: Picture) -> None:
        """The frame, its rules, and what they stand for."""
        picture.rect(self.left, self.top, self.right - self.left, self.bottom - self.top, "panel", round_=3)
        for tick in _ticks(0.0, self.most, 6):
            y = self.at(10**self.low, tick)[1]
            picture.line([(self.left, y), (self.right, y)], "rule")
            picture.text(self.left - 8, y + 4, f"{tick:g}", kind="small faint", anchor="end")
        picture.text(16, self.top - 10, "GB/s", kind="small faint")
        for power in range(ceil(self.low), floor(self.high) + 1):
            x = self.at(10**power, 0)[0]
            picture.line([(x, self.top), (x, self.bottom)], "rule")
            picture.text(x, self.bottom + 16, _bytes(10**power), kind="small faint", anchor="middle")
        picture.text(self.left, self.bottom + 36, "bytes of one room's KV", kind="small faint")


def throughput(pushed: Mapping[str, Mapping[int, Pushed]], *, named: str, roof: str) -> Picture:
    """GB/s by bytes; `pushed` is by attention and tokens."""
    every = [point for points in pushed.values() for point in points.values()]
    low, high = (log10(of(point.byte_count for point in every)) for of in (min, max))
    most = 1.08 * max(point.byte_count / min(point.push_s, point.roof_s) for point in every) / 1e9
    axes = _Axes(low=low, high=high, most=most)
    picture = Picture(axes.width, axes.height, named=named)
    picture.text(16, 26, named, kind="title")
    axes.draw(picture)
    words: list[tuple[float, str]] = []
    whole = sorted(every)
    words.append(_curve(picture, axes, whole, [point.roof_s for point in whole], roof, "faint"))
    for number, (attention, points) in enumerate(pushed.items()):
        fill, by_size = ("push", "compute")[number % 2], sorted(points.values())
        ready = [point.ready_s for point in by_size]
        words.append(_curve(picture, axes, by_size, ready, f"{attention}, to READY", fill, dashed=True))
        words.append(_curve(picture, axes, by_size, [p.push_s for p in by_size], f"{attention}, writes", fill))
        for tokens, point in points.items():
            rate, share = point.byte_count / point.push_s / 1e9, point.roof_s / point.push_s
            title = (
                f"{attention}, {tokens:,} tokens, {_bytes(point.byte_count)}: {rate:.1f} GB/s, {share:.2f} of {roof}"
            )
            picture.dot(*axes.at(point.byte_count, rate), fill, title=title)
    place = -1e9
    for y, text in sorted(words):
        place = max(y + 4, place + 14)
        picture.text(axes.right + 10, place, text, kind="small")
    return picture


def _curve(
    picture: Picture, axes: _Axes, points: Sequence[Pushed], seconds: Sequence[float], words: str, stroke: str, *,
    dashed: bool = False,
) -> tuple[float, str]:  # fmt: skip
    """Draws it; how high it ends, and what it is called there."""
    line = [
        axes.at(point.byte_count, point.byte_count / took_s / 1e9)
        for point, took_s in zip(points, seconds, strict=True)
    ]
    picture.line(line, stroke, width=2.0, dashed=dashed)
    return line[-1][1], words


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
