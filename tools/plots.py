"""Draws the plots of README and docs/sglang.md from tables of docs/figures: `python -m tools.plots` writes them.

Bars are medians of hand-offs with one client, by prompt length, on a logarithmic axis. Colours follow the reader's
scheme.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import TypeAlias

_DOCS = Path(__file__).parents[1] / "docs"
# Of each plot, by the document of its figures: each fleet's heading, the class of its bars, and how it is named.
LATEST, FIRST = "### Two cards again", "## On two cards, beside vLLM's own connectors"
TWO_GPUS = "##### On two GPUs"
Fleets: TypeAlias = dict[str, tuple[str, str, str]]
PLOTS: dict[str, tuple[Path, Fleets]] = {
    "vllm.md": (
        _DOCS / "handoff.svg",
        {
            "PDTransfer": (LATEST, "ours", "pdtransfer"),
            "Nixl": (LATEST, "other", "NIXL"),
            "Mooncake": (FIRST, "third", "Mooncake (an earlier run)"),
        },
    ),
    "sglang.md": (
        _DOCS / "handoff-sglang.svg",
        {
            "pdtransfer": (TWO_GPUS, "ours", "pdtransfer"),
            "NIXL": (TWO_GPUS, "other", "NIXL"),
            "Mooncake": (TWO_GPUS, "third", "Mooncake over TCP"),
        },
    ),
}
_ROW = re.compile(r"^\| (\w+) \| ([\d,]+) \| 1 \|.*\| ([\d,.]+), [\d,.]+ \| [^|]+ \|$", re.MULTILINE)
_WIDTH, _LEFT, _TOP, _BAR, _GAP = 720, 96, 52, 15, 9
_LOWEST_MS, _HIGHEST_MS = 1.0, 3000.0
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .small { font-size: 11.5px; fill: #59636e }
  .ours { fill: #0969da } .other { fill: #bc4c00 } .third { fill: #8250df }
  line { stroke: #d1d9e0 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .small { fill: #9198a1 } line { stroke: #3d444d }
    .ours { fill: #4493f8 } .other { fill: #f0883e } .third { fill: #ab7df8 }
  }
"""


def medians(document: str, fleets: Fleets) -> dict[int, dict[str, float]]:
    """Milliseconds by tokens of the prompt and fleet, in the order of the table; of several runs the first."""
    found: dict[int, dict[str, float]] = {}
    for fleet, (heading, *_) in fleets.items():
        [section] = re.findall(rf"^{re.escape(heading)}$(.*?)^#", document, re.DOTALL | re.MULTILINE)
        for name, tokens, ms in _ROW.findall(section):
            if name == fleet:
                found.setdefault(int(tokens.replace(",", "")), {}).setdefault(fleet, float(ms.replace(",", "")))
    return found


def drawn(figures: dict[int, dict[str, float]], fleets: Fleets) -> str:
    """The plot as SVG."""

    def x_of(ms: float) -> float:
        share = math.log(ms / _LOWEST_MS) / math.log(_HIGHEST_MS / _LOWEST_MS)
        return round(_LEFT + share * (_WIDTH - _LEFT - 60), 1)

    lines: list[str] = []
    y = _TOP
    for tokens, by_fleet in figures.items():
        lines.append(f'<text x="{_LEFT - 10}" y="{y + 1.5 * _BAR + 4}" text-anchor="end">{tokens:,}</text>')
        for fleet, (_, name, label) in fleets.items():
            if fleet in by_fleet:
                ms = by_fleet[fleet]
                width = round(x_of(ms) - _LEFT, 1)
                lines.append(f'<rect class="{name}" x="{_LEFT}" y="{y}" width="{width}" height="{_BAR - 3}" rx="2"/>')
                shown = f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}"
                lines.append(f'<text class="small" x="{x_of(ms) + 5}" y="{y + 11.5}">{shown} ms</text>')
            else:
                lines.append(
                    f'<text class="small" x="{_LEFT + 5}" y="{y + 11.5}">{label.partition(" (")[0]}: not run</text>'
                )
            y += _BAR
        y += _GAP
    axis = [
        f'<line x1="{x_of(ms)}" y1="{_TOP - 8}" x2="{x_of(ms)}" y2="{y - _GAP + 4}"/>'
        f'<text class="small" x="{x_of(ms)}" y="{y + 6}" text-anchor="middle">{text}</text>'
        for ms, text in ((1, "1"), (10, "10"), (100, "100"), (1000, "1,000 ms, log scale"))
    ]
    names = [
        f'<rect class="{name}" x="{_LEFT + 110 * at}" y="24" width="12" height="12" rx="2"/>'
        f'<text x="{_LEFT + 110 * at + 18}" y="35">{label}</text>'
        for at, (_, name, label) in enumerate(fleets.values())
    ]
    height = y + 12
    title = "From prefill's answer to decode's first token, median, by prompt length in tokens"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">',
            f"<title>{title}</title>",
            f"<style>{_STYLE}</style>",
            f'<text x="0" y="14">{title}</text>',
            *names,
            *axis,
            *lines,
            "</svg>",
            "",
        ]
    )


def plot(name: str) -> tuple[Path, str]:
    """Where the plot of a document of docs/figures is kept, and the plot as SVG."""
    path, fleets = PLOTS[name]
    return path, drawn(medians((_DOCS / "figures" / name).read_text(encoding="utf-8"), fleets), fleets)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tools.plots", description=(__doc__ or "").partition("\n")[0]).parse_args()
    for path, text in map(plot, PLOTS):
        path.write_text(text, encoding="utf-8")
