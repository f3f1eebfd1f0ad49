"""The report of `bench pd`: a page with every figure and picture in it, the pictures as files, and the spans."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..tracing.trace import write
from .pd import Goal, Point, Result, Series, goals
from .pd_drawing import throughput, timeline
from .pd_rank import Way
from .svg import FONT, Picture, style

_PARTS = (  # of a time to the first token, and in which colour
    ("ask", "ask_s", "control"),
    ("prefill's compute", "compute_s", "compute"),
    ("exposed transfer", "exposed_s", "push"),
    ("admission", "admission_s", "admission"),
    ("first step", "step_s", "step"),
)
_NAMES: dict[Way, str] = {
    "auto": "as chosen by size",
    "layers": "layer by layer",
    "end": "all at the end",
    "none": "nothing leaves",
}
_READING = (
    "Rest on a bar to read what it is. A push begins when the writer is given it and ends when its loop has heard so; "
    "what a card computes is timed by the card's own events."
)
_UNLIKE = (
    "What others have published of transfers between hosts, over networks of up to 200 GB/s with all cards of a node, "
    "and larger models; here rows cross within one host, from one card at most. Shares of a line and of a time compare "
    "in kind, not in size; how much pipelining saves depends on how long the transfer is beside the computing, and "
    "compares in its sign alone."
)
_OTHERS = (  # what, and what is published
    (
        "transfer, of the time to the first token",
        "2.4 % (SGLang, Mooncake), 4.2 % (vLLM, Mooncake), 32 K tokens, 12.6 GB",
    ),
    ("sent as computed, against all at the end: time to the first token", "-48 to -68 % at 1-8 K tokens, +18 % at 256"),
    ("of the line's rate", "12 % at 49 MB, 50 % at 394 MB, 71-82 % at 12.6 GB"),
)
_CSS = f"""
body{{margin:0 auto;max-width:1220px;padding:24px 20px 60px;font:15px/1.5 {FONT}}}
body{{background:var(--paper);color:var(--ink)}}.faint{{color:var(--faint)}}p{{max-width:78ch}}
h1{{font-size:25px;margin:8px 0 2px}}h2{{font-size:19px;margin:38px 0 6px}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:10px 0 18px}}
th{{font-weight:600;text-align:left;color:var(--faint);font-size:13px}}
th,td{{padding:4px 14px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top}}td.n,th.n{{text-align:right}}
.good{{color:var(--good);font-weight:600}}.bad{{color:var(--bad);font-weight:600}}
figure{{margin:14px 0 26px;overflow-x:auto}}svg{{max-width:100%;height:auto}}
details>summary{{cursor:pointer;margin:6px 0}}.key span{{display:inline-block;margin-right:18px}}
.key i{{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}}
"""


def write_report(result: Result, directory: Path) -> list[Path]:
    """report.html, timeline.svg, throughput.svg and spans.json in `directory`, which is made; nothing in them fetches
    anything."""
    directory.mkdir(parents=True, exist_ok=True)
    page, shown, chart, spans = (
        directory / name for name in ("report.html", "timeline.svg", "throughput.svg", "spans.json")
    )
    series, point = _foremost(result)
    page.write_text(_page(result))
    shown.write_text(_timeline(series, point, "auto").alone())
    chart.write_text(_throughput(result).alone())
    points = (point for each in result.series for point in each.points)
    write(spans, [span for point in points for run in point.shown.values() for span in run.spans])
    return [page, shown, chart, spans]


def _foremost(result: Result) -> tuple[Series, Point]:
    """What a picture alone shows: of the first attention the longest prompt of no more than 8,192 tokens."""
    series = result.series[0]
    return series, [point for point in series.points if point.tokens <= 8_192 or point is series.points[0]][-1]


def _timeline(series: Series, point: Point, way: Way) -> Picture:
    run = point.shown[way]
    split = run.split
    what = f"{series.attention.upper()}, a prompt of {point.tokens:,} tokens, {point.byte_count / 1e6:,.1f} MB of KV"
    parts = (
        ("prefill", split.compute_s), ("exposed transfer", split.exposed_s), ("admission", split.admission_s),
        ("first step", split.step_s),
    )  # fmt: skip
    told = ", ".join(f"{name} {1e3 * seconds:.3f}" for name, seconds in parts)
    label = f"decode's first token after {1e3 * split.ttft_s:.2f} ms: {told}"
    return timeline(run, named=f"{what}, {_NAMES[way]}", label=label)


def _throughput(result: Result) -> Picture:
    cards = "cpu" not in result.devices
    return throughput(
        {series.attention.upper(): series.pushed for series in result.series},
        named="Rows alone, from anywhere in prefill's pool into one run of decode's arena",
        roof="DMA" if cards else "memcpy",
    )


def _page(result: Result) -> str:
    prefill, decode = result.devices
    about = f"pdtransfer bench pd: prefill on {prefill}, decode on {decode}, chunks of {result.chunk_tokens:,} tokens; "
    about += f"medians of {result.rounds} rounds, pictures of the round nearest to them."
    body = ["<h1>Where the time to the first token goes</h1>", f'<p class="faint">{about}</p>']
    body += ["<h2>Goals</h2>", _goals(goals(result)), "<h2>By size</h2>", _legend()]
    for series in result.series:
        body.append(f"<h3>{series.attention.upper()}</h3>")
        body += [f"<figure>{_bars(point).inline()}</figure>" for point in series.points]
        body.append(_splits(series))
    body += ["<h2>Beside other systems</h2>", f"<p>{_UNLIKE}</p>", _beside(result)]
    body += ["<h2>GB/s by size</h2>", f"<figure>{_throughput(result).inline()}</figure>", _rates(result)]
    if result.both is not None:
        alone, together = result.both
        pairs = ", ".join(f"card {at}: {together[at]:.1f} GB/s beside {alone[at]:.1f} alone" for at in range(2))
        body.append(f"<p>Both cards at once: {pairs}.</p>")
    body += ["<h2>Layer by layer</h2>", f"<p>{_READING}</p>"]
    for series in result.series:
        for point in series.points:
            body += [_unfolding(series, point, way) for way in ("auto", "end")]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    head += f"<title>pdtransfer bench pd</title><style>{style()}{_CSS}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _unfolding(series: Series, point: Point, way: Way) -> str:
    """A timeline that a reader opens, or is open already."""
    title = f"{series.attention.upper()}, {point.tokens:,} tokens, {_NAMES[way]}"
    drawn = _timeline(series, point, way).inline()
    opened = " open" if way == "auto" else ""
    return f"<details{opened}><summary>{escape(title)}</summary><figure>{drawn}</figure></details>"


def _goals(found: list[Goal]) -> str:
    rows: list[str] = []
    for goal in found:
        value = "" if goal.value is None else _told(goal, goal.value)
        met = {
            True: '<span class="good">met</span>', False: '<span class="bad">missed</span>', None: "not measured here",
        }[goal.met]  # fmt: skip
        aim = f"{'at least' if goal.at_least else 'at most'} {_told(goal, goal.aim)}"
        rows.append(f'<tr><td>{escape(goal.name)}</td><td class="n">{value}</td><td>{aim}</td><td>{met}</td></tr>')
    return f'<table><tr><th>goal</th><th class="n">measured</th><th>aim</th><th></th></tr>{"".join(rows)}</table>'


def _told(goal: Goal, value: float) -> str:
    return f"{value:.4g} {goal.unit}" if goal.unit else f"{100 * value:.4g} %"


def _legend() -> str:
    keys = "".join(f'<span><i style="background:var(--{colour})"></i>{name}</span>' for name, _, colour in _PARTS)
    return f'<p class="key">{keys}</p>'


def _bars(point: Point) -> Picture:
    """One below another, to one scale: how long each way takes to the first token, and what of."""
    ways: list[Way] = [way for way in point.splits if way != "none"]
    picture = Picture(1_180, 34 + 26 * len(ways), named=f"{point.tokens:,} tokens")
    picture.text(0, 18, f"{point.tokens:,} tokens", kind="title")
    most = max(point.splits[way].ttft_s for way in ways)
    for number, way in enumerate(ways):
        split, x, y = point.splits[way], 150.0, 28.0 + 26 * number
        picture.text(140, y + 14, _NAMES[way], kind="small faint", anchor="end")
        for name, field, colour in _PARTS:
            seconds = float(getattr(split, field))
            width = seconds / most * 900
            picture.rect(x, y, width, 19, colour, title=f"{name}: {1e3 * seconds:,.3f} ms")
            x += width
        picture.text(x + 8, y + 14, f"{1e3 * split.ttft_s:,.2f} ms", kind="small")
    return picture


def _splits(series: Series) -> str:
    parts = tuple(f"{name} ms" for name, _, _ in _PARTS)
    names = ("tokens", "rows leave", "TTFT ms", *parts, "tokens/s", "last layer to READY ms", "writes")
    rows: list[list[str]] = []
    for point in series.points:
        for way, split in point.splits.items():
            crossed = way != "none"
            cells = [f"{point.tokens:,}", _NAMES[way], f"{1e3 * split.ttft_s:,.2f}" if crossed else ""]
            for _, field, _ in _PARTS:
                value = f"{1e3 * getattr(split, field):,.3f}"
                cells.append(value if crossed or field in ("ask_s", "compute_s") else "")
            cells.append(f"{point.tokens / split.compute_s:,.0f}")
            rows.append(cells + ([f"{1e3 * split.tail_s:,.3f}", str(split.writes)] if crossed else ["", ""]))
    return _table(names, rows, words=1)


def _beside(result: Result) -> str:
    """Published figures, and those of this run that they may be compared with."""
    rows: list[list[str]] = []
    for series in result.series:
        own: tuple[list[str], list[str], list[str]] = [], [], []
        for point in series.points:
            auto, end = point.splits["auto"], point.splits["end"]
            shares = (f"{100 * split.exposed_s / split.ttft_s:.3g} %" for split in (auto, end))
            own[0].append(f"{point.tokens:,} tokens: {' (all at the end '.join(shares)})")
            own[1].append(f"{point.tokens:,} tokens: {100 * (auto.ttft_s / end.ttft_s - 1):+.3g} %")
        for tokens, pushed in sorted(series.pushed.items()):
            own[2].append(
                f"{pushed.byte_count / 1e6:,.3g} MB ({tokens:,}): {100 * pushed.roof_s / pushed.push_s:.3g} %"
            )
        for (what, published), here in zip(_OTHERS, own, strict=True):
            rows.append([what, series.attention.upper(), published, "; ".join(here)])
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", "", "published", "here"))
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _rates(result: Result) -> str:
    rows: list[list[str]] = []
    for series in result.series:
        for tokens, pushed in sorted(series.pushed.items()):
            rates = [pushed.byte_count / took_s / 1e9 for took_s in (pushed.push_s, pushed.ready_s, pushed.roof_s)]
            cells = [f"{tokens:,}", series.attention.upper(), f"{pushed.byte_count / 1e6:,.2f}"]
            cells += [*(f"{rate:.2f}" for rate in rates), f"{pushed.roof_s / pushed.push_s:.2f}"]
            rows.append(cells)
    names = ("tokens", "", "MB", "writes GB/s", "to READY GB/s", "roof GB/s", "writes of the roof")
    return _table(names, rows, words=1)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], *, words: int) -> str:
    """All but column `words` are numbers."""
    kinds = ["" if at == words else ' class="n"' for at in range(len(names))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, names, strict=True))
    lines = ("".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
