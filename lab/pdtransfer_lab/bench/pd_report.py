"""The report of `bench pd`: a page with every table, its charts as SVG and PNG beside it, and the spans as a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from pdtransfer.errors import WorldError
from pdtransfer.serve.tracing.spans import TimedSpan
from pdtransfer.serve.tracing.trace import write

from .pd import Point, Pushed, Result, Run, Series, tables
from .pd_rank import Way

_NAMES: dict[Way, str] = {"auto": "as chosen by size", "layers": "layer by layer", "end": "all at the end"}
_PARTS = (  # of a time to the first token: its name, Split's field, and its colour
    ("ask", "ask_s", "#8a63c9"),
    ("prefill's compute", "compute_s", "#2f6fdb"),
    ("exposed transfer", "exposed_s", "#e07b1a"),
    ("admission", "admission_s", "#c2255c"),
    ("first step", "step_s", "#168f6a"),
)
_LANES = (  # process, what is written beside the lane, and the lanes of spans in it
    ("prefill", "control", ("control",)),
    ("prefill", "compute", ("compute", "pick")),
    ("prefill", "push", ("push",)),
    ("prefill", "launches", ("launch",)),
    ("decode", "control", ("control", "landing")),
    ("decode", "admission", ("admission",)),
    ("decode", "swap-in", ("swap-in",)),
    ("decode", "steps", ("step",)),
)
_COLOURS = {  # of spans by lane; neighbours of a pair alternate
    "control": ("#8a63c9",),
    "compute": ("#2f6fdb", "#7ca6ec"),
    "pick": ("#123a80",),
    "push": ("#e07b1a", "#f2b274"),
    "launch": ("#a85a10",),
    "landing": ("#c9ced6",),
    "admission": ("#c2255c",),
    "swap-in": ("#0c8599", "#66c5d3"),
    "step": ("#168f6a",),
}
_PALE = ("#7ca6ec", "#f2b274", "#c9ced6", "#66c5d3")
_FAINT, _RULE, _PANEL = "#667085", "#dfe3e8", "#f6f7f9"
_TRACKS_MAX = 4  # of one lane: writes wait for one another
_Lane: TypeAlias = tuple[str, list[list[TimedSpan]]]  # its name, and its spans on tracks below one another
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "pdtransfer", "font.size": 9, "axes.facecolor": _PANEL,
    "axes.edgecolor": _RULE, "axes.titlesize": 9, "grid.color": _RULE,
    "axes.grid": True, "axes.axisbelow": True, "xtick.color": _FAINT, "ytick.color": _FAINT,
}  # fmt: skip
_CSS = """
body{margin:0 auto;max-width:1220px;padding:24px 20px 60px;font:15px/1.5 ui-sans-serif,system-ui,sans-serif}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:10px 0 18px}
th,td{padding:4px 14px 4px 0;border-bottom:1px solid #dfe3e8;text-align:right}
th:first-child,td:first-child{text-align:left}th{color:#667085;font-size:13px}img{max-width:100%}
"""


def require_matplotlib() -> None:
    """Raises WorldError where the charts cannot be drawn: before anything is measured for them."""
    if find_spec("matplotlib") is None:
        raise WorldError("--report draws with matplotlib, which is not installed: pip install './lab[report]'")


def write_report(result: Result, directory: Path) -> list[Path]:
    """Writes the page, its charts and spans.json into `directory`, which is made. Returns the paths, the page's first;
    nothing in them is fetched from elsewhere."""
    directory.mkdir(parents=True, exist_ok=True)
    with import_module("matplotlib").rc_context(_STYLE):
        charts = {"throughput": throughput({series.attention: series.pushed for series in result.series}, result.roof)}
        for series in result.series:
            charts[f"splits-{series.attention}"] = splits(series)
            for point in series.points:
                for way in ("auto", "end"):
                    name = f"timeline-{series.attention}-{point.tokens}-{way}"
                    charts[name] = timeline(point.shown[way], _title(series, point, way))
        paths = [directory / f"{name}.{suffix}" for name in charts for suffix in ("svg", "png")]
        for path in paths:
            charts[path.stem].savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    page, spans = directory / "report.html", directory / "spans.json"
    page.write_text(_page(result, list(charts)))
    points = (point for series in result.series for point in series.points)
    write(spans, [span for point in points for run in point.shown.values() for span in run.spans])
    return [page, *paths, spans]


def _figure(width: float, height: float) -> Any:
    return import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def _title(series: Series, point: Point, way: Way) -> str:
    title = f"{series.attention.upper()}, a prompt of {point.tokens:,} tokens, {point.byte_count / 1e6:,.1f} MB of KV"
    split = point.shown[way].split
    parts = ", ".join(f"{name} {1e3 * getattr(split, field):.3f}" for name, field, _ in _PARTS)
    return f"{title}, {_NAMES[way]}\nTime to the first token {1e3 * split.ttft_s:.2f} ms: {parts}"


def _page(result: Result, charts: Sequence[str]) -> str:
    prefill, decode = result.devices
    about = f"pdtransfer bench pd: prefill on {prefill}, decode on {decode}, chunks of {result.chunk_tokens:,} tokens; "
    about += f"times in ms, medians of {result.rounds} rounds; timelines of the rounds nearest to them."
    body = ["<h1>Where the time to the first token goes</h1>", f"<p>{about} spans.json opens in ui.perfetto.dev.</p>"]
    for head, *rows in tables(result):
        lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        names = "".join(f"<th>{escape(name)}</th>" for name in head)
        body.append(f"<table><tr>{names}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>")
    body += [f'<p><img src="{name}.svg" alt="{name}"></p>' for name in charts]
    head = f'<meta charset="utf-8"><title>pdtransfer bench pd</title><style>{_CSS}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def splits(series: Series) -> Any:
    """A matplotlib Figure: the parts of the time to the first token, for each size to its own scale, by way."""
    ways: list[Way] = [way for way in _NAMES if any(way in point.splits for point in series.points)]
    figure = _figure(11, 0.8 + 1.0 * len(series.points))
    axes = figure.subplots(len(series.points), squeeze=False)[:, 0]
    for panel, point in zip(axes, series.points, strict=True):
        shown: list[Way] = [way for way in reversed(ways) if way in point.splits]
        left = [0.0] * len(shown)
        for name, field, colour in _PARTS:
            times = [1e3 * float(getattr(point.splits[way], field)) for way in shown]
            panel.barh([_NAMES[way] for way in shown], times, left=left, color=colour, label=name)
            left = [before + time for before, time in zip(left, times, strict=True)]
        panel.set_title(f"{series.attention.upper()}, {point.tokens:,} tokens: ms to the first token", loc="left")
        panel.grid(axis="y", visible=False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(_PARTS), frameon=False)
    return figure


def throughput(pushed: Mapping[str, Mapping[int, Pushed]], roof: str) -> Any:
    """A matplotlib Figure: GB/s of rows alone by bytes, for each attention in `pushed`, beside one copy, the `roof`."""
    figure = _figure(9, 4.2)
    panel = figure.subplots()
    every = sorted({pushed_point for points in pushed.values() for pushed_point in points.values()})
    curves = [("", roof, every, [point.roof_s for point in every], {"color": _FAINT})]
    for number, (attention, points) in enumerate(pushed.items()):
        colour, ordered = ("#e07b1a", "#2f6fdb")[number % 2], sorted(points.values())
        ready = [point.ready_s for point in ordered]
        curves += [
            (attention, "writes", ordered, [point.push_s for point in ordered], {"color": colour, "marker": "o"}),
            (attention, "to READY", ordered, ready, {"color": colour, "linestyle": "--"}),
        ]
    for attention, curve, ordered, seconds, look in curves:
        sizes = [point.byte_count for point in ordered]
        rates = [size / took_s / 1e9 for size, took_s in zip(sizes, seconds, strict=True)]
        panel.plot(sizes, rates, label=f"{attention.upper()} {curve}".strip(), **look)
    panel.set_xscale("log")
    panel.set_ylim(bottom=0)
    panel.set_xlabel("bytes of one prompt's KV")
    panel.set_ylabel("GB/s")
    panel.set_title("Rows alone, from anywhere in prefill's pool into one run of decode's arena", loc="left")
    panel.legend(frameon=False)
    return figure


def timeline(run: Run, title: str) -> Any:
    """A matplotlib Figure: the whole of a prompt, what follows its last layers, and the first step that swaps in."""
    lanes = [(f"{process} {name}", _tracks(run.of(process, *of))) for process, name, of in _LANES]
    if admission := _admission(run):
        lanes = [(name, [[admission]] if name == "decode admission" else tracks) for name, tracks in lanes]
    lanes = [(name, tracks) for name, tracks in lanes if tracks]
    windows = _windows(run)
    rows = sum(len(tracks) for _, tracks in lanes) + 0.4 * len(lanes)
    figure = _figure(11.8, 0.7 + len(windows) * (0.55 + 0.19 * rows))
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    panels = figure.subplots(len(windows), squeeze=False)[:, 0]
    for panel, (name, window) in zip(panels, windows, strict=True):
        _draw(panel, lanes, run, window)
        panel.set_title(name, loc="left")
    panels[-1].set_xlabel("ms since the prompt was sent")
    return figure


def _draw(
    panel: Any, lanes: Sequence[tuple[str, list[list[TimedSpan]]]], run: Run, window: tuple[float, float]
) -> None:
    """Lanes from the top downwards, their spans in ms."""
    y, ticks = 0.0, list[float]()
    for _, tracks in lanes:
        ticks.append(y + (len(tracks) - 1) / 2)
        for track in tracks:
            shown = [span for span in track if window[0] < 1e3 * (span.end_s - run.asked_s)]
            for number, span in enumerate(shown):
                begin, width = 1e3 * (span.begin_s - run.asked_s), 1e3 * span.seconds
                if begin >= window[1]:
                    continue
                colours = _COLOURS[span.lane]
                turn = span.layer if span.layer >= 0 and span.lane != "swap-in" else number
                colour = colours[turn % len(colours)]
                panel.broken_barh([(begin, width)], (y - 0.42, 0.84), facecolor=colour)
                left, right = max(begin, window[0]), min(begin + width, window[1])
                text = str(span.layer) if span.layer >= 0 else span.name
                if right - left > (window[1] - window[0]) * (0.003 + 0.005 * len(text)):
                    ink = "black" if colour in _PALE else "white"
                    panel.text((left + right) / 2, y, text, color=ink, size=6.5, ha="center", va="center")
            y += 1.0
        y += 0.4
    split = run.split
    ready = 1e3 * (split.ask_s + split.compute_s + split.exposed_s)
    panel.axvline(ready, color="#c2255c", linestyle="--", linewidth=1)
    panel.annotate("READY", (ready, -0.9), color="#c2255c", size=8, annotation_clip=True)
    panel.set_xlim(*window)
    panel.set_ylim(y - 0.8, -1.0)
    panel.set_yticks(ticks, [name for name, _ in lanes])
    panel.grid(axis="y", visible=False)


def _windows(run: Run) -> list[tuple[str, tuple[float, float]]]:
    """The whole, then its parts that are drawn larger: their titles, and from when to when in ms."""
    split, steps, layers = run.split, run.of("decode", "step"), run.of("prefill", "compute")
    end_s = max(span.end_s for span in run.spans) - run.asked_s
    ready_s, tail_s = split.ask_s + split.compute_s + split.exposed_s, max(split.tail_s, 1e-4)
    begin_s = max(layers[-1].end_s - run.asked_s - 2.2 * tail_s, 0.0) if layers else 0.0
    windows = [
        ("The whole", (0.0, end_s)),
        ("Its end, drawn larger", (begin_s, min(end_s, ready_s + split.admission_s + 0.8 * tail_s))),
    ]
    if steps and run.of("decode", "swap-in"):
        step = steps[0].begin_s - run.asked_s, steps[0].end_s - run.asked_s
        windows.append(("Decode's first step, drawn larger", step))
    return [(name, (1e3 * begin, 1e3 * end)) for name, (begin, end) in windows]


def _admission(run: Run) -> TimedSpan | None:
    """READY to the first step, which no process reports as a span: two threads take part in it."""
    landing, steps = run.of("decode", "landing"), run.of("decode", "step")
    if not landing or not steps:
        return None
    return TimedSpan(
        process="decode", lane="admission", name="READY to the first step", begin_s=landing[0].end_s,
        end_s=steps[0].begin_s, room=run.prompt.room,
    )  # fmt: skip


def _tracks(spans: Sequence[TimedSpan]) -> list[list[TimedSpan]]:
    """Spans in order of their begin; those that overlap lie below one another, as far as there is room."""
    tracks: list[list[TimedSpan]] = []
    for span in spans:
        free = next((track for track in tracks if track[-1].end_s <= span.begin_s), None)
        if free is None and len(tracks) < _TRACKS_MAX:
            tracks.append(free := [])
        (free if free is not None else min(tracks, key=lambda track: track[-1].end_s)).append(span)
    return tracks
